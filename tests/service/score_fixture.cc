#include "tests/service/score_fixture.h"

#include <cstdlib>
#include <utility>

namespace kvpool {

void LateAnswer::Set(const v1::OperationResult& result) {
  MutexLock lock(&mu_);
  EXPECT_FALSE(result_.has_value()) << "answered twice";
  result_ = result;
  changed_.SignalAll();
}

v1::OperationResult LateAnswer::Await() {
  MutexLock lock(&mu_);
  while (!result_.has_value()) changed_.Wait(&mu_);
  return *result_;
}

bool LateAnswer::there() {
  MutexLock lock(&mu_);
  return result_.has_value();
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(size_t index, size_t capacity_bytes) {
  const char* const kind = std::getenv("KVPOOL_TEST_DEVICE");
  if (kind == nullptr) {
    return MakeHostDevice({.capacity_bytes = capacity_bytes, .try_huge_pages = false});
  }
  return OpenCudaDevice(std::to_string(index));
}

void ScoreTest::StartScoring(uint32_t slabs) { StartScoringOn(absl::MakeSpan(&hold_, 1), slabs); }

void ScoreTest::StartScoringOn(absl::Span<DeviceHold> holds, uint32_t slabs) {
  options_.version = "test";
  options_.housekeeping_thread = false;
  options_.slab_bytes = slab_blocks_ * kScoredBlockBytes;
  options_.device_capacity_bytes.assign(holds.size(), slabs * options_.slab_bytes);
  std::vector<std::unique_ptr<Device>> devices;
  for (size_t i = 0; i < holds.size(); ++i) {
    absl::StatusOr<std::unique_ptr<Device>> device = OpenDevice(i, options_.device_capacity_bytes[i]);
    ASSERT_TRUE(device.ok()) << device.status();
    devices.push_back(MakeHeldDevice(*std::move(device), &holds[i]));
  }
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options_, std::move(devices), &clock_);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
}

v1::OpenSession ScoredRequest(const std::string& model) {
  v1::OpenSession request;
  v1::Layout* layout = request.mutable_layout();
  layout->set_encoding(v1::ENCODING_STRIDED);
  layout->set_block_bytes(kScoredBlockBytes);
  v1::LayerGroup* group = layout->add_groups();
  group->set_name("full");
  for (uint32_t layer = 0; layer < kLayers; ++layer) group->add_layers(layer);
  group->set_tokens_per_block(kTokens);
  group->set_kv_heads(kHeads);
  group->set_k_head_dim(kDim);
  group->set_v_head_dim(kDim);
  group->set_dtype(v1::DTYPE_F32);
  v1::Plane* k = group->mutable_k();
  k->set_dim_stride_bytes(sizeof(float));
  k->set_head_stride_bytes(kDim * k->dim_stride_bytes());
  k->set_token_stride_bytes(kHeads * k->head_stride_bytes());
  k->set_layer_stride_bytes(kTokens * k->token_stride_bytes());
  *group->mutable_v() = *k;
  group->mutable_v()->set_offset_bytes(kLayers * k->layer_stride_bytes());
  request.mutable_fingerprint()->set_digest(model);
  return request;
}

std::unique_ptr<Engine> ScoreTest::OpenScored(const std::string& name, const std::string& model) {
  std::unique_ptr<Engine> engine = OpenEngine(ScoredRequest(model), name);
  Settle({engine.get()});
  return engine;
}

float* ScoreTest::Element(uint64_t ref, bool value, uint32_t layer, uint32_t token, uint32_t head,
                          uint32_t dim) {
  const uint32_t block = Index(BlockRef::Unpack(ref).id);
  const uint64_t slab = hold_.slab_addresses().at(block / slab_blocks_);
  auto* first = reinterpret_cast<float*>(slab + block % slab_blocks_ * kScoredBlockBytes);
  const uint32_t plane = value ? kLayers : 0;
  return first + (((plane + layer) * kTokens + token) * kHeads + head) * kDim + dim;
}

void ScoreTest::Write(uint64_t ref, const std::vector<float>& values) {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t token = 0; token < kTokens; ++token) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        for (uint32_t dim = 0; dim < kDim; ++dim) {
          *Element(ref, false, layer, token, head, dim) = 1;
          *Element(ref, true, layer, token, head, dim) = values[token];
        }
      }
    }
  }
}

std::vector<uint64_t> ScoreTest::LeaseWith(Engine* engine, const std::vector<float>& values) {
  const std::vector<uint64_t> blocks = engine->Lease(static_cast<uint32_t>(values.size()));
  for (size_t i = 0; i < blocks.size(); ++i) Write(blocks[i], std::vector<float>(kTokens, values[i]));
  return blocks;
}

std::shared_ptr<LateAnswer> ScoreTest::Begin(Engine* engine, v1::Operation operation) {
  auto answer = std::make_shared<LateAnswer>();
  v1::Call call;
  call.set_member_token(engine->token);
  call.set_sequence(++engine->sequence);
  call.set_after(operation.after());
  operation.clear_after();
  daemon_->ApplyUnary(call, std::move(operation),
                      [answer](const v1::OperationResult& result) { answer->Set(result); });
  return answer;
}

v1::PruneResult ScoreTest::Prune(Engine* engine, const v1::Operation& operation) {
  const v1::OperationResult result = Run(engine, operation);
  EXPECT_EQ(result.code(), 0) << result.message();
  return result.prune();
}

v1::Operation ScoreOp(const std::vector<uint64_t>& blocks, uint32_t last_block_tokens) {
  v1::Operation operation;
  v1::Score* score = operation.mutable_score();
  score->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  score->mutable_sequence()->set_last_block_tokens(last_block_tokens);
  score->set_token_scores(true);
  score->set_block_scores(true);
  return operation;
}

v1::Operation PruneOp(const std::vector<uint64_t>& blocks, uint32_t budget_tokens, uint64_t after) {
  v1::Operation operation;
  operation.set_after(after);
  v1::Prune* prune = operation.mutable_prune();
  prune->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  prune->set_budget_tokens(budget_tokens);
  return operation;
}

v1::Operation CompactOp(const std::vector<uint64_t>& blocks, uint32_t budget_tokens) {
  v1::Operation operation;
  v1::Compact* compact = operation.mutable_compact();
  compact->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  compact->set_budget_tokens(budget_tokens);
  return operation;
}

v1::Signal InlinedSignal(v1::SignalKind kind, const std::vector<float>& values) {
  v1::Signal signal;
  signal.set_kind(kind);
  signal.mutable_data()->set_inlined(values.data(), values.size() * sizeof(float));
  return signal;
}

std::vector<uint64_t> TableOf(const v1::PruneResult& result) {
  return {result.table().begin(), result.table().end()};
}

std::vector<uint64_t> TableOf(const v1::CompactResult& result) {
  return {result.table().begin(), result.table().end()};
}

}  // namespace kvpool
