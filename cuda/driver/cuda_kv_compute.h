// A GPU that scores and moves K and V: KvCompute over the kernels of the scorers.
//
// A call puts its small arrays (addresses, marks, positions) into pinned memory, copies them to the device
// at once, launches, copies results back into pinned memory, and waits for its own stream. It waits after
// an error too: the caller may reuse blocks and buffers when the call returns, so nothing of it may still
// run. Memory is allocated only by a call that needs more than any before. Only sources of the CUDA side
// include this.
#ifndef KVPOOL_CUDA_DRIVER_CUDA_KV_COMPUTE_H_
#define KVPOOL_CUDA_DRIVER_CUDA_KV_COMPUTE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/driver/score_kernels.h"
#include "cuda/kv_compute.h"

namespace kvpool {

// Memory that grows to the largest call's need: on the device, or pinned on the host.
template <typename Memory>
class GrownMemory {
 public:
  // Growing loses the content.
  absl::Status Grow(const std::shared_ptr<const CudaContext>& context, size_t bytes);
  uint64_t address() const;

 private:
  Memory memory_;
  size_t bytes_ = 0;
};

class CudaKvCompute final : public KvCompute {
 public:
  struct Options {
    bool timed = false;  // keeps last_times(), with three events for each call
  };
  static absl::StatusOr<std::unique_ptr<CudaKvCompute>> Open(std::shared_ptr<const CudaContext> context,
                                                             const Options& options);

  absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) override;
  absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) override;
  absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                          const scorers::Signals& signals) const override;
  absl::Status Score(const ScoreCall& call) override;
  // Weights that all tokens are multiplied with come from the L2 cache: a hundredth of what an A100 multiplies in f32. A window's
  // attention is a fifth of it in f32, and thirty times that on tensor cores (tests/gpu/KERNELS.md).
  double SecondsFor(const scorers::ScorePlan& plan) const override {
    return plan.products / 1e11 + plan.window_products / 2e12;
  }
  absl::Status Gather(const scorers::GatherRequest& request) override;
  absl::StatusOr<MergeOutcome> Merge(const scorers::MergeRequest& request) override;
  absl::StatusOr<uint64_t> Fold(const scorers::FoldRequest& request) override;
  absl::Status KeepLow(const scorers::LowRequest& request) override;
  absl::StatusOr<scorers::Drift> Drift(const scorers::DriftRequest& request) override;

  // Microseconds on the device's clock.
  struct Times {
    double call_us = 0;    // the first copy of the call to its last
    double choice_us = 0;  // the part in which victims were chosen and copied back; 0 if none were
  };
  // REQUIRES: Options::timed.
  const Times& last_times() const { return last_times_; }

 private:
  struct Grid {
    uint64_t x = 1;
    uint64_t y = 1;
    uint32_t threads = 1;
  };
  // The scores of one call, on the device.
  struct Scores;
  // The arrays that go to the device with a call, laid out alike in pinned memory and there.
  class Inputs;

  CudaKvCompute(std::shared_ptr<const CudaContext> context, ScoreKernels kernels, CudaStream stream)
      : context_(std::move(context)), kernels_(std::move(kernels)), stream_(std::move(stream)) {}

  template <typename... Args>
  absl::Status Launch(const CudaKernel& kernel, const Grid& grid, const Args&... arguments);
  // Runs `enqueue`, which fills the stream, and waits for the stream, after an error of `enqueue` too.
  template <typename Enqueue>
  absl::Status RunOnStream(const char* what, const Enqueue& enqueue);
  absl::Status Record(const CudaEvent& event);
  absl::StatusOr<double> MicrosBetween(const CudaEvent& from, const CudaEvent& to) const;
  absl::Status Send(const Inputs& inputs);
  absl::Status Fetch(uint64_t from, size_t bytes, size_t to);

  absl::Status EnqueueScore(const ScoreCall& call, Scores* scores);
  absl::Status EnqueueFeatures(const ScoreCall& call, const scorers::ScoreContext& on_device);
  absl::Status EnqueuePlaneScores(const scorers::ScorePlan& plan, bool tokens,
                                  const scorers::ScoreContext& on_device);
  absl::Status EnqueueRows(const scorers::ScorePlan& plan, uint32_t heads, const float* values,
                           uint64_t items, float* rows);
  absl::Status EnqueueBlocks(const scorers::ScorePlan& plan, const scorers::ScoreContext& on_device,
                             const float* token_rows, float* block_scores);
  absl::Status EnqueueDrift(const scorers::DriftContext& on_device);
  absl::Status EnqueueChoice(const ScoreCall& call, Scores* scores);
  absl::Status TakeScores(const ScoreCall& call, const Scores& scores);
  // The arrays of a compaction among the inputs of its call.
  struct GatherArrays;

  const std::shared_ptr<const CudaContext> context_;
  const ScoreKernels kernels_;
  const CudaStream stream_;
  CudaEvent begin_, choice_, end_;  // valid if timed
  bool chose_ = false;              // choice_ was recorded by this call
  Times last_times_;
  GrownMemory<CudaArray> workspace_, selection_, inputs_;
  GrownMemory<CudaPinned> pinned_inputs_, pinned_outputs_;
  std::vector<uint64_t> keys_;
};

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DRIVER_CUDA_KV_COMPUTE_H_
