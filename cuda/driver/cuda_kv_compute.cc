#include "cuda/driver/cuda_kv_compute.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "cuda/kernels/launch.h"
#include "cuda/scorers/drift.h"
#include "cuda/scorers/fold.h"
#include "cuda/scorers/gather.h"
#include "cuda/scorers/low.h"
#include "cuda/scorers/merge.h"
#include "cuda/scorers/parts/select_rows.h"
#include "cuda/scorers/select.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

using scorers::KvShape;
using scorers::KvView;
using scorers::PlaneShares;
using scorers::Scope;
using scorers::ScoreContext;
using scorers::ScorePlan;

constexpr uint32_t kBlockThreads = scorers::kBlockThreads;
constexpr uint32_t kPlaneThreads = scorers::kPlaneThreads;
constexpr uint32_t kPolicyThreads = scorers::kPolicyThreads;
constexpr uint32_t kWarp = 32;
constexpr size_t kBufferAlignment = 64;
// A driver allocates at least this much, so smaller steps would save nothing.
constexpr size_t kGrowBytes = size_t{2} << 20;
// Fewer scores than this are fetched and chosen from on the host, where that costs less than seven launches
// in a row.
constexpr uint64_t kChosenOnHost = 2048;
constexpr uint64_t kMaxGridX = (uint64_t{1} << 31) - 1;
// As many shares of a row for ReduceTokens fill a GPU.
constexpr uint64_t kMaxShares = 256;

size_t Aligned(size_t bytes) { return (bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment; }

size_t BinsBytes(const scorers::SelectRequest& request) {
  return size_t{request.rows} * scorers::kDigitPasses * scorers::kDigits * sizeof(uint32_t);
}

// Places the arrays of a selection one behind the other from `start`; returns their bytes.
size_t ArrangeSelection(uint64_t start, scorers::SelectRequest* request) {
  uint64_t next = start;
  const auto take = [&next](auto** array, size_t bytes) {
    *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(next);
    next += Aligned(bytes);
  };
  const size_t rows = request->rows;
  take(&request->bins, BinsBytes(*request));
  take(&request->searches, rows * (scorers::kDigitPasses + 1) * sizeof(scorers::DigitSearch));
  take(&request->tile_counts, rows * request->tiles() * sizeof(scorers::TileCount));
  take(&request->victims, rows * request->count * sizeof(uint32_t));
  return next - start;
}

class CudaKvBuffer final : public KvBuffer {
 public:
  CudaKvBuffer(CudaArray memory, size_t bytes) : memory_(std::move(memory)), bytes_(bytes) {}
  uint64_t address() const override { return memory_.get(); }
  size_t bytes() const override { return bytes_; }

 private:
  const CudaArray memory_;
  const size_t bytes_;
};

absl::StatusOr<CudaArray> AllocateArray(const std::shared_ptr<const CudaContext>& context, size_t bytes) {
  CUdeviceptr address;
  const absl::Status status = context->Check(context->driver().cuMemAlloc(&address, bytes), "cuMemAlloc");
  if (!status.ok()) return WithFreeBytes(*context, status, bytes);
  return CudaArray(context, address);
}

absl::StatusOr<CudaPinned> AllocatePinned(const std::shared_ptr<const CudaContext>& context, size_t bytes) {
  void* address;
  RETURN_IF_ERROR(context->Check(context->driver().cuMemHostAlloc(&address, bytes, 0),
                                 absl::StrCat("cuMemHostAlloc of ", bytes, " bytes")));
  return CudaPinned(context, address);
}

uint64_t AddressOf(CUdeviceptr address) { return address; }
uint64_t AddressOf(void* address) { return reinterpret_cast<uint64_t>(address); }

}  // namespace

template <typename Memory>
absl::Status GrownMemory<Memory>::Grow(const std::shared_ptr<const CudaContext>& context, size_t bytes) {
  if (bytes <= bytes_) return absl::OkStatus();
  // The old memory is released first: there may not be room for both.
  memory_ = Memory();
  bytes_ = 0;
  const size_t rounded = (bytes + kGrowBytes - 1) / kGrowBytes * kGrowBytes;
  if constexpr (std::is_same_v<Memory, CudaArray>) {
    ASSIGN_OR_RETURN(memory_, AllocateArray(context, rounded));
  } else {
    ASSIGN_OR_RETURN(memory_, AllocatePinned(context, rounded));
  }
  bytes_ = rounded;
  return absl::OkStatus();
}
template <typename Memory>
uint64_t GrownMemory<Memory>::address() const {
  return bytes_ == 0 ? 0 : AddressOf(memory_.get());
}

class CudaKvCompute::Inputs {
 public:
  // Returns the offset of `items` from the start of the inputs on the device.
  template <typename T>
  size_t Add(absl::Span<const T> items) {
    const size_t at = bytes_;
    parts_.push_back({items.data(), items.size() * sizeof(T), at});
    bytes_ += Aligned(items.size() * sizeof(T));
    return at;
  }
  size_t bytes() const { return bytes_; }
  void CopyTo(uint64_t address) const {
    for (const Part& part : parts_) {
      if (part.bytes > 0) std::memcpy(reinterpret_cast<std::byte*>(address) + part.at, part.from, part.bytes);
    }
  }

 private:
  struct Part {
    const void* from;
    size_t bytes, at;
  };
  std::vector<Part> parts_;
  size_t bytes_ = 0;
};

struct CudaKvCompute::Scores {
  ScoreContext context;
  const float* tokens = nullptr;  // [rows][tokens]
  float* blocks = nullptr;        // [rows][blocks]
  const uint8_t* marks = nullptr;
  bool chosen_on_host = false;
  // Offsets in pinned_outputs_.
  size_t tokens_at = 0, blocks_at = 0, spreads_at = 0, victims_at = 0;
};

absl::StatusOr<std::unique_ptr<CudaKvCompute>> CudaKvCompute::Open(std::shared_ptr<const CudaContext> context,
                                                                   const Options& options) {
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  ASSIGN_OR_RETURN(ScoreKernels kernels, ScoreKernels::Load(context));
  ASSIGN_OR_RETURN(CudaStream stream, MakeLowPriorityStream(context));
  std::unique_ptr<CudaKvCompute> compute(new CudaKvCompute(context, std::move(kernels), std::move(stream)));
  if (options.timed) {
    for (CudaEvent* event : {&compute->begin_, &compute->choice_, &compute->end_}) {
      CUevent made;
      RETURN_IF_ERROR(
          context->Check(context->driver().cuEventCreate(&made, CU_EVENT_DEFAULT), "cuEventCreate"));
      *event = CudaEvent(context, made);
    }
  }
  return compute;
}

// ------------------------------------------------------------------------------------------------- stream

template <typename... Args>
absl::Status CudaKvCompute::Launch(const CudaKernel& kernel, const Grid& grid, const Args&... arguments) {
  if (grid.x > kMaxGridX) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kernel.name, ": ", grid.x, " thread blocks, the GPU takes ", kMaxGridX));
  }
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return context_->Check(
      context_->driver().cuLaunchKernel(kernel.function, static_cast<unsigned int>(grid.x),
                                        static_cast<unsigned int>(grid.y), 1, grid.threads, 1, 1,
                                        /*sharedMemBytes=*/0, stream_.get(), pointers, nullptr),
      kernel.name);
}

absl::Status CudaKvCompute::Record(const CudaEvent& event) {
  if (!event.valid()) return absl::OkStatus();
  return context_->Check(context_->driver().cuEventRecord(event.get(), stream_.get()), "cuEventRecord");
}

absl::StatusOr<double> CudaKvCompute::MicrosBetween(const CudaEvent& from, const CudaEvent& to) const {
  float milliseconds = 0;
  RETURN_IF_ERROR(context_->Check(context_->driver().cuEventElapsedTime(&milliseconds, from.get(), to.get()),
                                  "cuEventElapsedTime"));
  return double{milliseconds} * 1e3;
}

template <typename Enqueue>
absl::Status CudaKvCompute::RunOnStream(const char* what, const Enqueue& enqueue) {
  chose_ = false;
  absl::Status status = Record(begin_);
  if (status.ok()) status = enqueue();
  if (status.ok()) status = Record(end_);
  const absl::Status finished = context_->Finish(stream_.get(), what);
  // A sticky error is reported before any other, whichever call met it.
  if (status.ok() || IsSticky(finished)) status = finished;
  RETURN_IF_ERROR(status);
  if (!end_.valid()) return absl::OkStatus();
  last_times_ = {};
  ASSIGN_OR_RETURN(last_times_.call_us, MicrosBetween(begin_, end_));
  if (chose_) {
    ASSIGN_OR_RETURN(last_times_.choice_us, MicrosBetween(choice_, end_));
  }
  return absl::OkStatus();
}

absl::Status CudaKvCompute::Send(const Inputs& inputs) {
  return context_->Check(context_->driver().cuMemcpyHtoDAsync(
                             inputs_.address(), reinterpret_cast<const void*>(pinned_inputs_.address()),
                             inputs.bytes(), stream_.get()),
                         "cuMemcpyHtoDAsync");
}

absl::Status CudaKvCompute::Fetch(uint64_t from, size_t bytes, size_t to) {
  return context_->Check(
      context_->driver().cuMemcpyDtoHAsync(reinterpret_cast<void*>(pinned_outputs_.address() + to), from,
                                           bytes, stream_.get()),
      "cuMemcpyDtoHAsync");
}

// ------------------------------------------------------------------------------------------------- memory

absl::StatusOr<std::unique_ptr<KvBuffer>> CudaKvCompute::Allocate(size_t bytes) {
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  ASSIGN_OR_RETURN(CudaArray memory, AllocateArray(context_, bytes));
  return std::make_unique<CudaKvBuffer>(std::move(memory), bytes);
}

absl::Status CudaKvCompute::Stage(absl::Span<const KvPiece> pieces, uint64_t to) {
  Inputs inputs;
  std::vector<scorers::PieceCopy> copies;
  std::vector<size_t>
      from_inputs;  // the copies whose address is an offset there, until it is known where that is
  for (const KvPiece& piece : pieces) {
    uint64_t from = piece.address;
    if (!piece.in_block && piece.bytes > 0) {
      from = inputs.Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(piece.address), piece.bytes));
    }
    for (uint64_t at = 0; at < piece.bytes; at += scorers::kCopyBytes, to += copies.back().bytes) {
      if (!piece.in_block) from_inputs.push_back(copies.size());
      copies.push_back(
          {.from = from + at, .to = to, .bytes = std::min(piece.bytes - at, scorers::kCopyBytes)});
    }
  }
  if (copies.empty()) return absl::OkStatus();
  const size_t copies_at = inputs.Add(absl::MakeConstSpan(copies));
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  for (const size_t i : from_inputs) copies[i].from += inputs_.address();
  inputs.CopyTo(pinned_inputs_.address());
  return RunOnStream("staging signals", [&] {
    RETURN_IF_ERROR(Send(inputs));
    const auto* table = reinterpret_cast<const scorers::PieceCopy*>(inputs_.address() + copies_at);
    return Launch(kernels_.copy_pieces, {.x = copies.size(), .threads = kBlockThreads}, table);
  });
}

// ------------------------------------------------------------------------------------------------- scores

absl::StatusOr<ScorePlan> CudaKvCompute::Plan(const scorers::ScoreRequest& request,
                                              const scorers::Signals& signals) const {
  ASSIGN_OR_RETURN(ScorePlan plan, scorers::PlanScore(request, signals, /*workers=*/1));
  // All planes are scored at once, so each has an area of scratch.
  plan.workspace_bytes = Aligned(scorers::WorkspaceBytes(plan, request.shape.planes())) +
                         Aligned(uint64_t{plan.rows} * request.shape.blocks() * sizeof(float));
  return plan;
}

absl::Status CudaKvCompute::EnqueueFeatures(const ScoreCall& call, const ScoreContext& on_device) {
  const ScorePlan& plan = *call.plan;
  const KvShape& shape = plan.request.shape;
  const ScoreKernels::OfType& kernels = kernels_.of(call.kv.dtype);
  if (plan.record.floats > 0) {
    for (const BlockRun& run : call.to_record) {
      RETURN_IF_ERROR(Launch(kernels.records, {run.count, shape.layers, kBlockThreads}, on_device.kv,
                             plan.record, run.first, on_device.records));
    }
  }
  if (on_device.k_norms != nullptr) {
    const PlaneShares shares = PlaneShares::Of(shape.blocks(), scorers::kUnpackBlocks);
    RETURN_IF_ERROR(Launch(kernels_.unpack, {uint64_t{shape.planes()} * shares.shares, 1, kBlockThreads},
                           on_device, shares));
  }
  if (on_device.anchors != nullptr) {
    RETURN_IF_ERROR(Launch(kernels_.anchors, {shape.planes(), 1, kPlaneThreads}, on_device));
    const uint64_t block_bytes = uint64_t{shape.tokens_per_block} * shape.k_head_dim * BytesOf(call.kv.dtype);
    const auto at_once = static_cast<uint32_t>(std::max<uint64_t>(scorers::kDotBytes / block_bytes, 1));
    const PlaneShares shares = PlaneShares::Of(shape.blocks(), at_once);
    RETURN_IF_ERROR(Launch(kernels.anchor_dots, {uint64_t{shape.planes()} * shares.shares, 1, kBlockThreads},
                           on_device, shares));
  }
  if (plan.reads_queries) {
    RETURN_IF_ERROR(Launch(kernels_.queries, {shape.planes(), 1, kPlaneThreads}, on_device));
  }
  if (!plan.reads_window) return absl::OkStatus();
  RETURN_IF_ERROR(Launch(kernels.window_lse, {shape.planes(), 1, kPolicyThreads}, on_device));
  return Launch(kernels.window, {shape.planes(), 1, kPolicyThreads}, on_device);
}

absl::Status CudaKvCompute::EnqueuePlaneScores(const ScorePlan& plan, bool tokens,
                                               const ScoreContext& on_device) {
  const scorers::BoundPolicy& policy = plan.request.policy;
  const Grid grid = {plan.request.shape.planes(), 1, kPolicyThreads};
  if (policy.has_host()) {
    RETURN_IF_ERROR(
        Launch(kernels_.of(policy.host).score, grid, on_device, policy.host_params, on_device.host_scores));
  }
  if (!tokens) return absl::OkStatus();
  return Launch(kernels_.of(policy.id).score, grid, on_device, policy.params, on_device.plane_scores);
}

absl::Status CudaKvCompute::EnqueueRows(const ScorePlan& plan, uint32_t heads, const float* values,
                                        uint64_t items, float* rows) {
  // One warp for each layer, so that a lane reads the heads of its item one after the other.
  const scorers::PlaneReductions first = scorers::ReductionsOf(plan, heads, values, items, 0, rows);
  const uint32_t warps = std::min(first.end_layer - first.first_layer, kPlaneThreads / kWarp);
  return Launch(kernels_.reduce_planes, {(items + kWarp - 1) / kWarp, plan.rows, warps * kWarp}, first);
}

absl::Status CudaKvCompute::EnqueueBlocks(const ScorePlan& plan, const ScoreContext& on_device,
                                          const float* token_rows, float* block_scores) {
  const scorers::ScoreRequest& request = plan.request;
  const KvShape& shape = request.shape;
  if (!plan.own_blocks) {
    const uint64_t shares =
        std::min<uint64_t>((shape.blocks() + kBlockThreads - 1) / kBlockThreads, kMaxShares);
    return Launch(kernels_.reduce_tokens, {plan.rows, shares, kBlockThreads}, shape, request.over_tokens,
                  token_rows, block_scores);
  }
  const uint32_t planes_each = request.scope == Scope::kHead ? 1 : shape.kv_heads;
  float* const own = request.scope == Scope::kSequence ? on_device.own_blocks : block_scores;
  RETURN_IF_ERROR(Launch(kernels_.of(request.policy.id).blocks,
                         {shape.planes() / planes_each, 1, kPolicyThreads}, on_device, planes_each,
                         request.policy.params, own));
  if (request.scope != Scope::kSequence) return absl::OkStatus();
  return EnqueueRows(plan, /*heads=*/1, own, shape.blocks(), block_scores);
}

absl::Status CudaKvCompute::EnqueueChoice(const ScoreCall& call, Scores* scores) {
  const VictimChoice& choice = call.choice;
  const uint32_t rows = call.plan->rows;
  scorers::SelectRequest request = {.scores = choice.of_tokens ? scores->tokens : scores->blocks,
                                    .marks = scores->marks,
                                    .items = static_cast<uint32_t>(choice.protected_marks.size()),
                                    .rows = rows,
                                    .count = choice.count};
  ArrangeSelection(selection_.address(), &request);
  RETURN_IF_ERROR(Record(choice_));
  chose_ = true;
  RETURN_IF_ERROR(
      context_->Check(context_->driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(request.bins), 0,
                                                         BinsBytes(request), stream_.get()),
                      "cuMemsetD8Async"));
  const Grid grid = {uint64_t{rows} * request.tiles(), 1, kBlockThreads};
  for (uint32_t pass = 0; pass < scorers::kDigitPasses; ++pass) {
    RETURN_IF_ERROR(Launch(kernels_.count_digits, grid, request, pass));
  }
  RETURN_IF_ERROR(Launch(kernels_.count_tile, grid, request));
  RETURN_IF_ERROR(Launch(kernels_.victims, grid, request));
  return Fetch(reinterpret_cast<uint64_t>(request.victims), size_t{rows} * choice.count * sizeof(uint32_t),
               scores->victims_at);
}

absl::Status CudaKvCompute::EnqueueScore(const ScoreCall& call, Scores* scores) {
  const ScorePlan& plan = *call.plan;
  const KvShape& shape = plan.request.shape;
  const ScoreContext& on_device = scores->context;
  RETURN_IF_ERROR(EnqueueFeatures(call, on_device));
  const bool choose = call.choice.count > 0;
  const bool tokens = call.output.token_scores != nullptr || (choose && call.choice.of_tokens);
  const bool blocks = call.output.block_scores != nullptr || (choose && !call.choice.of_tokens);
  // A block form of a policy's own reads its host's scores, not those of its tokens.
  const bool planes = tokens || (blocks && !plan.own_blocks);
  if (tokens || blocks) RETURN_IF_ERROR(EnqueuePlaneScores(plan, planes, on_device));
  scores->tokens = plan.request.scope == Scope::kHead ? on_device.plane_scores : on_device.row_scores;
  if (planes && plan.request.scope != Scope::kHead) {
    RETURN_IF_ERROR(
        EnqueueRows(plan, shape.kv_heads, on_device.plane_scores, shape.tokens, on_device.row_scores));
  }
  if (blocks) RETURN_IF_ERROR(EnqueueBlocks(plan, on_device, scores->tokens, scores->blocks));
  const bool fetch_tokens =
      call.output.token_scores != nullptr || (scores->chosen_on_host && call.choice.of_tokens);
  const bool fetch_blocks =
      call.output.block_scores != nullptr || (scores->chosen_on_host && !call.choice.of_tokens);
  if (fetch_tokens) {
    RETURN_IF_ERROR(Fetch(reinterpret_cast<uint64_t>(scores->tokens),
                          size_t{plan.rows} * shape.tokens * sizeof(float), scores->tokens_at));
  }
  if (fetch_blocks) {
    RETURN_IF_ERROR(Fetch(reinterpret_cast<uint64_t>(scores->blocks),
                          size_t{plan.rows} * shape.blocks() * sizeof(float), scores->blocks_at));
  }
  if (call.output.any_spreads() && plan.reads_window) {
    RETURN_IF_ERROR(Fetch(reinterpret_cast<uint64_t>(on_device.spreads),
                          shape.planes() * sizeof(scorers::PlaneSpread), scores->spreads_at));
  }
  return choose && !scores->chosen_on_host ? EnqueueChoice(call, scores) : absl::OkStatus();
}

absl::Status CudaKvCompute::TakeScores(const ScoreCall& call, const Scores& scores) {
  const ScorePlan& plan = *call.plan;
  const KvShape& shape = plan.request.shape;
  const uint64_t out = pinned_outputs_.address();
  const auto* tokens = reinterpret_cast<const float*>(out + scores.tokens_at);
  const auto* blocks = reinterpret_cast<const float*>(out + scores.blocks_at);
  if (call.output.token_scores != nullptr) {
    std::memcpy(call.output.token_scores, tokens, size_t{plan.rows} * shape.tokens * sizeof(float));
  }
  if (call.output.block_scores != nullptr) {
    std::memcpy(call.output.block_scores, blocks, size_t{plan.rows} * shape.blocks() * sizeof(float));
  }
  if (call.output.any_spreads() && plan.reads_window) {
    scorers::TakeSpreads(shape, reinterpret_cast<const scorers::PlaneSpread*>(out + scores.spreads_at),
                         call.output);
  }
  const VictimChoice& choice = call.choice;
  if (choice.count == 0) return absl::OkStatus();
  if (scores.chosen_on_host) {
    return scorers::SelectRows(choice.of_tokens ? tokens : blocks, plan.rows, choice.protected_marks,
                               choice.count, &keys_, choice.victims);
  }
  std::memcpy(choice.victims.data(), reinterpret_cast<const void*>(out + scores.victims_at),
              size_t{plan.rows} * choice.count * sizeof(uint32_t));
  return absl::OkStatus();
}

absl::Status CudaKvCompute::Score(const ScoreCall& call) {
  const ScorePlan& plan = *call.plan;
  const KvShape& shape = plan.request.shape;
  const VictimChoice& choice = call.choice;
  RETURN_IF_ERROR(scorers::CheckCandidates(choice.protected_marks, choice.count));
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  Scores scores;
  const size_t candidates = choice.protected_marks.size();
  scores.chosen_on_host = choice.count > 0 && plan.rows * uint64_t{candidates} < kChosenOnHost;
  Inputs inputs;
  const size_t addresses = inputs.Add(absl::MakeConstSpan(call.kv.blocks, shape.blocks()));
  const size_t records = inputs.Add(call.records);
  const size_t marks = inputs.Add(choice.protected_marks);
  const size_t block_scores_bytes = Aligned(size_t{plan.rows} * shape.blocks() * sizeof(float));
  scores.blocks_at = Aligned(size_t{plan.rows} * shape.tokens * sizeof(float));
  scores.spreads_at = scores.blocks_at + block_scores_bytes;
  scores.victims_at = scores.spreads_at + Aligned(shape.planes() * sizeof(scorers::PlaneSpread));
  const size_t victims_bytes = Aligned(size_t{plan.rows} * choice.count * sizeof(uint32_t));
  RETURN_IF_ERROR(workspace_.Grow(context_, plan.workspace_bytes));
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_outputs_.Grow(context_, scores.victims_at + victims_bytes));
  if (choice.count > 0 && !scores.chosen_on_host) {
    scorers::SelectRequest request = {
        .items = static_cast<uint32_t>(candidates), .rows = plan.rows, .count = choice.count};
    RETURN_IF_ERROR(selection_.Grow(context_, ArrangeSelection(0, &request)));
  }
  inputs.CopyTo(pinned_inputs_.address());
  const uint64_t there = inputs_.address();
  scorers::ScoreInput input = {.kv = call.kv,
                               .signals = call.signals,
                               .records = reinterpret_cast<const float* const*>(there + records)};
  input.kv.blocks = reinterpret_cast<const uint64_t*>(there + addresses);
  scores.context = scorers::LayOut(plan, input, workspace_.address(), shape.planes());
  scores.marks = reinterpret_cast<const uint8_t*>(there + marks);
  scores.blocks = reinterpret_cast<float*>(workspace_.address() + plan.workspace_bytes - block_scores_bytes);
  RETURN_IF_ERROR(RunOnStream("scoring", [&] {
    RETURN_IF_ERROR(Send(inputs));
    return EnqueueScore(call, &scores);
  }));
  return TakeScores(call, scores);
}

// ------------------------------------------------------------------------------------------------- gather

struct CudaKvCompute::GatherArrays {
  GatherArrays(const scorers::GatherRequest& request, Inputs* inputs)
      : blocks((request.kept_tokens + request.from.shape.tokens_per_block - 1) /
               request.from.shape.tokens_per_block) {
    const KvShape& shape = request.from.shape;
    const size_t kept = (shape.layers - 1) * request.kept_layer_stride +
                        (shape.kv_heads - 1) * request.kept_head_stride + request.kept_tokens;
    from_at = inputs->Add(absl::MakeConstSpan(request.from.blocks, shape.blocks()));
    to_at = inputs->Add(absl::MakeConstSpan(request.to_blocks, blocks));
    kept_at = inputs->Add(absl::MakeConstSpan(request.kept, kept));
  }
  // Points to the arrays behind `there`, where the inputs are on the device.
  void Place(uint64_t there, scorers::GatherRequest* on_device) const {
    on_device->from.blocks = reinterpret_cast<const uint64_t*>(there + from_at);
    on_device->to_blocks = reinterpret_cast<const uint64_t*>(there + to_at);
    on_device->kept = reinterpret_cast<const uint32_t*>(there + kept_at);
  }
  const uint32_t blocks;  // destinations
  size_t from_at = 0, to_at = 0, kept_at = 0;
};

absl::Status CudaKvCompute::Gather(const scorers::GatherRequest& request) {
  if (request.kept_tokens == 0) return absl::OkStatus();
  Inputs inputs;
  const GatherArrays arrays(request, &inputs);
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  inputs.CopyTo(pinned_inputs_.address());
  scorers::GatherRequest on_device = request;
  arrays.Place(inputs_.address(), &on_device);
  return RunOnStream("compacting", [&] {
    RETURN_IF_ERROR(Send(inputs));
    return Launch(kernels_.gather, {arrays.blocks, request.from.shape.layers, kBlockThreads}, on_device);
  });
}

absl::StatusOr<MergeOutcome> CudaKvCompute::Merge(const scorers::MergeRequest& request) {
  const KvView& kv = request.gather.from;
  const KvShape& shape = kv.shape;
  const uint32_t planes = shape.planes();
  Inputs inputs;
  const GatherArrays arrays(request.gather, &inputs);
  const size_t evicted = (shape.layers - 1) * request.evicted_layer_stride +
                         (shape.kv_heads - 1) * request.evicted_head_stride + request.evicted_tokens;
  const size_t evicted_at = inputs.Add(absl::MakeConstSpan(request.evicted, evicted));
  const size_t thresholds_at =
      inputs.Add(absl::MakeConstSpan(request.thresholds, request.thresholds == nullptr ? 0 : planes));
  scorers::MergeContext context{.request = request};
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  RETURN_IF_ERROR(workspace_.Grow(context_, scorers::ArrangeMerge(0, &context)));
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  const size_t merged_at = Aligned(planes * sizeof(float));
  RETURN_IF_ERROR(pinned_outputs_.Grow(context_, merged_at + planes * sizeof(uint32_t)));
  inputs.CopyTo(pinned_inputs_.address());
  const uint64_t there = inputs_.address();
  scorers::ArrangeMerge(workspace_.address(), &context);
  arrays.Place(there, &context.request.gather);
  context.request.evicted = reinterpret_cast<const uint32_t*>(there + evicted_at);
  if (request.thresholds != nullptr) {
    context.request.thresholds = reinterpret_cast<const float*>(there + thresholds_at);
  }
  const uint32_t tile_tokens = scorers::NearestTile::TokensOf(shape.k_head_dim);
  const uint32_t tiles = (request.evicted_tokens + tile_tokens - 1) / tile_tokens;
  RETURN_IF_ERROR(RunOnStream("merging", [&] {
    RETURN_IF_ERROR(Send(inputs));
    RETURN_IF_ERROR(Launch(kernels_.merge_norms, {shape.blocks(), shape.layers, kBlockThreads}, context));
    RETURN_IF_ERROR(
        Launch(kernels_.of(kv.dtype).nearest, {uint64_t{planes} * tiles, 1, kBlockThreads}, context, tiles));
    RETURN_IF_ERROR(Launch(kernels_.link, {planes, 1, kBlockThreads}, context));
    RETURN_IF_ERROR(Launch(kernels_.merge, {arrays.blocks, shape.layers, kBlockThreads}, context));
    RETURN_IF_ERROR(Fetch(reinterpret_cast<uint64_t>(context.thresholds), planes * sizeof(float), 0));
    return Fetch(reinterpret_cast<uint64_t>(context.merged), planes * sizeof(uint32_t), merged_at);
  }));
  const auto* const thresholds = reinterpret_cast<const float*>(pinned_outputs_.address());
  const auto* const merged = reinterpret_cast<const uint32_t*>(pinned_outputs_.address() + merged_at);
  return MergeOutcome{.thresholds = {thresholds, thresholds + planes}, .merged = {merged, merged + planes}};
}

absl::StatusOr<uint64_t> CudaKvCompute::Fold(const scorers::FoldRequest& request) {
  const KvShape& shape = request.from.shape;
  const uint32_t planes = shape.planes();
  const size_t evicted = request.evicted_tokens == 0
                             ? 0
                             : (shape.layers - 1) * request.evicted_layer_stride +
                                   (shape.kv_heads - 1) * request.evicted_head_stride +
                                   request.evicted_tokens;
  Inputs inputs;
  const size_t from_at = inputs.Add(absl::MakeConstSpan(request.from.blocks, shape.blocks()));
  const size_t evicted_at = inputs.Add(absl::MakeConstSpan(request.evicted, evicted));
  scorers::FoldContext context{.request = request};
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  RETURN_IF_ERROR(workspace_.Grow(context_, scorers::ArrangeFold(0, &context)));
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_outputs_.Grow(context_, planes * sizeof(uint32_t)));
  inputs.CopyTo(pinned_inputs_.address());
  scorers::ArrangeFold(workspace_.address(), &context);
  context.request.from.blocks = reinterpret_cast<const uint64_t*>(inputs_.address() + from_at);
  context.request.evicted = reinterpret_cast<const uint32_t*>(inputs_.address() + evicted_at);
  const uint32_t shares = context.shares();
  RETURN_IF_ERROR(RunOnStream("adding tokens to a state", [&] {
    RETURN_IF_ERROR(Send(inputs));
    if (shares > 0) {
      RETURN_IF_ERROR(Launch(kernels_.of(request.from.dtype).fold,
                             {uint64_t{planes} * shares, 1, kBlockThreads}, context));
    }
    RETURN_IF_ERROR(Launch(kernels_.sum_folds, {planes, 1, kBlockThreads}, context));
    return Fetch(reinterpret_cast<uint64_t>(context.folded), planes * sizeof(uint32_t), 0);
  }));
  const auto* const folded = reinterpret_cast<const uint32_t*>(pinned_outputs_.address());
  return std::accumulate(folded, folded + planes, uint64_t{0});
}

// ------------------------------------------------------------------------------------------------- drift

absl::Status CudaKvCompute::EnqueueDrift(const scorers::DriftContext& on_device) {
  const KvShape& shape = on_device.score.shape();
  const uint32_t shares = shape.tokens / scorers::kDriftTokens + (shape.tokens % scorers::kDriftTokens != 0);
  RETURN_IF_ERROR(Launch(kernels_.queries, {shape.kv_heads, 1, kPlaneThreads}, on_device.score));
  for (uint32_t first = 0; first < on_device.rows; first += on_device.at_once) {
    const uint64_t rows = std::min(on_device.at_once, on_device.rows - first);
    RETURN_IF_ERROR(
        Launch(kernels_.drift_logits, {rows * shares, 1, kBlockThreads}, on_device, first, shares));
    RETURN_IF_ERROR(Launch(kernels_.drift_outputs, {rows, 1, kBlockThreads}, on_device, first));
  }
  return Fetch(reinterpret_cast<uint64_t>(on_device.drifts), on_device.rows * sizeof(float), 0);
}

absl::StatusOr<scorers::Drift> CudaKvCompute::Drift(const scorers::DriftRequest& request) {
  Inputs inputs;
  const size_t blocks_at = inputs.Add(absl::MakeConstSpan(request.kv.blocks, request.kv.shape.blocks()));
  const size_t kept_at = inputs.Add(absl::MakeConstSpan(request.kept, request.kept_words()));
  scorers::DriftContext context;
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  RETURN_IF_ERROR(workspace_.Grow(context_, scorers::ArrangeDrift(request, 0, &context)));
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_outputs_.Grow(context_, request.rows() * sizeof(float)));
  inputs.CopyTo(pinned_inputs_.address());
  scorers::DriftRequest there = request;
  there.kv.blocks = reinterpret_cast<const uint64_t*>(inputs_.address() + blocks_at);
  there.kept = reinterpret_cast<const uint32_t*>(inputs_.address() + kept_at);
  context = {};
  scorers::ArrangeDrift(there, workspace_.address(), &context);
  RETURN_IF_ERROR(RunOnStream("measuring a drift", [&] {
    RETURN_IF_ERROR(Send(inputs));
    return EnqueueDrift(context);
  }));
  return scorers::DriftOf({reinterpret_cast<const float*>(pinned_outputs_.address()), context.rows});
}

// ------------------------------------------------------------------------------------------ low precision

absl::Status CudaKvCompute::KeepLow(const scorers::LowRequest& request) {
  if (request.evicted_tokens == 0) return absl::OkStatus();
  const KvShape& shape = request.from.shape;
  const uint64_t records = request.layout.Records(request.evicted_tokens);
  const size_t evicted = (shape.layers - 1) * request.evicted_layer_stride +
                         (shape.kv_heads - 1) * request.evicted_head_stride + request.evicted_tokens;
  Inputs inputs;
  const size_t from_at = inputs.Add(absl::MakeConstSpan(request.from.blocks, shape.blocks()));
  const size_t to_at =
      inputs.Add(absl::MakeConstSpan(request.to_blocks, request.layout.Blocks(request.evicted_tokens)));
  const size_t evicted_at = inputs.Add(absl::MakeConstSpan(request.evicted, evicted));
  ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
  RETURN_IF_ERROR(inputs_.Grow(context_, inputs.bytes()));
  RETURN_IF_ERROR(pinned_inputs_.Grow(context_, inputs.bytes()));
  inputs.CopyTo(pinned_inputs_.address());
  const uint64_t there = inputs_.address();
  scorers::LowRequest on_device = request;
  on_device.from.blocks = reinterpret_cast<const uint64_t*>(there + from_at);
  on_device.to_blocks = reinterpret_cast<const uint64_t*>(there + to_at);
  on_device.evicted = reinterpret_cast<const uint32_t*>(there + evicted_at);
  return RunOnStream("keeping tokens in low precision", [&] {
    RETURN_IF_ERROR(Send(inputs));
    return Launch(kernels_.of(request.from.dtype).low, {records, 1, kBlockThreads}, on_device);
  });
}

}  // namespace kvpool
