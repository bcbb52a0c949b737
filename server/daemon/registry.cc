#include "server/daemon/registry.h"

#include <algorithm>
#include <climits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/limits.h"
#include "server/base/peer_process.h"
#include "server/base/random_bytes.h"

namespace kvpool {
namespace {

bool IsOn(const Space& space, absl::Span<const size_t> devices) {
  const std::vector<size_t>& own = space.facts.rank_devices;
  return std::find_first_of(own.begin(), own.end(), devices.begin(), devices.end()) != own.end();
}

}  // namespace

// --------------------------------------------------------------------------------------------- attachments

Registry::Attached Registry::Attach(std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                                    const v1::AttachHello& hello) {
  MutexLock lock(&mu_);
  const Attached attached{AttachId{next_attach_++}, RandomBytes(kAttachTokenBytes)};
  Attachment& attachment = attachments_[attached.id];
  attachment.peer = std::move(peer);
  attachment.credentials = credentials;
  attachment.client_name = hello.client_name();
  attachment.gives_back = hello.gives_back();
  attachment.holes = hello.holes();
  attachment.token = attached.token;
  attach_tokens_[attached.token] = attached.id;
  return attached;
}

absl::StatusOr<Registry::Claimed> Registry::Claim(const std::string& token, bool new_session) {
  MutexLock lock(&mu_);
  const auto it = attach_tokens_.find(token);
  if (it == attach_tokens_.end()) {
    return absl::UnauthenticatedError("attach_token is of no connection to the attach socket");
  }
  Attachment& attachment = attachments_.at(it->second);
  if (attachment.use != Use::kWaiting) {
    return absl::FailedPreconditionError("attach_token was used already; each connection serves once");
  }
  if (new_session) {
    if (draining_) return absl::UnavailableError("the daemon is draining: it opens no sessions");
    const size_t sessions = sessions_.size() + opening_sessions_;
    if (sessions >= max_sessions_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(sessions, " sessions are open or not yet gone; max_sessions is ", max_sessions_));
    }
    ++opening_sessions_;
  }
  attachment.use = Use::kOpening;
  return Claimed{.id = it->second,
                 .peer = attachment.peer,
                 .credentials = attachment.credentials,
                 .client_name = attachment.client_name,
                 .gives_back = attachment.gives_back,
                 .holes = attachment.holes};
}

bool Registry::Unclaim(AttachId id, bool new_session) {
  MutexLock lock(&mu_);
  if (new_session) --opening_sessions_;
  attachments_.at(id).use = Use::kWaiting;
  ForgetIfOver(id);
  return attachments_.contains(id);
}

Registry::Fate Registry::Bind(AttachId id, const std::shared_ptr<Session>& session, Member* member,
                              bool new_session, KeptOfMember kept) {
  MutexLock lock(&mu_);
  Attachment& attachment = attachments_.at(id);
  attachment.use = Use::kBound;
  attachment.kept = std::move(kept);
  attachment.member = std::shared_ptr<Member>(session, member);
  member_tokens_[member->identity.token] = attachment.member;
  ++mappings_[MappingOf(attachment)];
  if (new_session) {
    --opening_sessions_;
    AddSession(session);
  }
  const Fate fate = attachment.fate;
  ForgetIfOver(id);
  return fate;
}

void Registry::Resume(const std::shared_ptr<Session>& session, Member* member, KeptOfMember kept) {
  MutexLock lock(&mu_);
  const AttachId id{next_attach_++};
  member->identity.attach = id;
  Attachment& attachment = attachments_[id];
  attachment.credentials = member->identity.credentials;
  attachment.client_name = member->identity.client_name;
  attachment.use = Use::kBound;
  attachment.kept = std::move(kept);
  attachment.member = std::shared_ptr<Member>(session, member);
  attachment.absent = true;
  absent_.insert(id);
  member_tokens_[member->identity.token] = attachment.member;
  ++mappings_[MappingOf(attachment)];
  AddSession(session);
}

void Registry::AddSession(const std::shared_ptr<Session>& session) {
  if (!sessions_.try_emplace(session->terms.id, session).second) return;
  ++sessions_of_[session->space->facts.tenant];
  tenants_.store(sessions_of_.size(), std::memory_order_relaxed);
}

void Registry::Share(Session* session, SessionShare share) {
  MutexLock lock(&mu_);
  if (sessions_.contains(session->terms.id)) session->share = std::move(share);
}

absl::StatusOr<std::shared_ptr<Member>> Registry::ComeBack(std::string_view token,
                                                           std::shared_ptr<AttachPeer> peer,
                                                           const PeerCredentials& credentials) {
  MutexLock lock(&mu_);
  const auto known = member_tokens_.find(absl::string_view(token.data(), token.size()));
  if (known == member_tokens_.end()) {
    return absl::NotFoundError("hello.member_token is of no session that this daemon knows");
  }
  const AttachId id = known->second->identity.attach;
  Attachment& attachment = attachments_.at(id);
  if (!attachment.absent || attachment.fate.hung_up) {
    return absl::FailedPreconditionError(attachment.absent
                                             ? "hello.member_token is of a member that came back too late"
                                             : "hello.member_token is of a member that is connected");
  }
  // The kept descriptor is of a process that lives, so that its pid is nobody else's.
  if (credentials.pid <= 0 || credentials.pid != attachment.credentials.pid ||
      ProcessEnded(attachment.credentials.pidfd->get())) {
    return absl::PermissionDeniedError(absl::StrCat(
        "hello.member_token is of pid ", attachment.credentials.pid, ", not of pid ", credentials.pid));
  }
  const auto mapping = mappings_.find(MappingOf(attachment));
  if (--mapping->second == 0) mappings_.erase(mapping);
  attachment.peer = std::move(peer);
  attachment.credentials = credentials;
  attachment.absent = false;
  absent_.erase(id);
  ++mappings_[MappingOf(attachment)];
  return attachment.member;
}

std::vector<Registry::Absent> Registry::AbsentMembers() {
  MutexLock lock(&mu_);
  std::vector<Absent> absent;
  for (const AttachId id : absent_) {
    const Attachment& attachment = attachments_.at(id);
    absent.push_back({id, attachment.credentials.pidfd, attachment.fate.hung_up});
  }
  return absent;
}

bool Registry::GiveUpAbsent(AttachId id) {
  MutexLock lock(&mu_);
  if (!absent_.contains(id)) return false;
  attachments_.at(id).fate.hung_up = true;
  return true;
}

std::shared_ptr<Member> Registry::MemberOf(AttachId id) {
  MutexLock lock(&mu_);
  const auto it = attachments_.find(id);
  return it == attachments_.end() ? nullptr : it->second.member;
}

Registry::HungUp Registry::HangUp(AttachId id) {
  MutexLock lock(&mu_);
  const auto it = attachments_.find(id);
  if (it == attachments_.end()) return {};
  Attachment& attachment = it->second;
  attachment.fate.hung_up = true;
  HungUp hung_up{.member = attachment.member, .awaited = attachment.use != Use::kWaiting};
  hung_up.stood_for = ForgetIfStoodFor(id);
  if (hung_up.stood_for) {
    hung_up.awaited = false;
  } else {
    ForgetIfOver(id);
  }
  return hung_up;
}

std::shared_ptr<Member> Registry::Die(AttachId id) {
  MutexLock lock(&mu_);
  const auto it = attachments_.find(id);
  // An opening that failed may have let go of a connection that was hung up on.
  if (it == attachments_.end()) return nullptr;
  it->second.fate.dead = true;
  std::shared_ptr<Member> member = it->second.member;
  ForgetIfOver(id);
  return member;
}

void Registry::ForgetIfOver(AttachId id) {
  const auto it = attachments_.find(id);
  const Attachment& attachment = it->second;
  // While it is being opened, Bind or Unclaim comes.
  if (!attachment.fate.hung_up || attachment.use == Use::kOpening) return;
  if (attachment.use == Use::kBound && !attachment.fate.dead) return;
  attach_tokens_.erase(attachment.token);
  absent_.erase(id);
  if (attachment.member != nullptr) {
    member_tokens_.erase(attachment.member->identity.token);
    const auto mapping = mappings_.find(MappingOf(attachment));
    if (--mapping->second == 0) mappings_.erase(mapping);
  }
  attachments_.erase(it);
}

Registry::Mapping Registry::MappingOf(const Attachment& attachment) {
  return {attachment.credentials.process, attachment.member->session->space->facts.id};
}

bool Registry::ForgetIfStoodFor(AttachId id) {
  const auto it = attachments_.find(id);
  if (it == attachments_.end()) return false;
  Attachment& attachment = it->second;
  if (attachment.use != Use::kBound || !attachment.fate.hung_up) return false;
  if (sessions_.contains(attachment.member->session->terms.id)) return false;
  const Mapping mapping = MappingOf(attachment);
  if (mapping.first == 0 || mappings_.at(mapping) == 1) return false;
  attachment.fate.dead = true;
  ForgetIfOver(id);
  return true;
}

std::shared_ptr<Member> Registry::FindMember(std::string_view token) {
  MutexLock lock(&mu_);
  const auto it = member_tokens_.find(absl::string_view(token.data(), token.size()));
  return it == member_tokens_.end() ? nullptr : it->second;
}

// ------------------------------------------------------------------------------------------------ sessions

uint64_t Registry::NextSessionId() {
  MutexLock lock(&mu_);
  return next_session_++;
}

std::shared_ptr<Session> Registry::FindSession(uint64_t id) {
  MutexLock lock(&mu_);
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<Session>> Registry::Sessions() {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Session>> sessions;
  for (const auto& [id, session] : sessions_) sessions.push_back(session);
  return sessions;
}

void Registry::Ended(EndKind kind) {
  MutexLock lock(&mu_);
  ++ended_[static_cast<size_t>(kind)];
}

std::vector<std::shared_ptr<Member>> Registry::Gone(uint64_t id) {
  std::vector<std::shared_ptr<Member>> stood_for;
  std::shared_ptr<Session> session;  // Destroyed outside the mutex.
  MutexLock lock(&mu_);
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return stood_for;
  session = std::move(it->second);
  session->share = {};
  sessions_.erase(it);
  const auto of_tenant = sessions_of_.find(session->space->facts.tenant);
  if (--of_tenant->second == 0) sessions_of_.erase(of_tenant);
  tenants_.store(sessions_of_.size(), std::memory_order_relaxed);
  std::vector<std::shared_ptr<Member>> members;
  {
    SpaceLock space_lock(*session->space);
    for (const auto& member : session->members) members.emplace_back(session, member.get());
  }
  for (std::shared_ptr<Member>& member : members) {
    if (ForgetIfStoodFor(member->identity.attach)) stood_for.push_back(std::move(member));
  }
  return stood_for;
}

std::map<std::string, uint64_t> Registry::ended_by_reason() {
  MutexLock lock(&mu_);
  std::map<std::string, uint64_t> ended;
  for (size_t kind = 0; kind < ended_.size(); ++kind) {
    ended[std::string(EndKindName(static_cast<EndKind>(kind)))] = ended_[kind];
  }
  return ended;
}

// -------------------------------------------------------------------------------------------------- spaces

absl::StatusOr<std::shared_ptr<Space>> Registry::OpenSpace(const std::string& key, const MakeSpace& make) {
  MutexLock lock(&mu_);
  auto it = spaces_.find(key);
  if (it == spaces_.end()) {
    absl::StatusOr<std::shared_ptr<Space>> space = make(next_space_);
    if (!space.ok()) return space.status();
    ++next_space_;
    {
      SpaceLock space_lock(**space);
      (*space)->state.sessions.SetDraining(draining_);
    }
    it = Enter(key, *std::move(space)).first;
  }
  ++it->second.opening;
  return it->second.space;
}

bool Registry::Adopt(const std::string& key, std::shared_ptr<Space> space) {
  MutexLock lock(&mu_);
  return Enter(key, std::move(space)).second;
}

std::pair<std::map<std::string, Registry::Entry>::iterator, bool> Registry::Enter(
    const std::string& key, std::shared_ptr<Space> space) {
  const auto entered = spaces_.emplace(key, Entry{std::move(space), 0});
  Space& in = *entered.first->second.space;
  if (!entered.second) return entered;
  SpaceLock space_lock(in);
  for (size_t left = suspended_.count(in.facts.tenant); left > 0; --left) in.state.below.Suspend();
  return entered;
}

std::vector<std::shared_ptr<Space>> Registry::AllOf(const std::string& tenant) {
  std::vector<std::shared_ptr<Space>> all;
  for (const auto& [key, entry] : spaces_) {
    if (entry.space->facts.tenant == tenant) all.push_back(entry.space);
  }
  for (const auto& space : closing_) {
    if (space->facts.tenant == tenant) all.push_back(space);
  }
  return all;
}

void Registry::Suspend(const std::string& tenant) {
  MutexLock lock(&mu_);
  suspended_.insert(tenant);
  for (const std::shared_ptr<Space>& space : AllOf(tenant)) {
    SpaceLock space_lock(*space);
    space->state.below.Suspend();
  }
}

void Registry::Resume(const std::string& tenant) {
  MutexLock lock(&mu_);
  suspended_.erase(suspended_.find(tenant));
  for (const std::shared_ptr<Space>& space : AllOf(tenant)) {
    SpaceLock space_lock(*space);
    space->state.below.Resume();
  }
}

void Registry::StartBehind(uint64_t session, uint64_t space) {
  MutexLock lock(&mu_);
  next_session_ = std::max(next_session_, session + 1);
  next_space_ = std::max(next_space_, space + 1);
}

std::shared_ptr<Space> Registry::FinishOpening(const Space& space) {
  MutexLock lock(&mu_);
  const auto it = std::find_if(spaces_.begin(), spaces_.end(),
                               [&space](const auto& entry) { return entry.second.space.get() == &space; });
  if (it == spaces_.end() || --it->second.opening > 0) return nullptr;
  const std::shared_ptr<Space> finished = it->second.space;
  SpaceLock space_lock(*finished);
  const RecoveredPool& before = finished->state.sessions.recovered().blocks;
  if (!finished->state.sessions.idle() ||
      finished->state.pool.counters().sealed + before.cached + before.held > 0) {
    return nullptr;
  }
  finished->state.growth.Close();
  closing_.push_back(finished);
  spaces_.erase(it);
  return finished;
}

std::vector<std::shared_ptr<Space>> Registry::Spaces() {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Space>> spaces;
  for (const auto& [key, entry] : spaces_) spaces.push_back(entry.space);
  std::sort(spaces.begin(), spaces.end(),
            [](const auto& a, const auto& b) { return a->facts.id < b->facts.id; });
  return spaces;
}

std::shared_ptr<Space> Registry::FindSpace(uint64_t id) {
  MutexLock lock(&mu_);
  for (const auto& [key, entry] : spaces_) {
    if (entry.space->facts.id == id) return entry.space;
  }
  return nullptr;
}

std::set<std::string> Registry::TenantsAboveShare(absl::Span<const size_t> devices, v1::PriorityClass only) {
  struct OfTenant {
    uint64_t bytes = 0;
    uint64_t weight = 1;  // The largest of its spaces.
  };
  std::map<std::string, OfTenant> tenants;
  uint64_t all = 0, weights = 0;
  for (const auto& [key, entry] : spaces_) {
    const Space& space = *entry.space;
    if (!IsOn(space, devices)) continue;
    if (only != v1::PRIORITY_CLASS_UNSPECIFIED && space.priority() != only) continue;
    OfTenant& of_tenant = tenants[space.facts.tenant];
    of_tenant.bytes += space.slab_bytes();
    of_tenant.weight = std::max<uint64_t>(of_tenant.weight, space.weight());
    all += space.slab_bytes();
  }
  for (const auto& [tenant, of_tenant] : tenants) weights += of_tenant.weight;
  std::set<std::string> above;
  for (const auto& [tenant, of_tenant] : tenants) {
    // The product of a weight and a machine's memory has less than 60 bits.
    if (of_tenant.bytes > all * of_tenant.weight / weights) above.insert(tenant);
  }
  return above;
}

std::shared_ptr<Space> Registry::CloseIdle(uint64_t before_ms, absl::Span<const size_t> devices,
                                           const std::string* tenant, v1::PriorityClass most) {
  MutexLock lock(&mu_);
  std::set<std::string> above;
  if (!devices.empty()) above = TenantsAboveShare(devices);
  auto first = spaces_.end();
  // Its class, where room is made, whether its tenant is within its share, and when the space was last used: the least goes.
  std::tuple<int, bool, uint64_t> first_rank(INT_MAX, true, before_ms);
  for (auto it = spaces_.begin(); it != spaces_.end(); ++it) {
    Space& space = *it->second.space;
    if (it->second.opening > 0) continue;
    if (tenant != nullptr && space.facts.tenant != *tenant) continue;
    if (!devices.empty() && !IsOn(space, devices)) continue;
    const v1::PriorityClass priority = space.priority();
    if (priority > most) continue;
    SpaceLock space_lock(space);
    const auto& sessions = space.state.sessions;
    if (!sessions.idle() || (!devices.empty() && space.state.growth.slabs().empty())) continue;
    const std::tuple rank(devices.empty() ? 0 : static_cast<int>(priority),
                          !above.contains(space.facts.tenant), sessions.last_used_ms());
    if (sessions.last_used_ms() < before_ms && rank < first_rank) {
      first = it;
      first_rank = rank;
    }
  }
  if (first == spaces_.end()) return nullptr;
  std::shared_ptr<Space> space = std::move(first->second.space);
  spaces_.erase(first);
  closing_.push_back(space);
  SpaceLock space_lock(*space);
  space->state.growth.Close();
  return space;
}

bool Registry::MustYield(const Space& space, absl::FunctionRef<bool(const Space&)> may_have) {
  MutexLock lock(&mu_);
  const std::vector<size_t>& devices = space.facts.rank_devices;
  const v1::PriorityClass priority = space.priority();
  const std::set<std::string> above = TenantsAboveShare(devices, priority);
  const bool is_above = above.contains(space.facts.tenant);
  for (const auto& [key, entry] : spaces_) {
    Space& other = *entry.space;
    if (!IsOn(other, devices)) continue;
    const bool higher = other.priority() > priority;
    const bool equal = other.priority() == priority;
    if (!higher && !(equal && is_above && !above.contains(other.facts.tenant))) continue;
    SpaceLock space_lock(other);
    const Growth& growth = other.state.growth;
    // It may not have heard yet of what has come free.
    if (growth.NeedsSlab() || (higher && growth.blocked() && growth.short_of_blocks() && may_have(other)))
      return true;
  }
  return false;
}

std::vector<std::shared_ptr<Space>> Registry::Closing(absl::Span<const size_t> devices) {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Space>> closing;
  for (const auto& space : closing_) {
    if (IsOn(*space, devices)) closing.push_back(space);
  }
  return closing;
}

std::vector<std::shared_ptr<Space>> Registry::ClosingOf(const std::string& tenant) {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Space>> closing;
  for (const auto& space : closing_) {
    if (space->facts.tenant == tenant) closing.push_back(space);
  }
  return closing;
}

void Registry::Closed(const Space& space) {
  MutexLock lock(&mu_);
  spaces_closed_ += std::erase_if(closing_, [&space](const auto& other) { return other.get() == &space; });
}

uint64_t Registry::spaces_closed() {
  MutexLock lock(&mu_);
  return spaces_closed_;
}

uint32_t Registry::held_idle_spaces() {
  MutexLock lock(&mu_);
  uint32_t held = 0;
  for (const auto& [key, entry] : spaces_) {
    SpaceLock space_lock(*entry.space);
    held += entry.space->state.sessions.held_idle();
  }
  return held;
}

bool Registry::draining() {
  MutexLock lock(&mu_);
  return draining_;
}

void Registry::set_draining(bool draining) {
  MutexLock lock(&mu_);
  draining_ = draining;
}

}  // namespace kvpool
