#include "cuda/lab/staged_sequence.h"

#include <algorithm>

#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

using scorers::KvPlane;
using scorers::KvShape;
using scorers::KvView;
using scorers::Signals;

// A GPU reads fastest from addresses that are multiples of this; any element needs less.
constexpr uint64_t kAlignment = 256;
uint64_t Aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t EndOf(const KvView& kv, const KvPlane& plane) {
  if (plane.head_dim == 0) return 0;
  return plane.offset_bytes + (kv.shape.layers - 1) * plane.layer_stride_bytes +
         (kv.shape.tokens_per_block - 1) * plane.token_stride_bytes +
         (kv.shape.kv_heads - 1) * plane.head_stride_bytes + (plane.head_dim - 1) * plane.dim_stride_bytes +
         scorers::BytesOf(kv.dtype);
}

// Calls visit(&address, bytes) for each array of `signals` that is given; `visit` may change the address.
template <typename Visit>
void VisitArrays(const KvShape& shape, Signals* s, const Visit& visit) {
  const auto array = [&](auto** pointer, uint64_t bytes) {
    if (*pointer == nullptr) return;
    uint64_t address = reinterpret_cast<uint64_t>(*pointer);
    visit(&address, bytes);
    *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(address);
  };
  for (const scorers::SignalFacts& facts : scorers::kSignals) {
    scorers::SignalArray& signal = s->*facts.array;
    array(&signal.values,
          ((shape.layers - 1) * signal.layer_stride + (shape.kv_heads - 1) * signal.head_stride +
           s->RowFloats(facts.shape, shape.tokens)) *
              sizeof(float));
  }
  const scorers::QueryWindow& window = s->window;
  array(&s->window.data, (shape.layers - 1) * window.layer_stride_bytes +
                             (std::max(window.queries, 1u) - 1) * window.query_stride_bytes +
                             (std::max(window.q_heads, 1u) - 1) * window.head_stride_bytes +
                             shape.k_head_dim * scorers::BytesOf(window.dtype));
}

}  // namespace

uint64_t BlockBytes(const KvView& kv) { return std::max(EndOf(kv, kv.k), EndOf(kv, kv.v)); }

absl::StatusOr<StagedSequence> StagedSequence::Reserve(KvCompute* compute, const KvView& kv,
                                                       size_t more_bytes) {
  StagedSequence staged;
  staged.kv_ = kv;
  const uint64_t block_bytes = Aligned(BlockBytes(kv)), blocks = kv.shape.blocks();
  ASSIGN_OR_RETURN(staged.memory_, compute->Allocate(kAlignment + blocks * block_bytes + more_bytes));
  const uint64_t start = Aligned(staged.memory_->address());
  for (uint64_t block = 0; block < blocks; ++block) staged.addresses_.push_back(start + block * block_bytes);
  staged.signals_at_ = start + blocks * block_bytes;
  return staged;
}

absl::StatusOr<StagedSequence> StagedSequence::MakeEmpty(KvCompute* compute, const KvView& kv) {
  return Reserve(compute, kv, 0);
}

absl::StatusOr<StagedSequence> StagedSequence::Make(KvCompute* compute, const KvView& kv,
                                                    const Signals& signals) {
  Signals moved = signals;
  size_t signal_bytes = 0;
  VisitArrays(kv.shape, &moved, [&](uint64_t*, uint64_t bytes) { signal_bytes += Aligned(bytes); });
  ASSIGN_OR_RETURN(StagedSequence staged, Reserve(compute, kv, signal_bytes));
  for (uint32_t block = 0; block < kv.shape.blocks(); ++block) {
    const KvPiece piece = {.address = kv.blocks[block], .bytes = BlockBytes(kv)};
    RETURN_IF_ERROR(compute->Stage({&piece, 1}, staged.addresses_[block]));
  }
  absl::Status status;
  uint64_t at = staged.signals_at_;
  VisitArrays(kv.shape, &moved, [&](uint64_t* address, uint64_t bytes) {
    const KvPiece piece = {.address = *address, .bytes = bytes};
    if (status.ok()) status = compute->Stage({&piece, 1}, at);
    *address = at;
    at += Aligned(bytes);
  });
  RETURN_IF_ERROR(status);
  staged.signals_ = moved;
  return staged;
}

absl::StatusOr<ScoredSequence> ScoreStaged(KvCompute* compute, const StagedSequence& sequence,
                                           const scorers::ScoreRequest& request) {
  ScoredSequence scored;
  ASSIGN_OR_RETURN(scored.plan, compute->Plan(request, sequence.signals()));
  const scorers::ScorePlan& plan = scored.plan;
  const KvView kv = sequence.kv();
  const uint32_t blocks = kv.shape.blocks();
  const uint64_t record_bytes = Aligned(plan.record.floats * sizeof(float));
  std::unique_ptr<KvBuffer> memory;
  std::vector<float*> records;
  std::vector<BlockRun> runs;
  if (plan.record.floats > 0) {
    ASSIGN_OR_RETURN(memory, compute->Allocate(blocks * record_bytes));
    for (uint32_t block = 0; block < blocks; ++block) {
      records.push_back(reinterpret_cast<float*>(memory->address() + block * record_bytes));
    }
    runs.push_back({0, blocks});
  }
  scored.tokens.resize(uint64_t{plan.rows} * kv.shape.tokens);
  scored.blocks.resize(uint64_t{plan.rows} * blocks);
  if (plan.reads_window) scored.spreads.resize(kv.shape.layers);
  RETURN_IF_ERROR(
      compute->Score({.plan = &plan,
                      .kv = kv,
                      .signals = sequence.signals(),
                      .records = records,
                      .to_record = runs,
                      .output = {.token_scores = scored.tokens.data(),
                                 .block_scores = scored.blocks.data(),
                                 .spreads = scored.spreads.empty() ? nullptr : scored.spreads.data()}}));
  return scored;
}

}  // namespace kvpool::lab
