#include "tests/service/service_fixture.h"

#include <utility>

namespace kvpool {

void FakePeer::Send(const v1::AttachFrame& frame, UniqueFd fd) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (frame.has_slab()) slabs_.push_back(frame.slab());
    if (frame.has_slab_ready()) ready_.push_back(frame.slab_ready());
    if (frame.has_slab_leave()) leaves_.push_back(frame.slab_leave());
    if (fd.valid()) ++fds_;
  }
  if (frame.has_slab() && on_slab) on_slab(frame.slab(), std::move(fd));
  if (frame.has_slab_leave() && on_leave) on_leave(frame.slab_leave());
}

std::vector<v1::SlabLeave> FakePeer::leaves() {
  const std::lock_guard<std::mutex> lock(mu_);
  return leaves_;
}

void FakePeer::Close(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mu_);
  closed_ = reason;
}

std::vector<v1::Slab> FakePeer::slabs() {
  const std::lock_guard<std::mutex> lock(mu_);
  return slabs_;
}

std::vector<v1::SlabReady> FakePeer::ready() {
  const std::lock_guard<std::mutex> lock(mu_);
  return ready_;
}

std::optional<std::string> FakePeer::closed() {
  const std::lock_guard<std::mutex> lock(mu_);
  return closed_;
}

// ------------------------------------------------------------------------------------------------- engines

Engine::Engine(Daemon* daemon, const std::string& name, PeerCredentials credentials, bool gives_back,
               bool holes)
    : gives_back(gives_back), holes(holes), daemon_(daemon) {
  v1::AttachHello hello = Hello();
  hello.set_client_name(name);
  const absl::StatusOr<Daemon::Welcome> welcome = daemon->OnAttached(peer, credentials, hello);
  EXPECT_TRUE(welcome.ok()) << welcome.status();
  id = welcome->id;
  attach_token = welcome->frame.welcome().attach_token();
}

Engine::Engine(Daemon* daemon, const Engine& before, PeerCredentials credentials, absl::Status* returned)
    : opened(before.opened),
      token(before.token),
      sequence(before.sequence),
      gives_back(before.gives_back),
      holes(before.holes),
      daemon_(daemon) {
  v1::AttachHello hello = Hello();
  hello.set_member_token(token);
  const absl::StatusOr<Daemon::Welcome> welcome = daemon->OnAttached(peer, credentials, hello);
  *returned = welcome.status();
  if (!welcome.ok()) return;
  id = welcome->id;
  member = *daemon->FindMember(token);
}

v1::AttachHello Engine::Hello() {
  v1::AttachHello hello;
  hello.set_gives_back(gives_back);
  hello.set_holes(holes);
  if (gives_back) {
    peer->on_leave = [this](const v1::SlabLeave& leave) {
      v1::SlabLeft left;
      left.set_slab(leave.slab());
      daemon_->OnSlabLeft(id, left);
    };
  }
  return hello;
}

absl::Status Engine::Open(const v1::OpenSession& request) {
  v1::OpenSession with_token = request;
  with_token.set_attach_token(attach_token);
  const absl::Status status = daemon_->OpenSession(with_token, &opened);
  if (!status.ok()) return status;
  token = opened.member_token();
  absl::StatusOr<std::shared_ptr<Member>> found = daemon_->FindMember(token);
  if (!found.ok()) return found.status();  // It hung up and died meanwhile.
  member = *std::move(found);
  return status;
}

absl::Status Engine::Join(const Engine& inviter, const v1::AddMember& request) {
  v1::AddMember with_token = request;
  with_token.set_attach_token(attach_token);
  v1::AddMemberResult result;
  const absl::Status status = daemon_->AddMember(with_token, &result);
  if (!status.ok()) return status;
  token = result.member_token();
  absl::StatusOr<std::shared_ptr<Member>> found = daemon_->FindMember(token);
  if (!found.ok()) return found.status();  // It hung up and died meanwhile.
  member = *std::move(found);
  return status;
}

bool Engine::MapSlabs() {
  bool any = false;
  for (std::vector<v1::Slab> slabs = peer->slabs(); mapped < slabs.size(); slabs = peer->slabs()) {
    v1::SlabAck ack;
    ack.set_slab(slabs[mapped++].slab());
    daemon_->OnSlabAck(id, ack);
    any = true;
  }
  return any;
}

void Engine::Send(v1::Operation operation, std::optional<v1::OperationResult>* answer) {
  v1::Call call;
  call.set_member_token(token);
  call.set_sequence(++sequence);
  call.set_after(operation.after());
  operation.clear_after();
  daemon_->ApplyUnary(call, std::move(operation), [answer](const v1::OperationResult& result) {
    EXPECT_FALSE(answer->has_value()) << "answered twice";
    *answer = result;
  });
}

v1::OperationResult Engine::Do(v1::Operation operation) {
  std::optional<v1::OperationResult> answer;
  Send(std::move(operation), &answer);
  EXPECT_TRUE(answer.has_value()) << "parked";
  return answer.value_or(v1::OperationResult());
}

std::vector<uint64_t> Engine::Lease(uint32_t count) {
  const v1::LeaseResult result = LeaseAsked(count, count);
  EXPECT_EQ(result.blocks_size(), static_cast<int>(count)) << result.ShortDebugString();
  return {result.blocks().begin(), result.blocks().end()};
}

v1::LeaseResult Engine::LeaseAsked(uint32_t count, uint32_t min) {
  const v1::OperationResult result = Do(LeaseOp(count, min));
  EXPECT_EQ(result.code(), 0) << result.message();
  return result.lease();
}

v1::SealResult Engine::Seal(const std::vector<uint64_t>& blocks, const std::vector<std::string>& keys,
                            const std::string& parent, uint64_t after) {
  const v1::OperationResult result = Do(SealOp(blocks, keys, parent, after));
  EXPECT_EQ(result.code(), 0) << result.message();
  return result.seal();
}

v1::MatchResult Engine::Match(const std::vector<std::string>& keys) {
  const v1::OperationResult result = Do(MatchOp(keys));
  EXPECT_EQ(result.code(), 0) << result.message();
  return result.match();
}

v1::ReleaseResult Engine::Release(const std::vector<uint64_t>& blocks, uint64_t after) {
  const v1::OperationResult result = Do(ReleaseOp(blocks, after));
  EXPECT_EQ(result.code(), 0) << result.message();
  return result.release();
}

uint64_t Engine::Fence(uint64_t step) {
  const v1::OperationResult result = Do(FenceOp(step));
  EXPECT_EQ(result.code(), 0) << result.message();
  return result.fence().passed();
}

v1::StepResponse Engine::Step(std::vector<v1::Operation> operations) {
  v1::StepRequest request;
  request.set_sequence(++sequence);
  for (v1::Operation& operation : operations) *request.add_operations() = std::move(operation);
  return Step(request);
}

v1::StepResponse Engine::Step(const v1::StepRequest& request) {
  v1::StepResponse response;
  daemon_->Apply(member, request, &response);
  return response;
}

v1::StepResponse Engine::Pending() {
  v1::StepResponse response;
  daemon_->TakePending(member, nullptr, &response);
  return response;
}

// ---------------------------------------------------------------------------------------------- operations

v1::Operation LeaseOp(uint32_t count, uint32_t min) {
  v1::Operation operation;
  operation.mutable_lease()->set_count(count);
  operation.mutable_lease()->set_min(min);
  return operation;
}

v1::Operation ReleaseOp(const std::vector<uint64_t>& blocks, uint64_t after) {
  v1::Operation operation;
  operation.set_after(after);
  operation.mutable_release()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return operation;
}

v1::Operation RefOp(const std::vector<uint64_t>& blocks) {
  v1::Operation operation;
  operation.mutable_ref()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return operation;
}

v1::Operation TouchOp(const std::vector<uint64_t>& blocks) {
  v1::Operation operation;
  operation.mutable_touch()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return operation;
}

v1::Operation PinOp(const std::vector<uint64_t>& blocks, uint64_t ttl_ms) {
  v1::Operation operation;
  operation.mutable_pin()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  operation.mutable_pin()->set_ttl_ms(ttl_ms);
  return operation;
}

v1::Operation UnpinOp(const std::vector<uint64_t>& blocks) {
  v1::Operation operation;
  operation.mutable_unpin()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return operation;
}

v1::Operation RetainOp(const std::vector<uint64_t>& blocks, uint32_t priority, uint64_t ttl_ms) {
  v1::Operation operation;
  v1::SetRetention* retention = operation.mutable_set_retention();
  retention->mutable_blocks()->Add(blocks.begin(), blocks.end());
  retention->set_priority(priority);
  retention->set_ttl_ms(ttl_ms);
  return operation;
}

v1::Operation SealOp(const std::vector<uint64_t>& blocks, const std::vector<std::string>& keys,
                     const std::string& parent, uint64_t after) {
  v1::Operation operation;
  operation.set_after(after);
  v1::Seal* seal = operation.mutable_seal();
  seal->mutable_blocks()->Add(blocks.begin(), blocks.end());
  seal->set_key_bytes(32);
  for (const std::string& key : keys) seal->mutable_keys()->append(key);
  seal->set_parent_key(parent);
  return operation;
}

v1::Operation MatchOp(const std::vector<std::string>& keys) {
  v1::Operation operation;
  v1::GroupKeys* group = operation.mutable_match()->add_groups();
  group->set_key_bytes(32);
  for (const std::string& key : keys) group->mutable_keys()->append(key);
  return operation;
}

v1::Operation FenceOp(uint64_t step) {
  v1::Operation operation;
  operation.mutable_fence()->set_step(step);
  return operation;
}

v1::Operation WarmupDoneOp() {
  v1::Operation operation;
  operation.mutable_warmup_done();
  return operation;
}

v1::Operation CloseOp(uint64_t after) {
  v1::Operation operation;
  operation.set_after(after);
  operation.mutable_close_session();
  return operation;
}

std::string Key(const std::string& name) {
  std::string key = name;
  key.resize(32, '.');
  return key;
}

std::vector<std::string> Keys(const std::string& prefix, int count) {
  std::vector<std::string> keys;
  for (int i = 0; i < count; ++i) keys.push_back(Key(prefix + std::to_string(i)));
  return keys;
}

// ------------------------------------------------------------------------------------------------- fixture

void ServiceTest::StartDaemon(uint32_t slabs, int devices, int gpus) {
  options_.version = "test";
  options_.housekeeping_thread = false;
  if (options_.slab_bytes == 0) options_.slab_bytes = kSlabBlocks * kBlockBytes;
  options_.device_capacity_bytes.assign(devices, uint64_t{slabs} * kSlabBlocks * kBlockBytes);
  std::vector<std::unique_ptr<Device>> made;
  for (int i = 0; i < devices; ++i) {
    scripts_.push_back(std::make_unique<MemoryDevice::Script>());
    if (i >= devices - gpus) scripts_.back()->uuid_bytes = std::string(16, static_cast<char>(i));
    made.push_back(
        std::make_unique<MemoryDevice>("mem" + std::to_string(i), kGranuleBytes, scripts_.back().get()));
  }
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options_, std::move(made), &clock_);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
}

std::unique_ptr<Engine> ServiceTest::Attach(const std::string& name, uint32_t uid) {
  static std::atomic<int64_t> next_pid{100};
  return std::make_unique<Engine>(daemon_.get(), name, PeerCredentials{next_pid++, uid, uid},
                                  engines_give_back_, engines_take_holes_);
}

std::unique_ptr<Engine> ServiceTest::OpenEngine(const v1::OpenSession& request, const std::string& name) {
  std::unique_ptr<Engine> engine = Attach(name);
  const absl::Status status = engine->Open(request);
  EXPECT_TRUE(status.ok()) << status;
  engine->MapSlabs();
  return engine;
}

v1::OpenSession ServiceTest::OpenRequest(const std::string& model) const {
  v1::OpenSession request;
  v1::Layout* layout = request.mutable_layout();
  layout->set_encoding(v1::ENCODING_OPAQUE);
  layout->set_block_bytes(kBlockBytes);
  v1::LayerGroup* group = layout->add_groups();
  group->set_name("full");
  group->add_layers(0);
  group->set_tokens_per_block(16);
  request.mutable_fingerprint()->set_digest(model);
  (*request.mutable_fingerprint()->mutable_facts())["weights"] = model;
  return request;
}

v1::AddMember ServiceTest::JoinRequest(const Engine& inviter, uint32_t rank, const std::string& model) const {
  v1::AddMember request;
  request.set_session(inviter.opened.session());
  request.set_invitation(inviter.token);
  request.mutable_role()->set_rank(rank);
  const v1::OpenSession same = OpenRequest(model);
  *request.mutable_layout() = same.layout();
  *request.mutable_fingerprint() = same.fingerprint();
  return request;
}

v1::StateCounts ServiceTest::Blocks() {
  v1::StateCounts counts;
  for (const SpaceSnapshot& space : daemon_->Snapshot().spaces) {
    counts.set_free(counts.free() + space.blocks[static_cast<int>(BlockState::kFree)]);
    counts.set_leased(counts.leased() + space.blocks[static_cast<int>(BlockState::kLeased)]);
    counts.set_sealed(counts.sealed() + space.blocks[static_cast<int>(BlockState::kSealed)]);
    counts.set_cached(counts.cached() + space.blocks[static_cast<int>(BlockState::kCached)]);
    counts.set_quarantined(counts.quarantined() + space.blocks[static_cast<int>(BlockState::kQuarantined)]);
    counts.set_capacity(counts.capacity() + space.capacity);
  }
  EXPECT_EQ(counts.capacity(),
            counts.free() + counts.leased() + counts.sealed() + counts.cached() + counts.quarantined());
  return counts;
}

void ServiceTest::Settle(const std::vector<Engine*>& engines) {
  for (bool any = true; any;) {
    daemon_->HousekeepOnce();
    any = false;
    for (Engine* engine : engines) any = engine->MapSlabs() || any;
  }
}

}  // namespace kvpool
