// A GPU's KvCompute on a driver that runs out of memory, refuses a launch or is lost half way: the fake
// driver, which fails as its environment says. Each case runs in a process of its own.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/driver/cuda_kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "cuda/scorers/policies/registry.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/support/status_macros.h"
#include "tests/device/in_child.h"

namespace kvpool {
namespace {

using lab::StagedSequence;
using scorers::KvPlane;
using scorers::KvView;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// One layer, one head, two dims in f32: K of a token is (1, 0), V (token, 0).
class Sequence {
 public:
  explicit Sequence(uint32_t tokens) {
    constexpr uint32_t kTokensPerBlock = 4;
    kv_.shape = {.layers = 1,
                 .kv_heads = 1,
                 .tokens_per_block = kTokensPerBlock,
                 .tokens = tokens,
                 .k_head_dim = 2,
                 .v_head_dim = 2};
    kv_.k = {.token_stride_bytes = 8, .dim_stride_bytes = 4, .head_dim = 2};
    kv_.v = kv_.k;
    kv_.v.offset_bytes = kTokensPerBlock * 8;
    for (uint32_t block = 0; block < kv_.shape.blocks(); ++block) {
      memory_.emplace_back(4 * kTokensPerBlock, 0.0f);
      for (uint32_t t = 0; t < kTokensPerBlock; ++t) {
        memory_.back()[2 * t] = 1;
        memory_.back()[2 * (kTokensPerBlock + t)] = static_cast<float>(block * kTokensPerBlock + t);
      }
      addresses_.push_back(reinterpret_cast<uint64_t>(memory_.back().data()));
    }
    kv_.blocks = addresses_.data();
  }
  Sequence(const Sequence&) = delete;
  const KvView& kv() const { return kv_; }

 private:
  std::vector<std::vector<float>> memory_;
  std::vector<uint64_t> addresses_;
  KvView kv_;
};

absl::Status ScoreOnce(KvCompute* compute, const Sequence& sequence) {
  ASSIGN_OR_RETURN(const scorers::BoundPolicy policy, scorers::BindPolicy("paged_eviction", {}));
  ASSIGN_OR_RETURN(const StagedSequence staged, StagedSequence::Make(compute, sequence.kv(), {}));
  ASSIGN_OR_RETURN(const lab::ScoredSequence scored,
                   lab::ScoreStaged(compute, staged, {.policy = policy, .shape = sequence.kv().shape}));
  for (size_t i = 0; i < scored.tokens.size(); ++i) {
    if (scored.tokens[i] != static_cast<float>(i)) {
      return absl::UnknownError(absl::StrCat("token ", i, " has score ", scored.tokens[i]));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaKvCompute>> OpenCompute(const CudaKvCompute::Options& options = {}) {
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::Open("0"));
  return CudaKvCompute::Open(std::move(context), options);
}

absl::Status OpenAndScore() {
  ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
  return ScoreOnce(compute.get(), Sequence(19));
}

// The answers of a first and of a second call.
absl::Status ScoreTwice() {
  ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
  const absl::Status first = ScoreOnce(compute.get(), Sequence(19));
  const absl::Status second = ScoreOnce(compute.get(), Sequence(19));
  if (first.ok()) return absl::UnknownError("nothing failed");
  return absl::Status(first.code(), absl::StrCat(first.message(), "; then ", second.ToString()));
}

TEST(ComputeFaults, WithoutAnyItScores) { EXPECT_EQ(InChild({}, OpenAndScore), "OK"); }

TEST(ComputeFaults, OutOfMemoryHasNumbersAndPasses) {
  // The first allocation is the sequence's, the second the staging's, the third the records', the fourth
  // the workspace.
  for (const int allocation : {1, 2, 3, 4}) {
    const std::string fault = absl::StrCat("cuMemAlloc#", allocation, "=CUDA_ERROR_OUT_OF_MEMORY");
    EXPECT_THAT(
        InChild({{"KVPOOL_FAKE_CUDA_FAIL", fault}}, ScoreTwice),
        AllOf(StartsWith("RESOURCE_EXHAUSTED: GPU-"), HasSubstr(" bytes asked, "), HasSubstr("; then OK")))
        << fault;
  }
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemHostAlloc#1=CUDA_ERROR_OUT_OF_MEMORY"}}, ScoreTwice),
              AllOf(StartsWith("RESOURCE_EXHAUSTED: cuMemHostAlloc of "), HasSubstr("; then OK")));
}

TEST(ComputeFaults, ALaunchThatFailsNamesItsKernelAndPasses) {
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuLaunchKernel#7=CUDA_ERROR_INVALID_VALUE"}}, ScoreTwice),
              AllOf(StartsWith("INTERNAL: kvpool_score_"), HasSubstr("CUDA_ERROR_INVALID_VALUE"),
                    HasSubstr("; then OK")));
  EXPECT_THAT(
      InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemcpyDtoHAsync#1=CUDA_ERROR_INVALID_VALUE"}}, ScoreTwice),
      AllOf(StartsWith("INTERNAL: cuMemcpyDtoHAsync"), HasSubstr("; then OK")));
}

TEST(ComputeFaults, AStickyErrorInTheMiddleIsSticky) {
  // Kernels 1 to 5 stage the blocks; the errors are met by a launch, by a copy back and by the wait at
  // the end.
  for (const char* fault :
       {"cuLaunchKernel#7=CUDA_ERROR_ECC_UNCORRECTABLE", "cuMemcpyDtoHAsync#1=CUDA_ERROR_LAUNCH_FAILED",
        "cuStreamSynchronize#6=CUDA_ERROR_ILLEGAL_ADDRESS"}) {
    EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", fault}}, OpenAndScore), StartsWith("sticky DATA_LOSS: "))
        << fault;
  }
}

// Six of eight tokens, whose keys are all alike, are merged into the oldest of the other two.
absl::Status MergeOnce(KvCompute* compute) {
  const Sequence sequence(8);
  ASSIGN_OR_RETURN(const StagedSequence from, StagedSequence::Make(compute, sequence.kv(), {}));
  ASSIGN_OR_RETURN(const StagedSequence to, StagedSequence::MakeEmpty(compute, Sequence(2).kv()));
  const std::vector<uint32_t> kept = {3, 5}, evicted = {0, 1, 2, 4, 6, 7};
  const KvView there = to.kv();
  const auto merged = compute->Merge(
      {.gather = {.from = from.kv(), .to_blocks = there.blocks, .kept = kept.data(), .kept_tokens = 2},
       .evicted = evicted.data(),
       .evicted_tokens = 6});
  RETURN_IF_ERROR(merged.status());
  if (merged->merged == std::vector<uint32_t>{6}) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat(merged->merged[0], " tokens are merged"));
}

TEST(ComputeFaults, AMergeThatFailsNamesWhatFailedAndPasses) {
  const auto twice = [] {
    ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
    const absl::Status first = MergeOnce(compute.get()), second = MergeOnce(compute.get());
    return absl::Status(first.code(), absl::StrCat(first.message(), "; then ", second.ToString()));
  };
  // Two launches stage the sequence.
  const char* const kernels[] = {"merge_norms", "nearest_f32", "link", "merge"};
  for (int i = 0; i < 4; ++i) {
    const std::string fault = absl::StrCat("cuLaunchKernel#", i + 3, "=CUDA_ERROR_INVALID_VALUE");
    EXPECT_THAT(
        InChild({{"KVPOOL_FAKE_CUDA_FAIL", fault}}, twice),
        AllOf(StartsWith(absl::StrCat("INTERNAL: kvpool_score_", kernels[i], ":")), HasSubstr("; then OK")));
  }
  // The sequence, its staging and the destination are allocated first, then the workspace.
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuMemAlloc#4=CUDA_ERROR_OUT_OF_MEMORY"}}, twice),
              AllOf(StartsWith("RESOURCE_EXHAUSTED: GPU-"), HasSubstr("; then OK")));
}

// All of eight tokens are added to a state by weights that are 1.
absl::Status FoldOnce(KvCompute* compute) {
  const Sequence sequence(8);
  ASSIGN_OR_RETURN(const StagedSequence from, StagedSequence::Make(compute, sequence.kv(), {}));
  const std::vector<float> weights(4, 1);
  ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> memory, compute->Allocate(128));
  const KvPiece piece = {.address = reinterpret_cast<uint64_t>(weights.data()), .bytes = 16};
  RETURN_IF_ERROR(compute->Stage({&piece, 1}, memory->address()));
  const std::vector<uint32_t> evicted = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto folded = compute->Fold({.from = from.kv(),
                                     .evicted = evicted.data(),
                                     .evicted_tokens = 8,
                                     .features = 1,
                                     .hidden = 1,
                                     .weights = reinterpret_cast<const float*>(memory->address()),
                                     .state = reinterpret_cast<float*>(memory->address() + 64)});
  RETURN_IF_ERROR(folded.status());
  if (*folded == 8) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat(*folded, " tokens are added"));
}

TEST(ComputeFaults, AFoldThatFailsNamesWhatFailedAndPasses) {
  const auto twice = [] {
    ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
    const absl::Status first = FoldOnce(compute.get()), second = FoldOnce(compute.get());
    return absl::Status(first.code(), absl::StrCat(first.message(), "; then ", second.ToString()));
  };
  // Two launches stage the sequence, and one the weights.
  const char* const kernels[] = {"fold_f32", "sum_folds"};
  for (int i = 0; i < 2; ++i) {
    const std::string fault = absl::StrCat("cuLaunchKernel#", i + 4, "=CUDA_ERROR_INVALID_VALUE");
    EXPECT_THAT(
        InChild({{"KVPOOL_FAKE_CUDA_FAIL", fault}}, twice),
        AllOf(StartsWith(absl::StrCat("INTERNAL: kvpool_score_", kernels[i], ":")), HasSubstr("; then OK")));
  }
}

// One of four tokens leaves, whose keys are all alike, and whose values differ.
absl::Status MeasureOnce(KvCompute* compute) {
  const Sequence sequence(4);
  const std::vector<float> queries(sequence.kv().shape.k_head_dim, 1);
  scorers::Signals signals;
  signals.window = {.data = queries.data(), .queries = 1, .q_heads = 1};
  signals.window.head_stride_bytes = queries.size() * sizeof(float);
  signals.window.query_stride_bytes = signals.window.layer_stride_bytes = signals.window.head_stride_bytes;
  ASSIGN_OR_RETURN(const StagedSequence staged, StagedSequence::Make(compute, sequence.kv(), signals));
  const uint32_t kept = 0b1110;
  const auto drift = compute->Drift({.kv = staged.kv(), .window = staged.signals().window, .kept = &kept});
  RETURN_IF_ERROR(drift.status());
  if (drift->rows == 1 && drift->sum > 0) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat("a drift of ", drift->sum));
}

TEST(ComputeFaults, AMeasurementThatFailsNamesWhatFailedAndPasses) {
  const auto twice = [] {
    ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
    const absl::Status first = MeasureOnce(compute.get()), second = MeasureOnce(compute.get());
    return absl::Status(first.code(), absl::StrCat(first.message(), "; then ", second.ToString()));
  };
  EXPECT_EQ(InChild({}, twice), "OK");
  // One launch stages the sequence, and one its queries.
  const char* const kernels[] = {"queries", "drift_logits", "drift_outputs"};
  for (int i = 0; i < 3; ++i) {
    const std::string fault = absl::StrCat("cuLaunchKernel#", i + 3, "=CUDA_ERROR_INVALID_VALUE");
    EXPECT_THAT(
        InChild({{"KVPOOL_FAKE_CUDA_FAIL", fault}}, twice),
        AllOf(StartsWith(absl::StrCat("INTERNAL: kvpool_score_", kernels[i], ":")), HasSubstr("; then OK")));
  }
}

// Six of eight tokens are written to one record.
absl::Status KeepLowOnce(KvCompute* compute) {
  const Sequence sequence(8);
  ASSIGN_OR_RETURN(const StagedSequence from, StagedSequence::Make(compute, sequence.kv(), {}));
  const scorers::KvView there = from.kv();
  const LowLayout layout = LowLayout::Of({.planes = there.shape.planes(),
                                          .k_head_dim = there.shape.k_head_dim,
                                          .v_head_dim = there.shape.v_head_dim,
                                          .bits = 4,
                                          .block_bytes = 4096});
  ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> to, compute->Allocate(4096));
  const std::vector<uint32_t> evicted = {0, 1, 2, 4, 6, 7};
  const uint64_t block = to->address();
  return compute->KeepLow(
      {.from = there, .to_blocks = &block, .evicted = evicted.data(), .evicted_tokens = 6, .layout = layout});
}

TEST(ComputeFaults, AKernelThatWritesLowPrecisionAndFailsIsNamedAndPasses) {
  const auto twice = [] {
    ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
    const absl::Status first = KeepLowOnce(compute.get()), second = KeepLowOnce(compute.get());
    return absl::Status(first.code(), absl::StrCat(first.message(), "; then ", second.ToString()));
  };
  // Two launches stage the sequence.
  EXPECT_THAT(InChild({{"KVPOOL_FAKE_CUDA_FAIL", "cuLaunchKernel#3=CUDA_ERROR_INVALID_VALUE"}}, twice),
              AllOf(StartsWith("INTERNAL: kvpool_score_low_f32:"), HasSubstr("; then OK")));
}

TEST(ComputeFaults, AKernelThatReachesOutsideLosesTheContext) {
  EXPECT_THAT(InChild({},
                      [] {
                        ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
                        ASSIGN_OR_RETURN(const scorers::BoundPolicy policy,
                                         scorers::BindPolicy("paged_eviction", {}));
                        const Sequence sequence(19);
                        ASSIGN_OR_RETURN(StagedSequence staged,
                                         StagedSequence::MakeEmpty(compute.get(), sequence.kv()));
                        ASSIGN_OR_RETURN(const scorers::ScorePlan plan,
                                         compute->Plan({.policy = policy, .shape = sequence.kv().shape}, {}));
                        ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> memory,
                                         compute->Allocate(5 * plan.record.floats * sizeof(float)));
                        const auto record = reinterpret_cast<float*>(memory->address());
                        const std::vector<float*> records(5, record);
                        const std::vector<uint64_t> nowhere(5, uint64_t{1} << 46);
                        KvView kv = staged.kv();
                        kv.blocks = nowhere.data();
                        const std::vector<BlockRun> runs = {{0, 5}};
                        std::vector<float> scores(19);
                        return compute->Score({.plan = &plan,
                                               .kv = kv,
                                               .records = records,
                                               .to_record = runs,
                                               .output = {.token_scores = scores.data()}});
                      }),
              AllOf(StartsWith("sticky DATA_LOSS: scoring"), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS")));
}

TEST(ComputeFaults, InTheSteadyStateNothingIsAllocated) {
  const auto score = [] {
    ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute, OpenCompute());
    ASSIGN_OR_RETURN(const scorers::BoundPolicy policy, scorers::BindPolicy("paged_eviction", {}));
    const Sequence sequence(19);
    ASSIGN_OR_RETURN(const StagedSequence staged, StagedSequence::Make(compute.get(), sequence.kv(), {}));
    ASSIGN_OR_RETURN(const scorers::ScorePlan plan,
                     compute->Plan({.policy = policy, .shape = sequence.kv().shape}, {}));
    ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> memory,
                     compute->Allocate(5 * plan.record.floats * sizeof(float)));
    std::vector<float*> records;
    for (uint32_t i = 0; i < 5; ++i) {
      records.push_back(reinterpret_cast<float*>(memory->address()) + i * plan.record.floats);
    }
    const std::vector<BlockRun> runs = {{0, 5}};
    const std::vector<uint8_t> marks(5);
    std::vector<uint32_t> victims(2);
    for (int call = 0; call < 10; ++call) {
      RETURN_IF_ERROR(compute->Score(
          {.plan = &plan,
           .kv = staged.kv(),
           .records = records,
           .to_record = runs,
           .choice = {.count = 2, .protected_marks = marks, .victims = absl::MakeSpan(victims)}}));
    }
    return absl::OkStatus();
  };
  // Device memory: sequence, staging, records, workspace, (no selection on the device for so few); pinned: in
  // and out.
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_FAIL",
                      "cuMemAlloc#5+=CUDA_ERROR_OUT_OF_MEMORY,cuMemHostAlloc#3+=CUDA_ERROR_OUT_OF_MEMORY"}},
                    score),
            "OK");
}

TEST(ComputeFaults, TheDevicesClockTimesACall) {
  EXPECT_EQ(InChild({{"KVPOOL_FAKE_CUDA_LATENCY_US", "cuLaunchKernel=2000"}},
                    [] {
                      ASSIGN_OR_RETURN(const std::unique_ptr<CudaKvCompute> compute,
                                       OpenCompute({.timed = true}));
                      RETURN_IF_ERROR(ScoreOnce(compute.get(), Sequence(19)));
                      // At least four kernels lie between the first and the last copy.
                      const double us = compute->last_times().call_us;
                      if (us > 3 * 2000) return absl::OkStatus();
                      return absl::UnknownError(absl::StrCat(us, " us"));
                    }),
            "OK");
}

}  // namespace
}  // namespace kvpool
