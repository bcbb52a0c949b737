#include "tests/fuzz/world.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <filesystem>

#include "proto/support/check.h"
#include "server/replacement/policy.h"
#include "tests/fuzz/heap_device.h"
#include "tests/fuzz/messages.h"
#include "tests/support/access.h"

namespace kvpool::fuzz {
namespace {

constexpr uint64_t kGranuleBytes = 4 << 10, kSlabBytes = 8 * kBlockBytes;  // A few prompts fill three slabs.
constexpr uint32_t kMaxProcesses = 6;
constexpr int kMaxActions = 100;

// The events of a story, in memory and in place of those of the story before.
class EventFile {
 public:
  EventFile() { KVPOOL_CHECK(mkdtemp(folder_.data()) != nullptr, "%s: errno %d", folder_.c_str(), errno); }
  ~EventFile() { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ + "/events"; }

 private:
  std::string folder_ = "/dev/shm/kvpool-fuzz-XXXXXX";
};

class Listener final : public StreamListener {
 public:
  void OnPending() override {}
  void OnSuperseded() override {}
};

}  // namespace

class World::Peer final : public AttachPeer {
 public:
  void Send(const v1::AttachFrame& frame, UniqueFd) override {
    if (frame.has_slab()) frames.push_back({.slab = frame.slab().slab(), .leaves = false});
    if (frame.has_slab_leave()) frames.push_back({.slab = frame.slab_leave().slab(), .leaves = true});
  }
  void Close(const std::string&) override {}
  void Bound() override {}
  void NotAwaited(AttachId) override {}
  // Those that the process has yet to answer.
  struct Frame {
    uint32_t slab = 0;
    bool leaves = false;
  };
  std::deque<Frame> frames;
};

World::World(Input* input) : input_(*input) {
  const uint8_t shape = input_.Byte(), layout = input_.Byte();
  scored_ = shape % 2 == 1;
  ranks_ = 1 + shape / 2 % 2;
  layout_ = scored_ ? ScoredLayout() : OpaqueLayout();
  hybrid_ = layout % 4 == 2;
  if (hybrid_) AddWindowedGroup(&layout_);
  if (layout % 4 == 3) Vary(&input_, &layout_);
  DaemonOptions options;
  options.access = MakeAccess();
  options.version = "fuzz";
  options.housekeeping_thread = false;
  options.device_threads = false;
  options.max_sessions = 8;
  options.max_members = 3;
  options.give_back_ms = 1;
  options.idle_space_ms = 5000;
  options.policy = SomeReplacement(shape / 4);
  options.slab_bytes = kSlabBytes;
  options.score_features_bytes = 4096;
  options.score_workspace_bytes = 1 << 20;
  options.score_queue = 16;
  options.guard = {.share = 0.5, .bound = 0.9, .samples = 2};
  if (layout / 32 % 2 == 1) {
    options.low_watermark = 0.2;
    options.high_watermark = 0.4;
  }
  if (layout / 4 % 8 == 7) {
    static const EventFile events;
    options.event_log = events.path();
    options.event_log_bytes = 16 << 10;
  }
  std::vector<std::unique_ptr<Device>> devices;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const std::string id = "mem" + std::to_string(rank);
    options.device_capacity_bytes.push_back(3 * options.slab_bytes);
    if (scored_) {
      devices.push_back(MakeHeapDevice(id, kGranuleBytes, [this] { return InPart(); }));
    } else {
      devices.push_back(std::make_unique<MemoryDevice>(id, kGranuleBytes, &script_));
    }
  }
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options, std::move(devices), &clock_);
  KVPOOL_CHECK(daemon.ok(), "%s", std::string(daemon.status().message()).c_str());
  daemon_ = *std::move(daemon);
  Attach();
  Open(processes_.back().get());
  if (sessions_.empty() && layout % 4 == 3) {
    // What is refused has had its say; the rest of the story is not about a space that nobody can open.
    layout_ = scored_ ? ScoredLayout() : OpaqueLayout();
    Open(processes_.back().get());
  }
}

World::~World() { daemon_.reset(); }

void World::Run() {
  for (int i = 0; i < kMaxActions && !input_.empty(); ++i) {
    Act();
    RunDevices();
    for (const auto& process : processes_) HearCalls(process.get());
  }
}

void World::Act() {
  Process* process = Any();
  switch (input_.Below(24)) {
    case 0:
      return Attach();
    case 1:
      if (process->member != nullptr && !input_.OneIn(8)) break;
      return Open(process);
    case 2:
      return Join(process);
    case 3:
      return HangUp(process);
    case 4:
      return Die(process);
    case 5:
      return Operate();
    case 6:
      return RawOpen(process);
    case 7:
      return RawJoin(process);
    case 8:
      clock_.Advance(input_.Byte() * 40);
      return daemon_->HousekeepOnce();
    case 9:
      return MapSlabs(process);
    case 10:
      return TurnDevice();
    default:
      break;
  }
  if (process->member == nullptr) {
    const auto member = std::find_if(processes_.begin(), processes_.end(),
                                     [](const auto& each) { return each->member != nullptr; });
    if (member == processes_.end() || input_.OneIn(4)) return Open(process);
    process = member->get();
  }
  switch (input_.Below(12)) {
    case 0:
      return RawStep(process);
    case 1:
      return RawCall(process);
    case 2:
    case 3:
      return Call(process);
    case 4:
      return TakePending(process);
    case 5:
      if (process->listener != nullptr && input_.OneIn(2)) {
        return daemon_->UnbindStream(process->member, std::exchange(process->listener, nullptr).get());
      }
      process->listener = std::make_shared<Listener>();
      return daemon_->BindStream(process->member, process->listener);
    case 6:
      MapSlabs(process);
      return daemon_->HousekeepOnce();
    case 7:
    case 8:
      return Prompt(process);
    default:
      return Step(process);
  }
}

// ---------------------------------------------------------------------------------------------------- devices

void World::TurnDevice() {
  const uint8_t how = input_.Byte();
  if (!scored_) {
    script_.fail_after = how % 3 - 1;
    script_.fail_export = how / 3 % 4 == 3;
    return;
  }
  if (how == UINT8_MAX) return daemon_->StopDeviceOperations();
  const uint32_t rank = how % ranks_;
  device_failure_ =
      how / 8 % 4 == 3 ? absl::ResourceExhaustedError("the device is out of memory") : absl::OkStatus();
  switch (how / 2 % 4) {
    case 0:
      held_ = false;
      return;
    case 1:
      held_ = true;
      return;
    case 2:
      acts_in_part_ = 1 + input_.Below(4);
      [[fallthrough]];
    default:
      RunPart(rank);
  }
}

void World::RunDevices() {
  for (bool more = !held_; more;) {
    more = false;
    for (uint32_t rank = 0; rank < ranks_; ++rank) more = RunPart(rank) || more;
  }
}

bool World::RunPart(uint32_t rank) {
  if (std::exchange(running_[rank], true)) return false;
  const bool ran = daemon_->RunDevicePart(rank);
  running_[rank] = false;
  return ran;
}

absl::Status World::InPart() {
  for (uint32_t acts = std::exchange(acts_in_part_, 0); acts > 0 && !input_.empty(); --acts) Act();
  return device_failure_;
}

std::string World::SomeReplacement(uint8_t choice) {
  const auto policies = ReplacementPolicies();
  return std::string(policies[choice % policies.size()].name);
}

// ------------------------------------------------------------------------------------------------- processes

World::Process* World::Any() { return processes_[input_.Byte() % processes_.size()].get(); }

void World::Attach() {
  if (processes_.size() == kMaxProcesses) return;
  auto process = std::make_unique<Process>();
  process->peer = std::make_shared<Peer>();
  const uint8_t whose = input_.Byte();
  const bool known = whose % 4 == 3 && !processes_.empty();
  process->process = known ? processes_[whose % processes_.size()]->process : next_process_++;
  v1::AttachHello hello;
  hello.set_gives_back(process->process % 4 != 0);
  hello.set_holes(process->process % 8 > 1);
  const absl::StatusOr<Daemon::Welcome> welcome =
      daemon_->OnAttached(process->peer,
                          {.pid = static_cast<int64_t>(process->process),
                           .uid = 1000u + whose / 250,
                           .gid = 0,
                           .process = process->process % 8 == 7 ? 0 : process->process},
                          hello);
  KVPOOL_CHECK(welcome.ok(), "%s", std::string(welcome.status().message()).c_str());
  process->attach = welcome->id;
  process->attach_token = welcome->frame.welcome().attach_token();
  processes_.push_back(std::move(process));
}

void World::Open(Process* process) {
  v1::OpenSession request;
  const uint8_t terms = input_.Byte();
  request.set_guaranteed_blocks(terms / 8 % 4 * 3);
  if (terms / 32 % 4 == 3) request.set_max_blocks(10);
  request.set_warmup(terms / 128 == 1);
  request.mutable_fingerprint()->set_digest(terms % 8 == 7 ? "other" : "model");
  *request.mutable_layout() = layout_;
  if (terms % 8 == 6) Vary(&input_, request.mutable_layout());
  request.set_ranks(ranks_);
  switch (input_.Below(32)) {
    case 31:
      request.set_kind(v1::SPACE_KIND_IPC);
      break;
    case 30:
      request.set_tenant("other");
      break;
    case 29:
      request.set_max_space_bytes(input_.Number() * kBlockBytes);
      break;
    case 28:
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        request.add_device_uuids("mem" + std::to_string(input_.Below(3)));
      }
      break;
    default:
      break;
  }
  OpenWith(process, request);
}

void World::RawOpen(Process* process) {
  v1::OpenSession request;
  if (!ParseNext(&input_, &request)) return;
  if (!request.has_layout()) *request.mutable_layout() = layout_;
  if (!request.has_fingerprint()) request.mutable_fingerprint()->set_digest("raw");
  OpenWith(process, request);
}

void World::OpenWith(Process* process, v1::OpenSession request) {
  // A token that is empty here is replaced, so that one that serves twice is tried as well.
  if (request.attach_token().empty()) request.set_attach_token(process->attach_token);
  Trace("open", 0, request);
  v1::OpenSessionResult result;
  const uint8_t caller = input_.Byte();
  const std::atomic<bool> given_up = caller == UINT8_MAX;
  if (!daemon_->OpenSession(request, &result, &given_up).ok()) return;
  if (caller >= 248) return daemon_->OnUndelivered(result.member_token());
  sessions_[result.session()] = {.space = result.space(), .living = 0};
  Adopt(process, result.member_token(), result.session(), result.space());
}

void World::Join(Process* process) {
  v1::AddMember request;
  request.mutable_role()->set_scheduler(input_.OneIn(2));
  request.mutable_role()->set_rank(request.role().scheduler() ? 0 : input_.Below(ranks_ + 1));
  *request.mutable_layout() = layout_;
  request.mutable_fingerprint()->set_digest("model");
  JoinWith(process, request);
}

void World::RawJoin(Process* process) {
  v1::AddMember request;
  if (!ParseNext(&input_, &request)) return;
  if (!request.has_layout()) *request.mutable_layout() = layout_;
  if (!request.has_fingerprint()) request.mutable_fingerprint()->set_digest("model");
  JoinWith(process, request);
}

void World::JoinWith(Process* process, v1::AddMember request) {
  Process* const inviter = Any();
  if (request.session() == 0) request.set_session(inviter->session);
  if (request.invitation().empty()) request.set_invitation(inviter->member_token);
  if (request.attach_token().empty()) request.set_attach_token(process->attach_token);
  Trace("join", request.session(), request);
  v1::AddMemberResult result;
  if (!daemon_->AddMember(request, &result).ok()) return;
  if (input_.OneIn(32)) return daemon_->OnUndelivered(result.member_token());
  Adopt(process, result.member_token(), request.session(), sessions_.at(request.session()).space);
}

void World::Adopt(Process* process, const std::string& member_token, uint64_t session, uint64_t space) {
  KVPOOL_CHECK(process->member == nullptr, "a token of process %lu served twice",
               static_cast<uint64_t>(process->attach));
  absl::StatusOr<std::shared_ptr<Member>> member = daemon_->FindMember(member_token);
  KVPOOL_CHECK(member.ok(), "the member of session %lu is not found", session);
  process->member = *std::move(member);
  process->member_token = member_token;
  process->session = session;
  process->space = space;
  ++sessions_.at(session).living;
  MapSlabs(process);
}

void World::MapSlabs(Process* process) {
  if (process->hung_up) return;
  v1::SlabAck ack;
  if (input_.OneIn(16)) {
    ack.set_slab(static_cast<uint32_t>(input_.Number()));
    return daemon_->OnSlabAck(process->attach, ack);
  }
  for (std::deque<Peer::Frame>& frames = process->peer->frames; !frames.empty();) {
    const Peer::Frame frame = frames.front();
    frames.pop_front();
    if (frame.leaves) {
      v1::SlabLeft left;
      left.set_slab(frame.slab);
      daemon_->OnSlabLeft(process->attach, left);
      continue;
    }
    ack.set_slab(frame.slab);
    if (input_.OneIn(64)) ack.set_error("no room");
    daemon_->OnSlabAck(process->attach, ack);
  }
}

void World::HangUp(Process* process) {
  if (process->hung_up || processes_.size() == 1 || input_.OneIn(2)) return;
  process->hung_up = true;
  daemon_->OnHangup(process->attach);
}

void World::Die(Process* process) {
  if (processes_.size() == 1 || input_.OneIn(2)) return;
  if (input_.OneIn(2)) HangUp(process);
  const uint64_t dead = process->process;
  for (const auto& each : processes_) {
    if (each->process != dead) continue;
    // From here on the daemon may give away what the session held.
    if (each->session != 0 && --sessions_[each->session].living == 0) holdings_.End(each->session);
    // Nobody hears what becomes of what it has parked.
    if (!each->sent.empty()) holdings_.Ignore(each->session);
    daemon_->OnProcessDead(each->attach);
    if (!each->hung_up) daemon_->OnHangup(each->attach);
  }
  std::erase_if(processes_, [dead](const auto& each) { return each->process == dead; });
  if (processes_.empty()) Attach();
}

// -------------------------------------------------------------------------------------------------- operators

template <typename Request, typename Response>
void World::Ask(absl::Status (Daemon::*verb)(const Request&, Response*)) {
  Request request;
  if (input_.OneIn(2)) {
    FillPlainly(&input_, &request);
  } else if (!ParseNext(&input_, &request)) {
    return;
  }
  NameBlocks(refs_, &request);
  Trace(request.GetTypeName().c_str(), 0, request);
  Response response;
  (daemon_.get()->*verb)(request, &response).IgnoreError();
}

void World::Operate() {
  switch (input_.Below(14)) {
    case 0:
      return Ask(&Daemon::Evict);
    case 1:
      return Ask(&Daemon::ListSpaces);
    case 2:
      return Ask(&Daemon::ListSessions);
    case 3:
      return Ask(&Daemon::ListBlocks);
    case 4:
      return Ask(&Daemon::GetStats);
    case 5:
      return Ask(&Daemon::Revoke);
    case 6:
      return Ask(&Daemon::EndSession);
    case 7:
      return Ask(&Daemon::Drain);
    case 8:
      return Ask(&Daemon::Explain);
    case 9:
      return Ask(&Daemon::PinPrefix);
    case 10:
      return Ask(&Daemon::GetPolicies);
    case 11: {
      v1::SetPolicyRequest request;
      if (!ParseNext(&input_, &request)) return;
      if (request.policy().empty()) request.set_policy(SomeReplacement(input_.Byte()));
      v1::SetPolicyResponse response;
      daemon_->SetPolicy(request, &response).IgnoreError();
      return;
    }
    case 12:
      return Ask(&Daemon::SetShare);
    default: {
      daemon_->Snapshot();
      v1::GetGuardResponse guard;
      daemon_->GetGuard({}, &guard).IgnoreError();
      if (!input_.OneIn(4)) return;
      v1::ResetGuardResponse reset;
      daemon_->ResetGuard({}, &reset).IgnoreError();
      v1::EraseRequest request;
      v1::EraseResponse response;
      for (const auto& space : daemon_->Snapshot().spaces) request.set_tenant(space.tenant);
      daemon_->Erase(request, &response).IgnoreError();
    }
  }
}

}  // namespace kvpool::fuzz
