// OpenSession and AddMember.
#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/or_exhausted.h"
#include "server/base/random_bytes.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/space_terms.h"
#include "server/replacement/policy.h"
#include "server/scoring/device_runner.h"
#include "server/space/device_budget.h"
#include "server/space/freed_memory.h"
#include "server/space/kept_facts.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

constexpr uint32_t kTableSessionsPerSession = 4;
// An opening looks so often whether the members have unmapped a slab of its own space.
constexpr auto kLeavingPause = std::chrono::milliseconds(1);

// Gives the attach token back unless the opening worked.
class Claim {
 public:
  static absl::StatusOr<Claim> Take(Registry* registry, const std::string& token, bool new_session) {
    ASSIGN_OR_RETURN(Registry::Claimed claimed, registry->Claim(token, new_session));
    return Claim(registry, std::move(claimed), new_session);
  }
  Claim(Claim&& other) noexcept
      : registry_(std::exchange(other.registry_, nullptr)),
        claimed_(std::move(other.claimed_)),
        new_session_(other.new_session_) {}
  ~Claim() {
    if (registry_ == nullptr) return;
    if (!registry_->Unclaim(claimed_.id, new_session_)) claimed_.peer->NotAwaited(claimed_.id);
  }
  const Registry::Claimed& operator*() const { return claimed_; }
  const Registry::Claimed* operator->() const { return &claimed_; }
  Registry::Fate Bind(const std::shared_ptr<Session>& session, Member* member, KeptOfMember kept) {
    return std::exchange(registry_, nullptr)
        ->Bind(claimed_.id, session, member, new_session_, std::move(kept));
  }

 private:
  Claim(Registry* registry, Registry::Claimed claimed, bool new_session)
      : registry_(registry), claimed_(std::move(claimed)), new_session_(new_session) {}

  Registry* registry_;
  Registry::Claimed claimed_;
  bool new_session_;
};

// While it lives the space can't be closed.
class Opening {
 public:
  using Retire = std::function<void(const std::shared_ptr<Space>&)>;
  Opening(Registry* registry, std::shared_ptr<Space> space, Retire retire)
      : registry_(registry), space_(std::move(space)), retire_(std::move(retire)) {}
  Opening(const Opening&) = delete;
  Opening& operator=(const Opening&) = delete;
  ~Opening() {
    if (const std::shared_ptr<Space> closed = registry_->FinishOpening(*space_)) retire_(closed);
  }

 private:
  Registry* const registry_;
  const std::shared_ptr<Space> space_;
  const Retire retire_;
};

MemberIdentity Identify(const Registry::Claimed& claimed, const v1::Role& role) {
  return {.attach = claimed.id,
          .peer = claimed.peer,
          .credentials = claimed.credentials,
          .client_name = claimed.client_name,
          .gives_back = claimed.gives_back,
          .holes = claimed.holes,
          .token = RandomBytes(kMemberTokenBytes),
          .scheduler = role.scheduler(),
          .rank = role.rank()};
}

// A space has the terms of a rule while a session opens by it, and afterwards if that succeeded.
class RuleTerms {
 public:
  // All outlive it.
  RuleTerms(Space* space, const AccessControl* access, const AccessRule* rule, v1::PriorityClass asked)
      : space_(*space), access_(*access), rule_(*rule), asked_(asked) {
    SpaceLock lock(space_);
    space_.BeginOpening(TermsOf(rule_, asked_));
  }
  ~RuleTerms() {
    SpaceLock lock(space_);
    space_.EndOpening();
  }
  RuleTerms(const RuleTerms&) = delete;
  RuleTerms& operator=(const RuleTerms&) = delete;
  void Keep() {
    SpaceLock lock(space_);
    // Daemon::ApplyRules comes before this and has no part in it, or behind it.
    space_.KeepTerms(rule_.name, TermsInForce(access_, rule_, space_.facts.tenant, asked_));
  }

 private:
  Space& space_;
  const AccessControl& access_;
  const AccessRule& rule_;
  const v1::PriorityClass asked_;
};

// A session whose guarantee is above what it may hold could never have it.
absl::Status CheckHeldBlocks(const AccessRule& rule, const v1::OpenSession& request) {
  if (request.guaranteed_blocks() <= rule.limits.held_blocks) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("guaranteed_blocks is ", request.guaranteed_blocks(), "; rule [", rule.name,
                   "] allows held-blocks = ", rule.limits.held_blocks, " of a session"));
}

// Whose memory an opening may ask for: what is promised is had of whoever has it.
v1::PriorityClass MostClassOf(const Session& session) {
  return session.terms.guaranteed_blocks > 0 ? v1::PriorityClass_MAX : session.space->priority();
}

// What is to be filled for a session.
struct Holes {
  uint32_t blocks = 0;
  uint32_t may_be_guaranteed = 0;  // What its rule would let it be guaranteed.
};

// Others have the memory that was in the holes by now. To fill them takes as much of it as a guarantee would bring, in whole slabs, and
// no more.
v1::PriorityClass MostClassFor(const Holes& holes, const Session& session) {
  const SpaceGeometry& geometry = session.space->facts.geometry;
  const uint64_t slab = std::max(1u, geometry.blocks_in(geometry.slab_bytes));
  const auto brings = [slab](uint64_t blocks) { return (blocks + slab - 1) / slab * slab; };
  const v1::PriorityClass own = session.space->priority();
  if (holes.blocks <= brings(session.terms.guaranteed_blocks)) return v1::PriorityClass_MAX;
  if (holes.blocks <= brings(holes.may_be_guaranteed)) return own;
  return static_cast<v1::PriorityClass>(own - 1);  // No space is below the lowest one.
}

// The reason for it, behind others.
std::string WhoGivesNothingFor(const Holes& holes, v1::PriorityClass most_class, const Session& session) {
  if (most_class == v1::PriorityClass_MAX) return "";
  const v1::PriorityClass own = session.space->priority();
  return absl::StrCat(
      "; for its ", holes.blocks, " blocks, more than guaranteed_blocks, ", session.terms.guaranteed_blocks,
      ", no space of a class above ", PriorityClassName(own), " gives",
      most_class < own
          ? absl::StrCat("; nor does one of this class, as they are more than that may be by its rule, ",
                         holes.may_be_guaranteed)
          : "");
}

absl::Status CheckPriority(const AccessRule& rule, const v1::OpenSession& request) {
  if (request.priority_class() <= rule.limits.priority) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("priority_class is ", PriorityClassName(request.priority_class()), "; rule [", rule.name,
                   "] gives priority = ", PriorityClassName(rule.limits.priority)));
}

// The cap on a session's blocks; 0: none.
uint32_t MostBlocks(const AccessRule& rule, const v1::OpenSession& request) {
  const uint32_t asked = request.max_blocks(), allowed = rule.limits.held_blocks;
  if (allowed == kNoAccessLimit) return asked;
  return asked == 0 ? allowed : std::min(asked, allowed);
}

// While it lives no hole comes about in the space.
class NoHoles {
 public:
  explicit NoHoles(Space* space) : space_(*space) {
    SpaceLock lock(space_);
    ++space_.state.give_back.rigid;
  }
  ~NoHoles() {
    SpaceLock lock(space_);
    --space_.state.give_back.rigid;
  }
  NoHoles(const NoHoles&) = delete;
  NoHoles& operator=(const NoHoles&) = delete;

 private:
  Space& space_;
};

// What the space lacks on each rank for the session's guarantee, at least for one block.
uint64_t MissingBytes(const Space& space, const Session& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(space.mu) {
  const BlockPool& pool = space.state.pool;
  const uint64_t there = uint64_t{pool.available()} - pool.promised() + space.state.growth.coming_blocks();
  const uint64_t guaranteed = session.limits().guaranteed;
  const SpaceGeometry& geometry = space.facts.geometry;
  const uint64_t bytes =
      std::max<uint64_t>(1, guaranteed - std::min(guaranteed, there)) * geometry.block_stride_bytes;
  return (bytes + geometry.unit_bytes - 1) / geometry.unit_bytes * geometry.unit_bytes;
}

template <typename Result>  // OpenSessionResult or AddMemberResult.
void FillMember(const Member& member, const SpaceFacts& facts, uint64_t epoch, Result* result) {
  result->set_member_token(member.identity.token);
  result->set_member(member.index);
  result->set_daemon_epoch(epoch);
  result->set_hash_seed(facts.hash_seed);
  result->set_block_stride_bytes(facts.geometry.block_stride_bytes);
  result->set_max_blocks(facts.geometry.max_blocks);
  result->set_kind(facts.kind);
  result->set_slab_bytes(facts.geometry.slab_bytes);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Space>> Daemon::OpenSpace(const v1::OpenSession& request,
                                                         const TenantScope& tenant) {
  const std::string key = SpaceKey(tenant.scope, request.fingerprint());
  return registry_->OpenSpace(key, [&](uint64_t id) -> absl::StatusOr<std::shared_ptr<Space>> {
    ASSIGN_OR_RETURN(SpaceFacts facts, DescribeSpace(options_, devices_, request, tenant, id));
    std::unique_ptr<SpaceTable> table;
    if (keeper_ != nullptr) {
      // Those that have ended, or are of earlier daemons, keep their holds until their processes end.
      ASSIGN_OR_RETURN(table,
                       SpaceTable::Make(facts, request, kTableSessionsPerSession * options_.max_sessions));
    }
    return MakeSpace(std::move(facts), std::move(table));
  });
}

absl::StatusOr<std::shared_ptr<Space>> Daemon::MakeSpace(SpaceFacts facts,
                                                         std::unique_ptr<SpaceTable> table) {
  ASSIGN_OR_RETURN(std::unique_ptr<ReplacementPolicy> policy, MakePolicy(NewSpacesPolicy(), facts));
  PoolOptions pool = PoolOptionsOf(options_, facts);
  facts.kept = table != nullptr;
  if (table != nullptr) table->Hold(&pool);
  std::vector<RunnerOrWhy> runners;
  for (const size_t device : facts.rank_devices) {
    runners.push_back({.runner = runners_[device].get(), .why = runner_errors_[device]});
  }
  const std::string what = absl::StrCat("tables of a space of ", facts.geometry.max_blocks,
                                        " blocks, which max_space_bytes bounds");
  ASSIGN_OR_RETURN(std::shared_ptr<Space> space, OrExhausted(what, [&] {
                     return std::make_shared<Space>(std::move(facts), pool,
                                                    Space::Parts{.policy = std::move(policy),
                                                                 .runners = std::move(runners),
                                                                 .budget = budget_.get(),
                                                                 .freed = freed_.get(),
                                                                 .event_log = event_log_.get(),
                                                                 .owner = this,
                                                                 .clock = clock_,
                                                                 .table = std::move(table),
                                                                 .keeper = keeper_,
                                                                 .measure_work = options_.measure_work,
                                                                 .verify = options_.verify});
                   }));
  if (tiers_ == nullptr || !space->facts.tier_space.has_value()) return space;
  const SpaceFacts& of_space = space->facts;
  const uint64_t value_bytes = of_space.layout.block_bytes() * of_space.devices.size();
  const uint64_t most = options_.tier_buffer_bytes;
  if (value_bytes > most) {
    LogWarning("space without a tier: its blocks are too large",
               {{"space", of_space.id}, {"value_bytes", value_bytes}, {"most_value_bytes", most}});
    return space;
  }
  if (const uint64_t of_tiers = tiers_->view()->most_value_bytes();
      !tiers_->empty() && value_bytes > of_tiers) {
    LogWarning("no tier takes the space's blocks: they are too large",
               {{"space", of_space.id}, {"value_bytes", value_bytes}, {"most_value_bytes", of_tiers}});
  }
  return OrExhausted(what, [&] {
    SpaceLock lock(*space);
    space->state.below.Use(tiers_.get());
    return space;
  });
}

absl::StatusOr<std::unique_ptr<MemberLog>> Daemon::KeepMember(const Session& session,
                                                              const MemberIdentity& identity,
                                                              KeptOfMember* kept) {
  if (keeper_ == nullptr) return nullptr;
  const PeerCredentials& process = identity.credentials;
  if (process.pidfd == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("pid ", process.pid, " has no pidfd for the keeper"));
  }
  const SessionTerms& terms = session.terms;
  KeptMember member{};
  member.space = session.space->facts.id;
  member.session = terms.id;
  member.rank = identity.rank;
  member.scheduler = identity.scheduler;
  member.ranks = terms.ranks;
  member.uid = terms.uid;
  member.guaranteed_blocks = terms.guaranteed_blocks;
  member.max_blocks = terms.max_blocks;
  member.max_pinned_blocks = terms.max_pinned_blocks;
  member.warmup = terms.warmup;
  member.name_bytes = static_cast<uint32_t>(terms.client_name.copy(member.name, sizeof(member.name)));
  identity.token.copy(member.token, sizeof(member.token));
  ASSIGN_OR_RETURN(std::unique_ptr<MemberLog> log, MemberLog::Make());
  log->Follow(&session.space->state.pool);
  KeptLog facts{.space = member.space, .token = {}};
  identity.token.copy(facts.token, sizeof(facts.token));
  ASSIGN_OR_RETURN(kept->log, keeper_->Keep(KeptKind::kLog, FactBytes(facts), log->fd()));
  ASSIGN_OR_RETURN(kept->process, keeper_->Keep(KeptKind::kMember, FactBytes(member), process.pidfd->get()));
  return log;
}

absl::Status Daemon::FillHoles(const Session& session, const AccessRule& rule,
                               const std::atomic<bool>* given_up) {
  const std::shared_ptr<Space>& space = session.space;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.give_back_ms);
  const SpaceFacts& facts = space->facts;
  {
    // Most have none, and what they are about to give is no matter then.
    SpaceLock lock(*space);
    if (space->state.growth.in_order()) return absl::OkStatus();
  }
  while (true) {
    absl::Status made = absl::ResourceExhaustedError("others have yet to map or unmap a slab");
    bool asks = false, leaving = false, fills = false, complete = false;
    Holes holes{.may_be_guaranteed = options_.access->MayBeGuaranteed(rule, session.terms.guaranteed_blocks)};
    uint64_t lacking = 0;  // Bytes on each rank.
    v1::PriorityClass most_class = v1::PRIORITY_CLASS_UNSPECIFIED;
    {
      Settlement settlement(*space);
      MutexLock growth(&space->growth_mu);
      space->CancelGiveBack();
      {
        SpaceTurn turn(*space, &settlement);
        const Growth& slabs = space->state.growth;
        if (space->state.sessions.PutInOrder()) return absl::OkStatus();
        leaving = slabs.leaving().has_value();
        fills = !leaving && slabs.has_hole();
        complete = slabs.complete();
        holes.blocks = slabs.hole_blocks();
      }
      lacking = uint64_t{holes.blocks} * facts.geometry.block_stride_bytes;
      most_class = MostClassFor(holes, session);
      if (fills) {
        const uint64_t closed = registry_->spaces_closed();
        made = space->MakeSlab(&settlement);
        if (made.ok()) continue;
        if (!absl::IsResourceExhausted(made)) return made;
        // It may have no more blocks: others' memory would be of no use to it.
        const uint64_t room = budget_->Room(facts.rank_devices, facts.tenant);
        if (!complete && room < lacking && MakeRoom(*space, closed, most_class)) continue;
        asks = !complete && room < lacking;
      }
    }
    if (given_up != nullptr && *given_up) {
      return absl::CancelledError("the caller of OpenSession did not wait for its answer");
    }
    if (std::chrono::steady_clock::now() < deadline) {
      if (leaving && GiveBack(space.get())) continue;
      if (asks && AskOthers(space, lacking, most_class, deadline, given_up, [] {})) continue;
      if (!asks && !fills) {
        std::this_thread::sleep_for(kLeavingPause);
        continue;
      }
    }
    return absl::ResourceExhaustedError(absl::StrCat(
        "the engine takes no holes (hello.holes), and space ", facts.id,
        " has given back slabs in front of others, which can't be made anew: ", std::string(made.message()),
        asks ? WhoGivesNothingFor(holes, most_class, session) + WhoKeepsWhat(*space) : ""));
  }
}

absl::Status Daemon::Admit(Session* session, const std::atomic<bool>* given_up) {
  std::optional<uint64_t> waits_since_ms;
  const absl::Status entered = EnterOrWait(session, given_up, &waits_since_ms);
  if (waits_since_ms.has_value()) {
    MutexLock lock(&waits_mu_);
    guarantee_wait_.Observe(static_cast<double>(clock_->NowMs() - *waits_since_ms) / 1000);
  }
  return entered;
}

absl::Status Daemon::EnterOrWait(Session* session, const std::atomic<bool>* given_up,
                                 std::optional<uint64_t>* waits_since_ms) {
  Space& space = *session->space;
  uint32_t most = 0, limit = 0;
  {
    SpaceLock lock(space);
    most = space.state.growth.max_blocks();
    limit = space.state.give_back.limit_blocks();
  }
  if (session->limits().guaranteed >= most) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "guaranteed_blocks is ", session->terms.guaranteed_blocks, "; space ", space.facts.id,
        " can have at most ", most, " blocks, the null block and the session's sink among them",
        limit == 0 ? ""
                   : absl::StrCat(": its limit is ", limit, ", by a rule (space-blocks) or an operator")));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.give_back_ms);
  bool said = false;
  const v1::PriorityClass most_class = MostClassOf(*session);
  while (true) {
    if (given_up != nullptr && *given_up) {
      return absl::CancelledError("the caller of OpenSession did not wait for its answer");
    }
    // What its engine held in a session before is to be had.
    TidyUp(&space);
    {
      // A session that finds what it needs does not wait for the slabs of others.
      SpaceTurn turn(space);
      const absl::Status entered = space.state.sessions.Enter(turn, session);
      // No slab helps where sessions are too many.
      if (!absl::IsResourceExhausted(entered) || !space.state.pool.has_session_slot()) return entered;
    }
    absl::Status short_of, made;
    bool may_ask = false, leaving = false;
    uint64_t missing_bytes = 0;
    {
      // One slab a round, so that others who need growth_mu come in between.
      Settlement settlement(space);
      MutexLock growth(&space.growth_mu);
      bool complete = false;
      space.CancelGiveBack();
      {
        SpaceTurn turn(space, &settlement);
        leaving = space.state.growth.leaving().has_value();
        short_of = space.state.sessions.Enter(turn, session);
        complete = space.state.growth.complete();
        missing_bytes = MissingBytes(space, *session);
      }
      if (!absl::IsResourceExhausted(short_of)) return short_of;
      if (leaving) {
        made = absl::ResourceExhaustedError("a slab of it is being given back");
      } else {
        const uint64_t closed = registry_->spaces_closed();
        const SpaceFacts& facts = space.facts;
        const auto no_room = [&] {
          return budget_->Room(facts.rank_devices, facts.tenant) < facts.geometry.unit_bytes;
        };
        // There may have been none before, and be some since another space gave.
        may_ask = !complete && no_room();
        made = space.MakeSlab(&settlement);
        // A space at its largest has no use for the memory of others, nor has a device that is full for other reasons.
        if (made.ok() ||
            (absl::IsResourceExhausted(made) && !complete && MakeRoom(space, closed, most_class)))
          continue;
        if (!absl::IsResourceExhausted(made)) return made;
        may_ask = may_ask || (!complete && no_room());
      }
    }
    // Under no lock: two spaces may want what the other has.
    if (const auto began = std::chrono::steady_clock::now(); began < deadline && leaving) {
      if (!GiveBack(&space)) std::this_thread::sleep_for(kLeavingPause);
      continue;
    } else if (began < deadline && may_ask) {
      if (!waits_since_ms->has_value()) *waits_since_ms = clock_->NowMs();
      const auto say = [&] {
        if (!std::exchange(said, true)) SayThatItWaits(*session, missing_bytes);
      };
      if (AskOthers(session->space, missing_bytes, most_class, deadline, given_up, say)) continue;
    }
    const uint32_t held = registry_->held_idle_spaces();
    return absl::ResourceExhaustedError(absl::StrCat(
        "guaranteed_blocks is ", session->terms.guaranteed_blocks,
        " (and the sink): ", std::string(short_of.message()),
        "; the space can't grow: ", std::string(made.message()), may_ask ? WhoKeepsWhat(space) : "",
        held == 0 ? "" : absl::StrCat("; ", held, " spaces without sessions are held by living processes")));
  }
}

std::shared_ptr<Space> Daemon::CloseIdleFor(const Space& space, v1::PriorityClass most) {
  const SpaceFacts& facts = space.facts;
  const bool at_share = budget_->RoomOfTenant(facts.rank_devices, facts.tenant) < facts.geometry.unit_bytes;
  return registry_->CloseIdle(UINT64_MAX, facts.rank_devices, at_share ? &facts.tenant : nullptr, most);
}

bool Daemon::MakeRoom(const Space& space, uint64_t spaces_closed, v1::PriorityClass most) {
  const absl::Span<const size_t> devices = space.facts.rank_devices;
  if (const std::shared_ptr<Space> idle = CloseIdleFor(space, most)) {
    Retire(idle);
    return true;
  }
  // Another thread may be closing one at this moment: it takes no longer than closing it here.
  for (const std::shared_ptr<Space>& closing : registry_->Closing(devices)) Destroy(closing.get());
  return registry_->spaces_closed() != spaces_closed;
}

absl::Status Daemon::OpenSession(const v1::OpenSession& request, v1::OpenSessionResult* result,
                                 const std::atomic<bool>* given_up) {
  RETURN_IF_ERROR(ValidateOpenSession(request));
  ASSIGN_OR_RETURN(Claim claim, Claim::Take(registry_.get(), request.attach_token(), /*new_session=*/true));
  ASSIGN_OR_RETURN(const auto rule, AdmitEngine(claim->credentials, "OpenSession"));
  ASSIGN_OR_RETURN(const TenantScope tenant, ScopeTenant(*rule, request.tenant(), claim->credentials.uid));
  RETURN_IF_ERROR(CheckHeldBlocks(*rule, request));
  RETURN_IF_ERROR(CheckPriority(*rule, request));
  ASSIGN_OR_RETURN(SessionShare share, options_.access->TakeSession(*rule, request.guaranteed_blocks()));
  ASSIGN_OR_RETURN(const std::shared_ptr<Space> space, OpenSpace(request, tenant));
  const Opening opening(registry_.get(), space,
                        [this](const std::shared_ptr<Space>& closed) { Retire(closed); });
  RETURN_IF_ERROR(CheckSameSpace(space->facts, devices_, request));
  // They bound what is made for this opening already.
  RuleTerms terms_of_rule(space.get(), options_.access.get(), rule.get(), request.priority_class());
  SessionTerms terms{
      .id = registry_->NextSessionId(),
      .client_name = request.client_name().empty() ? claim->client_name : request.client_name(),
      .uid = claim->credentials.uid,
      .ranks = std::max(1u, request.ranks()),
      .guaranteed_blocks = request.guaranteed_blocks(),
      .max_blocks = MostBlocks(*rule, request),
      .max_pinned_blocks = rule->limits.pinned_blocks,
      .warmup = request.warmup()};
  const auto session = std::make_shared<Session>(space, std::move(terms));
  session->share = std::move(share);
  session->pace = options_.access->PaceOf(*rule);
  Member* member = session->AddMember(Identify(*claim, request.role()));
  KeptOfMember kept;
  ASSIGN_OR_RETURN(std::unique_ptr<MemberLog> log, KeepMember(*session, member->identity, &kept));
  if (log != nullptr) {
    SpaceLock lock(*space);
    log->OnEntered(member->index);
    member->KeepIn(std::move(log));
  }
  std::optional<NoHoles> no_holes;
  if (!claim->holes) {
    no_holes.emplace(space.get());
    RETURN_IF_ERROR(FillHoles(*session, *rule, given_up));
  }
  // Slabs that were made for it stay, and are announced, even if this session does not come about.
  RETURN_IF_ERROR(Admit(session.get(), given_up));
  terms_of_rule.Keep();
  const Registry::Fate fate = claim.Bind(session, member, std::move(kept));
  claim->peer->Bound();
  {
    SpaceTurn turn(*space);
    space->state.sessions.OnJoined(turn, member, space->state.pressure.on());
    space->state.pressure.AfterVerbs(turn);
    FillMember(*member, space->facts, options_.epoch, result);
    result->set_session(session->terms.id);
    result->set_space(space->facts.id);
    result->set_sink_block(session->sink.Pack());
  }
  LogInfo("session opened", {{"session", session->terms.id},
                             {"space", space->facts.id},
                             {"tenant", space->facts.tenant},
                             {"rule", rule->name},
                             {"client", session->terms.client_name},
                             {"pid", claim->credentials.pid}});
  // What happened to the connection meanwhile found no member to end.
  EndByAttachment(std::shared_ptr<Member>(session, member), fate.hung_up, fate.dead);
  return absl::OkStatus();
}

void Daemon::OnUndelivered(std::string_view member_token) {
  const std::shared_ptr<Member> member = registry_->FindMember(member_token);
  if (member == nullptr) return;  // It has hung up and died.
  Space& space = *member->session->space;
  SpaceTurn turn(space);
  space.state.sessions.OnUndelivered(turn, member.get());
  space.state.pressure.AfterVerbs(turn);
}

absl::Status Daemon::AddMember(const v1::AddMember& request, v1::AddMemberResult* result) {
  RETURN_IF_ERROR(ValidateAddMember(request));
  const std::shared_ptr<Session> session = registry_->FindSession(request.session());
  if (session == nullptr) {
    return absl::NotFoundError(absl::StrCat("session ", request.session(), " is not open"));
  }
  const std::shared_ptr<Member> inviter = registry_->FindMember(request.invitation());
  if (inviter == nullptr || inviter->session != session.get()) {
    return absl::UnauthenticatedError(
        absl::StrCat("invitation is no member_token of session ", request.session()));
  }
  ASSIGN_OR_RETURN(Claim claim, Claim::Take(registry_.get(), request.attach_token(), /*new_session=*/false));
  if (claim->credentials.uid != session->terms.uid) {
    return absl::PermissionDeniedError(absl::StrCat("the member's uid is ", claim->credentials.uid,
                                                    "; session ", session->terms.id, " is of uid ",
                                                    session->terms.uid));
  }
  const std::shared_ptr<Space> space = session->space;
  ASSIGN_OR_RETURN(const auto rule, AdmitEngine(claim->credentials, "AddMember"));
  RETURN_IF_ERROR(ScopeTenant(*rule, space->facts.tenant_name, claim->credentials.uid).status());
  RETURN_IF_ERROR(CheckSameModel(space->facts, request.layout(), request.fingerprint()));

  MemberIdentity identity = Identify(*claim, request.role());
  KeptOfMember kept;
  ASSIGN_OR_RETURN(std::unique_ptr<MemberLog> log, KeepMember(*session, identity, &kept));
  Member* member = nullptr;
  {
    SpaceLock lock(*space);
    if (session->ended) return absl::AbortedError(session->end_reason);
    RETURN_IF_ERROR(session->CheckRole(request.role().scheduler(), request.role().rank()));
    // A session whose first member takes no holes has found and kept none.
    if (!claim->holes && !request.role().scheduler() &&
        !(space->state.give_back.under_way() ? space->state.growth.in_order()
                                             : space->state.sessions.PutInOrder())) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the member takes no holes (hello.holes), as session ", session->terms.id,
                       " does, whose space ", space->facts.id, " has given back slabs in front of others"));
    }
    if (session->members.size() >= options_.max_members) {
      return absl::ResourceExhaustedError(absl::StrCat("session ", session->terms.id, " has ",
                                                       session->members.size(), " members; max_members is ",
                                                       options_.max_members));
    }
    member = session->AddMember(std::move(identity));
    if (log != nullptr) log->OnEntered(member->index);
    member->KeepIn(std::move(log));
    FillMember(*member, space->facts, options_.epoch, result);
  }
  const Registry::Fate fate = claim.Bind(session, member, std::move(kept));
  claim->peer->Bound();
  {
    SpaceTurn turn(*space);
    space->state.sessions.OnJoined(turn, member, space->state.pressure.on());
  }
  LogInfo("member joined",
          {{"session", session->terms.id}, {"member", member->index}, {"pid", claim->credentials.pid}});
  EndByAttachment(std::shared_ptr<Member>(session, member), fate.hung_up, fate.dead);
  return absl::OkStatus();
}

}  // namespace kvpool
