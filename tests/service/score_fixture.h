// A daemon with K and V in its memory, for the verbs that run on the device: host memory, or with KVPOOL_TEST_DEVICE=cuda GPUs
// as the fake driver imitates them, in memory that this process can write. The same tests run on both.
//
// A block is 64 KiB and has 4 tokens of 2 layers, 2 kv heads and 4 dims in f32 at its start: one slab of 2 MiB has 32
// blocks. K is 1 everywhere unless a test writes otherwise, so that the PagedEviction score of a token is ‖V‖ / 2.
#ifndef KVPOOL_TESTS_SERVICE_SCORE_FIXTURE_H_
#define KVPOOL_TESTS_SERVICE_SCORE_FIXTURE_H_

#include <memory>
#include <string>
#include <vector>

#include "tests/service/service_fixture.h"
#include "tests/support/held_device.h"

namespace kvpool {

inline constexpr uint32_t kLayers = 2, kHeads = 2, kTokens = 4, kDim = 4;
// Two query heads read a kv head.
inline constexpr uint32_t kQueries = 2, kGroup = 2, kQueryHeads = kGroup * kHeads;
inline constexpr uint32_t kScoredSlabBlocks = 32;
inline constexpr uint64_t kScoredBlockBytes = 64 << 10;

// An answer that comes on another thread.
class LateAnswer {
 public:
  void Set(const v1::OperationResult& result);
  v1::OperationResult Await();
  bool there();

 private:
  Mutex mu_;
  CondVar changed_;
  std::optional<v1::OperationResult> result_ ABSL_GUARDED_BY(mu_);
};

class ScoreTest : public ServiceTest {
 protected:
  ~ScoreTest() override { daemon_.reset(); }
  // One device.
  void StartScoring(uint32_t slabs);
  // One for each of `holds`, of so many slabs.
  void StartScoringOn(absl::Span<DeviceHold> holds, uint32_t slabs);
  std::unique_ptr<Engine> OpenScored(const std::string& name = "engine", const std::string& model = "model");

  // ---- K and V, of the space that was made first
  float* Element(uint64_t ref, bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim);
  // Fills a block: K is 1, and V of token t, in all layers and heads, `values[t]` in each dim.
  void Write(uint64_t ref, const std::vector<float>& values);
  // As many blocks, of one value each.
  std::vector<uint64_t> LeaseWith(Engine* engine, const std::vector<float>& values);
  float ValueAt(uint64_t ref, uint32_t token, uint32_t layer = 0, uint32_t head = 0) {
    return *Element(ref, true, layer, token, head, 0);
  }

  // ---- Calls that are answered when the device is done
  std::shared_ptr<LateAnswer> Begin(Engine* engine, v1::Operation operation);
  v1::OperationResult Run(Engine* engine, v1::Operation operation) {
    return Begin(engine, std::move(operation))->Await();
  }
  v1::PruneResult Prune(Engine* engine, const v1::Operation& operation);

  DeviceHold hold_;
  uint32_t slab_blocks_ = kScoredSlabBlocks;
};

// A session whose K and V lie as above.
v1::OpenSession ScoredRequest(const std::string& model = "model");
v1::Operation ScoreOp(const std::vector<uint64_t>& blocks, uint32_t last_block_tokens = 0);
v1::Operation PruneOp(const std::vector<uint64_t>& blocks, uint32_t budget_tokens, uint64_t after = 0);
v1::Operation CompactOp(const std::vector<uint64_t>& blocks, uint32_t budget_tokens);
v1::Signal InlinedSignal(v1::SignalKind kind, const std::vector<float>& values);
std::vector<uint64_t> TableOf(const v1::PruneResult& result);
std::vector<uint64_t> TableOf(const v1::CompactResult& result);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_SCORE_FIXTURE_H_
