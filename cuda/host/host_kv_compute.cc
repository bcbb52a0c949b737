// KvCompute in host memory: runs the same kernel bodies as a GPU on a number of cores.
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "cuda/kv_compute.h"
#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/select.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

constexpr std::align_val_t kAlignment{64};

class HostBuffer final : public KvBuffer {
 public:
  explicit HostBuffer(size_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(bytes, kAlignment))) {}
  ~HostBuffer() override { ::operator delete(data_, kAlignment); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  uint64_t address() const override { return reinterpret_cast<uint64_t>(data_); }
  size_t bytes() const override { return bytes_; }
  absl::Span<std::byte> span() const { return {data_, bytes_}; }

 private:
  const size_t bytes_;
  std::byte* const data_;
};

class HostKvCompute final : public KvCompute {
 public:
  explicit HostKvCompute(uint32_t threads) : workers_(threads) {}

  absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) override {
    return std::make_unique<HostBuffer>(bytes);
  }

  absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) override {
    auto* at = reinterpret_cast<std::byte*>(to);
    for (const KvPiece& piece : pieces) {
      if (piece.bytes == 0) continue;  // it may have no address
      std::memcpy(at, reinterpret_cast<const std::byte*>(piece.address), piece.bytes);
      at += piece.bytes;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                          const scorers::Signals& signals) const override {
    return scorers::PlanScore(request, signals, workers_.count());
  }

  absl::Status Score(const ScoreCall& call) override {
    const scorers::ScorePlan& plan = *call.plan;
    RETURN_IF_ERROR(scorers::CheckCandidates(call.choice.protected_marks, call.choice.count));
    for (const BlockRun& run : call.to_record) {
      scorers::ComputeRecords(plan, call.kv, run.first, run.count, call.records.data() + run.first,
                              &workers_);
    }
    GrowWorkspace(plan.workspace_bytes);
    scorers::ScoreOutput output = call.output;
    const VictimChoice& choice = call.choice;
    float** const chosen_by = choice.of_tokens ? &output.token_scores : &output.block_scores;
    if (choice.count > 0 && *chosen_by == nullptr) {
      scores_.resize(plan.rows * choice.protected_marks.size());
      *chosen_by = scores_.data();
    }
    scorers::RunScore(plan, {.kv = call.kv, .signals = call.signals, .records = call.records.data()},
                      workspace_->span(), output, &workers_);
    if (choice.count == 0) return absl::OkStatus();
    return scorers::SelectRows(*chosen_by, plan.rows, choice.protected_marks, choice.count, &keys_,
                               choice.victims);
  }

  // A thread multiplies four vectors of 8 floats in a nanosecond at best, and an eighth of it with weights from memory.
  double SecondsFor(const scorers::ScorePlan& plan) const override {
    return (plan.products + plan.window_products) / (4e9 * workers_.count());
  }

  absl::Status Gather(const scorers::GatherRequest& request) override {
    scorers::Gather(request, &workers_);
    return absl::OkStatus();
  }

  absl::StatusOr<MergeOutcome> Merge(const scorers::MergeRequest& request) override {
    scorers::MergeContext context{.request = request};
    GrowWorkspace(scorers::ArrangeMerge(0, &context));
    scorers::ArrangeMerge(workspace_->address(), &context);
    scorers::Merge(context, &workers_);
    const uint32_t planes = request.gather.from.shape.planes();
    return MergeOutcome{.thresholds = {context.thresholds, context.thresholds + planes},
                        .merged = {context.merged, context.merged + planes}};
  }

  absl::StatusOr<uint64_t> Fold(const scorers::FoldRequest& request) override {
    scorers::FoldContext context{.request = request};
    GrowWorkspace(scorers::ArrangeFold(0, &context));
    scorers::ArrangeFold(workspace_->address(), &context);
    scorers::Fold(context, &workers_);
    return std::accumulate(context.folded, context.folded + request.from.shape.planes(), uint64_t{0});
  }

  absl::StatusOr<scorers::Drift> Drift(const scorers::DriftRequest& request) override {
    scorers::DriftContext context;
    GrowWorkspace(scorers::ArrangeDrift(request, 0, &context));
    context = {};
    scorers::ArrangeDrift(request, workspace_->address(), &context);
    scorers::MeasureDrift(context, &workers_);
    return scorers::DriftOf({context.drifts, context.rows});
  }

  absl::Status KeepLow(const scorers::LowRequest& request) override {
    scorers::KeepLow(request, &workers_);
    return absl::OkStatus();
  }

 private:
  void GrowWorkspace(size_t bytes) {
    if (workspace_ != nullptr && workspace_->bytes() >= bytes) return;
    workspace_.reset();
    // The spare room keeps a sequence that grows by a block from reallocating it.
    workspace_ = std::make_unique<HostBuffer>(bytes + bytes / 4);
  }

  HostWorkers workers_;
  std::unique_ptr<HostBuffer> workspace_;
  std::vector<float> scores_;  // scores that only the choice of victims needs
  std::vector<uint64_t> keys_;
};

}  // namespace

std::unique_ptr<KvCompute> MakeHostKvCompute(const KvComputeOptions& options) {
  return std::make_unique<HostKvCompute>(options.host_threads);
}

}  // namespace kvpool
