// Engines whose live sequences are scored, pruned and compacted in place on a GPU: they write K and V through
// their own mappings, and the daemon's kernels score and move them.
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/layouts.h"
#include "client/live_sequence.h"
#include "client/session.h"
#include "cuda/driver/cuda_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/gpu/engine_on_gpu.h"

namespace kvpool {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr uint32_t kLayers = 3, kHeads = 2, kDim = 16, kTokens = 4;
constexpr size_t kPlaneFloats = size_t{kLayers} * kTokens * kHeads * kDim;

// A block is K, then V, in f32, [layer][token][head][dim]. K is 1 everywhere, so that the PagedEviction score
// of a token whose V is v in each dim is v.
class ScoreOnGpu : public EngineOnGpu {
 protected:
  SessionOptions Scored() const {
    SessionOptions options = Options();
    options.layout = PagedLayout({.layers = kLayers,
                                  .kv_heads = kHeads,
                                  .head_dim = kDim,
                                  .tokens_per_block = kTokens,
                                  .dtype = v1::DTYPE_F32});
    options.fingerprint.set_digest("score_engine_test");
    return options;
  }
  void Copy(uint64_t device, void* host, size_t bytes, bool to_device) {
    const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    ASSERT_TRUE(current.ok()) << current.status();
    const absl::StatusOr<CudaStream> stream = MakeStream(context_);
    ASSERT_TRUE(stream.ok()) << stream.status();
    const Driver& driver = context_->driver();
    ASSERT_EQ(to_device ? driver.cuMemcpyHtoDAsync(device, host, bytes, stream->get())
                        : driver.cuMemcpyDtoHAsync(host, device, bytes, stream->get()),
              CUDA_SUCCESS);
    ASSERT_EQ(driver.cuStreamSynchronize(stream->get()), CUDA_SUCCESS);
  }
  // A sequence of full blocks with one value a token.
  void Grow(Session* session, const std::vector<float>& values, LiveSequence* sequence) {
    absl::StatusOr<Blocks> blocks =
        session->LeaseWithin(static_cast<uint32_t>(values.size() / kTokens), Soon());
    ASSERT_TRUE(blocks.ok()) << blocks.status();
    for (size_t block = 0; block < blocks->size(); ++block) {
      std::vector<float> floats(2 * kPlaneFloats, 1);
      for (size_t i = 0; i < kPlaneFloats; ++i) {
        floats[kPlaneFloats + i] = values[block * kTokens + i / (kHeads * kDim) % kTokens];
      }
      Copy(session->address(blocks->refs()[block].id), floats.data(), floats.size() * sizeof(float), true);
    }
    ASSERT_TRUE(sequence->Append(*std::move(blocks)).ok());
    ASSERT_TRUE(sequence->Extend(std::vector<uint32_t>(values.size(), 7)).ok());
  }
  static std::vector<float> EachFourTimes(const std::vector<float>& values) {
    std::vector<float> tokens;
    for (const float value : values) tokens.insert(tokens.end(), kTokens, value);
    return tokens;
  }
};

TEST_F(ScoreOnGpu, TheBlockThatMattersLeastLeaves) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  const std::unique_ptr<Session> session = Open(Scored());
  ASSERT_NE(session, nullptr);
  LiveSequence sequence(session.get());
  Grow(session.get(), EachFourTimes({1, 5, 3, 2, 4, 6, 1}), &sequence);
  v1::Score score;
  score.set_block_scores(true);
  const auto scored = sequence.Score(score, Soon());
  ASSERT_TRUE(scored.ok()) << scored.status();
  EXPECT_THAT(scored->block_scores(), ElementsAre(1, 5, 3, 2, 4, 6, 1));
  EXPECT_EQ(scored->blocks_read(), 7u);
  v1::Prune prune;
  prune.set_budget_blocks(5);
  const auto pruned = sequence.Prune(prune, Soon());
  ASSERT_TRUE(pruned.ok()) << pruned.status();
  EXPECT_THAT(pruned->victims(), ElementsAre(2, 3)) << "the first and the newest stay";
  EXPECT_EQ(pruned->blocks_read(), 0u) << "their features are kept";
  EXPECT_THAT(sequence.blocks(), SizeIs(5));
}

TEST_F(ScoreOnGpu, TokensThatStayAreMovedTogether) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  const std::unique_ptr<Session> session = Open(Scored());
  ASSERT_NE(session, nullptr);
  LiveSequence sequence(session.get());
  Grow(session.get(), {9, 1, 9, 1, 8, 2, 7, 7, 1, 1, 1, 6}, &sequence);
  v1::Compact compact;
  compact.set_budget_tokens(6);
  compact.mutable_protection();  // nothing, in place of the policy's own
  const auto compacted = sequence.Compact(compact, Soon());
  ASSERT_TRUE(compacted.ok()) << compacted.status();
  EXPECT_THAT(compacted->kept_positions(), ElementsAre(0, 2, 4, 6, 7, 11));
  ASSERT_THAT(sequence.blocks(), SizeIs(2));
  std::vector<float> values;
  for (const BlockRef& ref : sequence.blocks()) {
    std::vector<float> floats(2 * kPlaneFloats);
    Copy(session->address(ref.id), floats.data(), floats.size() * sizeof(float), false);
    // The last layer's last head.
    for (size_t t = 0; t < kTokens; ++t) {
      values.push_back(floats[kPlaneFloats + ((kLayers - 1) * kTokens + t + 1) * kHeads * kDim - 1]);
    }
  }
  values.resize(6);
  EXPECT_THAT(values, ElementsAre(9, 9, 8, 7, 7, 6));
}

TEST_F(ScoreOnGpu, AGpuThatIsLostInTheMiddleOfAScoreEndsTheDaemon) {
  if (std::getenv("KVPOOL_LIBCUDA") == nullptr)
    GTEST_SKIP() << "only the fake driver loses a GPU when told to";
  StartDaemon({"KVPOOL_FAKE_CUDA_FAIL=cuLaunchKernel#2=CUDA_ERROR_ECC_UNCORRECTABLE"});
  const std::unique_ptr<Session> session = Open(Scored());
  ASSERT_NE(session, nullptr);
  LiveSequence sequence(session.get());
  Grow(session.get(), EachFourTimes({1, 2, 3}), &sequence);
  v1::Score score;
  score.set_block_scores(true);
  EXPECT_FALSE(sequence.Score(score, Soon()).ok());
  EXPECT_TRUE(absl::IsUnavailable(session->status())) << session->status();
  EXPECT_THAT(daemon_->Log(), HasSubstr("CUDA_ERROR_ECC_UNCORRECTABLE"));
}

TEST_F(ScoreOnGpu, ALaunchThatFailsIsAnErrorAndNoMore) {
  if (std::getenv("KVPOOL_LIBCUDA") == nullptr) GTEST_SKIP() << "only the fake driver fails on demand";
  StartDaemon({"KVPOOL_FAKE_CUDA_FAIL=cuLaunchKernel#3=CUDA_ERROR_INVALID_VALUE"});
  const std::unique_ptr<Session> session = Open(Scored());
  ASSERT_NE(session, nullptr);
  LiveSequence sequence(session.get());
  Grow(session.get(), EachFourTimes({1, 2, 3}), &sequence);
  v1::Score score;
  score.set_block_scores(true);
  const auto failed = sequence.Score(score, Soon());
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kInternal) << failed.status();
  EXPECT_THAT(failed.status().message(), HasSubstr("CUDA_ERROR_INVALID_VALUE"));
  const auto scored = sequence.Score(score, Soon());
  ASSERT_TRUE(scored.ok()) << scored.status();
  EXPECT_THAT(scored->block_scores(), ElementsAre(1, 2, 3));
  EXPECT_EQ(scored->blocks_read(), 3u) << "what the failed call made is not believed";
}

}  // namespace
}  // namespace kvpool
