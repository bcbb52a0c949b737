#include "tests/fuzz/world.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <thread>

#include "proto/support/check.h"
#include "proto/support/mutex.h"
#include "server/replacement/policy.h"
#include "tests/fuzz/heap_device.h"
#include "tests/fuzz/messages.h"

namespace kvpool::fuzz {
namespace {

// For looking into one input: KVPOOL_FUZZ_TRACE=1 prints what is said.
void Trace(const char* what, uint64_t session, const google::protobuf::Message& message) {
  static const bool on = std::getenv("KVPOOL_FUZZ_TRACE") != nullptr;
  if (on) std::fprintf(stderr, "%s session %lu: %s\n", what, session, message.ShortDebugString().c_str());
}

constexpr uint64_t kGranuleBytes = 16 << 10;
constexpr uint32_t kMaxProcesses = 6;
constexpr size_t kMaxRefs = 64;
constexpr int kMaxActions = 100;

// What fills tables with what a network or long averages say takes as long as a hundred stories.
bool IsSlowToMake(std::string_view policy) {
  return policy == "learned" || policy == "hit_density" || policy == "cold_rl";
}

bool IsOnDevice(const v1::Operation& operation) {
  return operation.has_score() || operation.has_prune() || operation.has_compact() ||
         operation.has_plan_budgets();
}

class Listener final : public StreamListener {
 public:
  void OnPending() override {}
  void OnSuperseded() override {}
};

}  // namespace

class World::Peer final : public AttachPeer {
 public:
  void Send(const v1::AttachFrame& frame, UniqueFd) override { slabs += frame.has_slab() ? 1 : 0; }
  void Close(const std::string&) override { closed = true; }
  void Bound() override {}
  std::atomic<uint32_t> slabs{0};
  std::atomic<bool> closed{false};
};

World::World(Input* input) : input_(*input) {
  const uint8_t shape = input_.Byte(), layout = input_.Byte();
  scored_ = shape % 2 == 1;
  ranks_ = 1 + shape / 2 % 2;
  layout_ = scored_ ? ScoredLayout() : OpaqueLayout();
  if (layout % 4 == 3) Vary(&input_, &layout_);
  DaemonOptions options;
  options.version = "fuzz";
  options.housekeeping_thread = false;
  options.max_sessions = 8;
  options.max_members = 3;
  options.idle_space_ms = 5000;
  options.policy = SomeReplacement(shape / 4);
  options.slab_bytes = 16 * kBlockBytes;
  options.score_features_bytes = 4096;
  options.score_workspace_bytes = 1 << 20;
  options.score_queue = 16;
  std::vector<std::unique_ptr<Device>> devices;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const std::string id = "mem" + std::to_string(rank);
    options.device_capacity_bytes.push_back(3 * options.slab_bytes);
    if (scored_) {
      devices.push_back(MakeHeldDevice(MakeHeapDevice(id, kGranuleBytes), &holds_[rank]));
    } else {
      devices.push_back(std::make_unique<MemoryDevice>(id, kGranuleBytes, &script_));
    }
  }
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options, std::move(devices), &clock_);
  KVPOOL_CHECK(daemon.ok(), "%s", std::string(daemon.status().message()).c_str());
  daemon_ = *std::move(daemon);
  Attach();
  Open(processes_.back().get());
}

World::~World() {
  for (DeviceHold& hold : holds_) hold.Release();
  daemon_.reset();
}

void World::Run() {
  for (int i = 0; i < kMaxActions && !input_.empty(); ++i) {
    Act();
    AwaitDevice();
    for (const auto& process : processes_) HearCalls(process.get());
  }
}

void World::Act() {
  Process* const process = Any();
  switch (input_.Below(24)) {
    case 0:
      return Attach();
    case 1:
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
  if (process->member == nullptr) return Open(process);
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
  DeviceHold& hold = holds_[how % ranks_];
  held_ = how / 2 % 2 == 0;
  if (!held_) {
    for (DeviceHold& each : holds_) each.Release();
  } else {
    hold.Hold();
  }
  hold.FailWith(how / 4 % 4 == 3 ? absl::ResourceExhaustedError("the device is out of memory")
                                 : absl::OkStatus());
}

void World::AwaitDevice() {
  if (!device_asked_ || held_) return;
  const auto busy = [this] {
    for (const DeviceOperationsSnapshot& device : daemon_->Snapshot().device_operations) {
      if (device.queued > 0) return true;
    }
    return false;
  };
  while (busy()) std::this_thread::yield();
}

std::string World::SomeReplacement(uint8_t choice) {
  static const auto names = [] {
    std::vector<std::string> quick;
    for (const PolicyEntry& policy : ReplacementPolicies()) {
      if (!IsSlowToMake(policy.name)) quick.emplace_back(policy.name);
    }
    return quick;
  }();
  return names[choice % names.size()];
}

// ------------------------------------------------------------------------------------------------- processes

World::Process* World::Any() { return processes_[input_.Byte() % processes_.size()].get(); }

void World::Attach() {
  if (processes_.size() == kMaxProcesses) return;
  auto process = std::make_unique<Process>();
  process->peer = std::make_shared<Peer>();
  const absl::StatusOr<Daemon::Welcome> welcome = daemon_->OnAttached(
      process->peer, {.pid = next_pid_++, .uid = 1000u + input_.Byte() / 250, .gid = 0}, "fuzz");
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
  if (!daemon_->OpenSession(request, &result).ok()) return;
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
  if (process->hung_up || process->dead) return;
  v1::SlabAck ack;
  if (input_.OneIn(16)) {
    ack.set_slab(static_cast<uint32_t>(input_.Number()));
    return daemon_->OnSlabAck(process->attach, ack);
  }
  while (process->acked_slabs < process->peer->slabs) {
    ack.set_slab(process->acked_slabs++);
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
  if (process->dead || processes_.size() == 1 || input_.OneIn(2)) return;
  if (input_.OneIn(2)) HangUp(process);
  process->dead = true;
  // From here on the daemon may give away what the session held.
  if (process->session != 0 && --sessions_[process->session].living == 0) holdings_.End(process->session);
  // Nobody hears what becomes of what it has parked.
  if (!process->sent.empty()) holdings_.Ignore(process->session);
  daemon_->OnProcessDead(process->attach);
  if (!process->hung_up) daemon_->OnHangup(process->attach);
  std::erase_if(processes_, [process](const auto& other) { return other.get() == process; });
}

// ------------------------------------------------------------------------------------------------------ verbs

uint64_t World::SomeRef() {
  const uint8_t choice = input_.Byte();
  if (choice < 240 && !refs_.empty()) return refs_[choice % refs_.size()];
  if (choice < 250) return uint64_t{input_.Below(4)} << 32 | input_.Below(40);
  return input_.Word();
}

void World::AddBlocks(google::protobuf::RepeatedField<uint64_t>* blocks) {
  const uint8_t many = input_.Byte();
  const uint32_t count = many < 250 ? many % 7 : 1u << (many % 17);
  if (count > 64) {  // One block over and over: what counts is the number of names.
    blocks->Resize(static_cast<int>(count), SomeRef());
    return;
  }
  for (uint32_t i = 0; i < count; ++i) blocks->Add(SomeRef());
}

std::vector<uint64_t> World::NeighbouringRefs() {
  std::vector<uint64_t> refs;
  const size_t first = input_.Byte(), count = std::min<size_t>(1 + input_.Below(6), refs_.size());
  for (size_t i = 0; i < count; ++i) refs.push_back(refs_[(first + i) % refs_.size()]);
  return refs;
}

std::string World::Keys(uint32_t count) {
  std::string keys;
  for (uint32_t i = 0; i < count; ++i) keys.append(32, static_cast<char>('a' + input_.Below(12)));
  return keys;
}

v1::Operation World::MakeOperation() {
  v1::Operation operation;
  if (input_.OneIn(3)) operation.set_after(input_.OneIn(20) ? input_.Number() : input_.Below(4));
  switch (scored_ && input_.OneIn(3) ? 16 : input_.Below(19)) {
    case 0:
    case 1:
      operation.mutable_lease()->set_count(
          static_cast<uint32_t>(input_.OneIn(16) ? input_.Number() : input_.Below(9)));
      operation.mutable_lease()->set_min(input_.Below(2));
      break;
    case 2:
    case 3: {
      v1::Seal* seal = operation.mutable_seal();
      AddBlocks(seal->mutable_blocks());
      seal->set_key_bytes(32);
      if (seal->blocks_size() <= 64) seal->set_keys(Keys(seal->blocks_size()));
      if (input_.OneIn(2)) seal->set_parent_key(Keys(1));
      seal->set_leave_duplicates(input_.OneIn(3));
      break;
    }
    case 4: {
      v1::GroupKeys* group = operation.mutable_match()->add_groups();
      group->set_key_bytes(32);
      group->set_keys(Keys(1 + input_.Below(6)));
      break;
    }
    case 5:
    case 6:
      AddBlocks(operation.mutable_release()->mutable_blocks());
      if (input_.OneIn(4)) operation.mutable_release()->set_reuse(static_cast<v1::Reuse>(input_.Below(5)));
      break;
    case 7:
      AddBlocks(operation.mutable_ref()->mutable_blocks());
      break;
    case 8:
      AddBlocks(operation.mutable_touch()->mutable_blocks());
      break;
    case 9:
    case 10:
      operation.mutable_fence()->set_step(input_.OneIn(20) ? input_.Number() : input_.Below(5));
      break;
    case 11:
      AddBlocks(operation.mutable_pin()->mutable_blocks());
      operation.mutable_pin()->set_ttl_ms(1 + input_.Number());
      break;
    case 12:
      AddBlocks(operation.mutable_unpin()->mutable_blocks());
      break;
    case 13:
      AddBlocks(operation.mutable_set_retention()->mutable_blocks());
      operation.mutable_set_retention()->set_priority(input_.Byte() % 102);
      operation.mutable_set_retention()->set_ttl_ms(1 + input_.Number());
      operation.mutable_set_retention()->set_half_life_ms(input_.Number());
      break;
    case 14:
      operation.mutable_warmup_done();
      break;
    case 15:
      if (input_.OneIn(4)) operation.mutable_close_session();
      break;
    case 16:
    case 17: {
      const uint64_t after = operation.after();
      operation = DeviceOperationOn(&input_, NeighbouringRefs());
      operation.set_after(after);
      break;
    }
    default: {
      if (input_.OneIn(2)) {
        v1::PutEpisode* put = operation.mutable_put_episode();
        put->set_name(std::string(1, static_cast<char>('a' + input_.Below(3))));
        put->add_centroid(1);
        put->add_centroid(input_.Byte());
        AddBlocks(put->add_sequences()->mutable_blocks());
      } else {
        operation.mutable_choose_episode()->add_embedding(1);
        operation.mutable_choose_episode()->add_embedding(input_.Byte());
      }
    }
  }
  return operation;
}

uint64_t World::ChooseSequence(Process* process) {
  const uint8_t choice = input_.Byte();
  if (choice < 200) return ++process->sequence;
  if (choice < 220) return process->sequence;                          // Again.
  if (choice < 235) return process->sequence += 1 + input_.Below(70);  // Ahead of others that may come.
  if (choice < 250)
    return process->sequence - std::min<uint64_t>(process->sequence, input_.Below(70));  // Late.
  return process->sequence = input_.Number();
}

void World::Step(Process* process) {
  v1::StepRequest request;
  request.set_sequence(ChooseSequence(process));
  if (input_.OneIn(4))
    process->acknowledged = input_.OneIn(16) ? input_.Number() : process->sequence - input_.Below(3);
  request.set_acknowledged(process->acknowledged);
  const uint32_t operations = 1 + input_.Below(5);
  for (uint32_t i = 0; i < operations; ++i) *request.add_operations() = MakeOperation();
  for (int i = 0; i < request.operations_size(); ++i) {
    Sent(process, request.sequence(), i, request.operations(i));
    device_asked_ = device_asked_ || IsOnDevice(request.operations(i));
  }
  Trace("step", process->session, request);
  v1::StepResponse response;
  std::string wire;
  const bool more = daemon_->Apply(process->member, request, &response, &wire);
  v1::StepResponse read;
  KVPOOL_CHECK(read.ParseFromString(wire), "an answer that does not parse");
  Heard(process, read);
  if (more) daemon_->FollowUp(process->member);
}

void World::RawStep(Process* process) {
  v1::StepRequest request;
  if (!ParseNext(&input_, &request)) return;
  NameBlocks(refs_, &request);
  if (request.sequence() == 0) request.set_sequence(ChooseSequence(process));
  // Bytes may name anything, so what they release, now or when they are no longer parked, is not known here.
  holdings_.Ignore(process->session);
  device_asked_ = true;
  Trace("raw step", process->session, request);
  v1::StepResponse response;
  std::string wire;
  const bool more = daemon_->Apply(process->member, request, &response, &wire);
  v1::StepResponse read;
  KVPOOL_CHECK(read.ParseFromString(wire), "an answer that does not parse");
  if (more) daemon_->FollowUp(process->member);
}

void World::RawCall(Process* process) {
  v1::Call call;
  v1::Operation operation;
  if (!ParseNext(&input_, &call) || !ParseNext(&input_, &operation)) return;
  // These have methods of their own, and what has no verb has none.
  if (operation.has_open_session() || operation.has_add_member() ||
      operation.verb_case() == v1::Operation::VERB_NOT_SET) {
    return;
  }
  NameBlocks(refs_, &operation);
  operation.clear_after();
  if (call.member_token().empty()) call.set_member_token(process->member_token);
  if (call.sequence() == 0) call.set_sequence(ChooseSequence(process));
  holdings_.Ignore(process->session);
  SendCall(process, call, std::move(operation));
}

void World::Call(Process* process) {
  v1::Call call;
  call.set_member_token(process->member_token);
  call.set_sequence(ChooseSequence(process));
  call.set_acknowledged(process->acknowledged);
  v1::Operation operation = MakeOperation();
  Sent(process, call.sequence(), 0, operation);
  call.set_after(operation.after());
  operation.clear_after();
  SendCall(process, call, std::move(operation));
}

void World::SendCall(Process* process, const v1::Call& call, v1::Operation operation) {
  Trace("call", process->session, call);
  Trace("  of", process->session, operation);
  device_asked_ = device_asked_ || IsOnDevice(operation);
  auto answer = std::make_shared<LateAnswer>();
  answer->sequence = call.sequence();
  daemon_->ApplyUnary(call, std::move(operation), [answer](const v1::OperationResult& result) {
    MutexLock lock(&answer->mu);
    KVPOOL_CHECK(!answer->result.has_value(), "a call was answered twice");
    answer->result = result;
  });
  process->calls.push_back(std::move(answer));
}

void World::HearCalls(Process* process) {
  std::erase_if(process->calls, [&](const std::shared_ptr<LateAnswer>& call) {
    MutexLock lock(&call->mu);
    if (!call->result.has_value()) return false;
    Answered(process, call->sequence, 0, *call->result);
    return true;
  });
}

void World::TakePending(Process* process) {
  v1::StepResponse response;
  daemon_->TakePending(process->member, &response);
  Heard(process, response);
}

// -------------------------------------------------------------------------------------------------- operators

template <typename Request, typename Response>
void World::Ask(absl::Status (Daemon::*verb)(const Request&, Response*)) {
  Request request;
  if (!ParseNext(&input_, &request)) return;
  NameBlocks(refs_, &request);
  Trace(request.GetTypeName().c_str(), 0, request);
  Response response;
  (daemon_.get()->*verb)(request, &response).IgnoreError();
}

void World::Operate() {
  switch (input_.Below(13)) {
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
      if (request.policy().empty() || IsSlowToMake(request.policy())) {
        request.set_policy(SomeReplacement(input_.Byte()));
      }
      v1::SetPolicyResponse response;
      daemon_->SetPolicy(request, &response).IgnoreError();
      return;
    }
    default:
      daemon_->Snapshot();
  }
}

// ---------------------------------------------------------------------------------------------------- answers

void World::Learn(uint64_t ref) {
  if (ref == 0) return;
  if (refs_.size() < kMaxRefs) {
    refs_.push_back(ref);
  } else {
    refs_[ref % kMaxRefs] = ref;
  }
}

void World::Sent(Process* process, uint64_t sequence, uint32_t index, const v1::Operation& operation) {
  const uint64_t session = process->session, space = process->space;
  for (const auto* sequence_of : {&operation.prune().sequence(), &operation.compact().sequence()}) {
    for (const uint64_t ref : sequence_of->blocks()) holdings_.DropAll(session, space, ref);
  }
  // One that waits for its step may be applied long before its answer is heard.
  if (operation.has_close_session() && operation.after() != 0) holdings_.Ignore(session);
  if (operation.has_put_episode()) {
    // A set that is replaced or removed gives its holds back, which are beyond those counted here.
    return;
  }
  const auto [sent, fresh] = process->sent.try_emplace({sequence, index}, SentOperation{operation, {}});
  if (!fresh) return;
  for (const uint64_t ref : operation.release().blocks()) {
    sent->second.dropped.push_back(holdings_.Drop(session, space, ref));
  }
}

void World::Heard(Process* process, const v1::StepResponse& response) {
  if (response.code() != 0) {  // Nothing of the batch was applied.
    std::erase_if(process->sent, [&](const auto& entry) { return entry.first.first == response.sequence(); });
  }
  // Completions first: what they gave, a release of this batch may have taken already.
  for (const v1::Completion& completion : response.completions()) {
    KVPOOL_CHECK(!completion.result().parked(), "a completion that is parked");
    Answered(process, completion.sequence(), completion.index(), completion.result());
  }
  for (int i = 0; i < response.results_size(); ++i)
    Answered(process, response.sequence(), i, response.results(i));
}

void World::Answered(Process* process, uint64_t sequence, uint32_t index, const v1::OperationResult& result) {
  Trace("answer", process->session, result);
  if (result.parked()) return;
  const auto it = process->sent.find({sequence, index});
  if (it == process->sent.end()) return;
  if (!process->answered.insert({sequence, index}).second)
    return;  // A repetition got the first answer again.
  const auto [operation, dropped] = std::move(it->second);
  process->sent.erase(it);
  if (result.code() != 0) return;
  const uint64_t session = process->session, space = process->space;
  if (result.has_close_session()) return holdings_.End(session);
  if (process->dead) return;
  for (const uint64_t ref : result.lease().blocks()) {
    holdings_.Lease(session, space, ref);
    Learn(ref);
  }
  for (const v1::GroupHit& hit : result.match().groups()) {
    for (const uint64_t ref : hit.blocks()) holdings_.Add(session, space, ref);
  }
  for (int i = 0; i < result.seal().canonical_size(); ++i) {
    const uint64_t canonical = result.seal().canonical(i);
    if (canonical != operation.seal().blocks(i)) holdings_.Add(session, space, canonical);
    Learn(canonical);
  }
  // What it had no hold on when the release was sent it may have had when it was applied.
  for (size_t i = 0; i < dropped.size(); ++i) {
    if (!dropped[i]) holdings_.Drop(session, space, operation.release().blocks(static_cast<int>(i)));
  }
  if (result.has_ref()) {
    std::vector<bool> refused(operation.ref().blocks_size());
    for (const v1::Refusal& refusal : result.ref().refused()) refused[refusal.index()] = true;
    for (int i = 0; i < operation.ref().blocks_size(); ++i) {
      if (!refused[i]) holdings_.Add(session, space, operation.ref().blocks(i));
    }
  }
  const v1::CompactResult& compact = result.compact();
  for (int i = static_cast<int>(compact.moved_from_block()); i < compact.table_size(); ++i) {
    holdings_.Lease(session, space, compact.table(i));
  }
  for (const v1::Sequence& chosen : result.choose_episode().sequences()) {
    for (const uint64_t ref : chosen.blocks()) holdings_.Add(session, space, ref);
  }
}

}  // namespace kvpool::fuzz
