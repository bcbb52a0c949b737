// How far a layer's attention output moves when tokens leave: for each query of a window, with each query head,
//
//   o_all    softmax(q K^T * scale) V over the tokens that the query sees
//   o_kept   the same over those of them that stay; 0 if none does
//   drift    |o_all - o_kept| / |o_all|, the Euclidean norms of one head's output; 0 where both are zero
//
// It is the error that a policy makes in what the layer adds to the residual stream, before the output projection: the quantity that
// CAOTE (arXiv 2504.14051, eq. 4) estimates for one token at a time, here of all that leave together and exact but for rounding.
//
//   Logits    of so many rows (queries) at once, for all tokens
//   Outputs   two softmaxes side by side, each on the scale of its own greatest logit, and both outputs in one pass over V
//
// A token whose key gives a logit that is not finite takes no part; where none is left, as with a query that is not finite, the drift is NaN.
// So it is where a value that counts is not finite.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_DRIFT_ROWS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_DRIFT_ROWS_H_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/scorers/parts/base2.h"
#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/team.h"
#include "cuda/scorers/parts/window.h"

namespace kvpool::scorers {

// So many weights lie in the workspace at once: 32 MiB, which keep a GPU busy.
inline constexpr uint64_t kDriftWeights = uint64_t{1} << 23;

struct DriftRequest {
  KvView kv;  // all layers of the sequence
  uint32_t layer = 0;
  QueryWindow window;  // Its data is that of the one layer.
  // A bit for each token, 1 where it stays: kept[head * kept_head_stride + token / 32] >> token % 32.
  const uint32_t* kept = nullptr;
  uint64_t kept_head_stride = 0;             // words; 0: all heads keep the same tokens
  uint64_t weights_at_once = kDriftWeights;  // A row has all of its own, even if they are more.

  uint32_t words() const { return kv.shape.tokens / 32 + (kv.shape.tokens % 32 != 0); }
  // Numbers of `kept`.
  uint64_t kept_words() const { return (kv.shape.kv_heads - 1) * kept_head_stride + words(); }
  uint64_t rows() const { return uint64_t{window.q_heads} * window.queries; }
};

// The tokens whose logits one team computes.
inline constexpr uint32_t kDriftTokens = 1024;

// What the passes hand on to each other. Rows are those of ScoreContext::queries.
struct DriftContext {
  ScoreContext score;  // The layer alone is its sequence; of the workspace it has the queries.
  const uint32_t* kept = nullptr;
  uint64_t kept_head_stride = 0;
  float* weights = nullptr;       // [rows at once][tokens] logits to base 2; from Outputs on weights
  float* kept_weights = nullptr;  // [rows at once][tokens] 0 where the token leaves
  float* drifts = nullptr;        // [rows]
  uint32_t rows = 0;
  uint32_t at_once = 0;  // rows

  KVPOOL_HOST_DEVICE uint32_t HeadOf(uint32_t row) const { return row / score.WindowRows(); }
  KVPOOL_HOST_DEVICE uint32_t KeysOf(uint32_t row) const {
    return KeysSeen(score, row % score.signals.window.queries);
  }
  KVPOOL_HOST_DEVICE bool Stays(uint32_t head, uint32_t token) const {
    return (kept[head * kept_head_stride + token / 32] >> token % 32 & 1) != 0;
  }
};

// Sets the pointers of `context` to arrays behind `address`, and all that `request` says; returns the bytes of the arrays. REQUIRES: the
// window has a query, and q_heads is a multiple of kv_heads.
inline uint64_t ArrangeDrift(const DriftRequest& request, uint64_t address, DriftContext* context) {
  context->score.kv = request.kv;
  context->score.kv.shape.layers = 1;
  for (KvPlane* const plane : {&context->score.kv.k, &context->score.kv.v}) {
    plane->offset_bytes += request.layer * plane->layer_stride_bytes;
  }
  context->score.signals.window = request.window;
  context->kept = request.kept;
  context->kept_head_stride = request.kept_head_stride;
  const uint64_t rows = request.rows(), tokens = request.kv.shape.tokens;
  context->rows = static_cast<uint32_t>(rows);
  const uint64_t fit = request.weights_at_once / (2 * tokens);
  context->at_once = static_cast<uint32_t>(fit < 1 ? 1 : fit < rows ? fit : rows);
  uint64_t at = address;
  const auto take = [&at](float** array, uint64_t count) {
    *array = reinterpret_cast<float*>(at);
    at += (count * sizeof(float) + 63) / 64 * 64;
  };
  take(&context->score.queries, rows * request.kv.shape.k_head_dim);
  take(&context->score.query_peaks, rows);
  take(&context->weights, context->at_once * tokens);
  take(&context->kept_weights, context->at_once * tokens);
  take(&context->drifts, rows);
  return at - address;
}

// The logits of row first_row + i with the tokens [begin, end). REQUIRES: the queries are loaded (LoadQueries).
template <typename Team>
KVPOOL_HOST_DEVICE void DriftLogits(const Team& team, const DriftContext& c, uint32_t first_row, uint32_t i,
                                    uint32_t begin, uint32_t end) {
  const KvView& kv = c.score.kv;
  const uint32_t row = first_row + i, head = c.HeadOf(row), seen = c.KeysOf(row);
  const float* const query = c.score.queries + uint64_t{row} * kv.shape.k_head_dim;
  float* const logits = c.weights + uint64_t{i} * kv.shape.tokens;
  const uint32_t last = end < seen ? end : seen;
  for (uint32_t t = begin + team.row(); t < last; t += team.rows()) {
    const float product =
        SumOverRow<RowOp::kProduct>(team, kv.KeyRow(0, head, t), kv.k, kv.dtype, query) * kLog2E;
    if (team.in_row() == 0) logits[t] = IsFinite(product) ? product : -INFINITY;
  }
}

// What a lane adds up of the columns from `first` on, over the tokens of its row team: sums[0] of all, sums[1] of those that stay.
template <typename Team>
struct DriftColumns {
  const Team& team;
  const KvView& kv;
  uint32_t head, tokens, first, count;
  const float *weights, *kept_weights;
  float (*sums)[Team::kColumns];
  template <KvDtype dtype>
  KVPOOL_HOST_DEVICE void Run() const {
    using Storage = typename Element<dtype>::Storage;
    const bool whole = count == Team::kColumns && kv.v.dim_stride_bytes == sizeof(Storage);
    for (uint32_t t = team.row(); t < tokens; t += team.rows()) {
      const float weight = weights[t], kept_weight = kept_weights[t];
      if (weight == 0 && kept_weight == 0) continue;
      const unsigned char* const row = kv.ValueRow(0, head, t) + first * kv.v.dim_stride_bytes;
      if (whole) {  // The host's compiler makes vectors of it.
        const auto* const values = reinterpret_cast<const Storage*>(row);
        for (uint32_t j = 0; j < Team::kColumns; ++j) {
          const float value = Element<dtype>::Load(values[j]);
          sums[0][j] += weight * value;
          sums[1][j] += kept_weight * value;
        }
        continue;
      }
      for (uint32_t j = 0; j < Team::kColumns; ++j) {
        if (j >= count) continue;
        const float value =
            Element<dtype>::Load(*reinterpret_cast<const Storage*>(row + j * kv.v.dim_stride_bytes));
        sums[0][j] += weight * value;
        sums[1][j] += kept_weight * value;
      }
    }
  }
};

// The drift of row first_row + i, whose logits are computed.
template <typename Team>
KVPOOL_HOST_DEVICE void DriftOutputs(const Team& team, const DriftContext& c, uint32_t first_row,
                                     uint32_t i) {
  const KvView& kv = c.score.kv;
  const uint32_t row = first_row + i, head = c.HeadOf(row), seen = c.KeysOf(row);
  float* const weights = c.weights + uint64_t{i} * kv.shape.tokens;
  float* const kept_weights = c.kept_weights + uint64_t{i} * kv.shape.tokens;
  float most = -INFINITY, kept_most = -INFINITY;
  for (uint32_t t = team.id(); t < seen; t += team.count()) {
    most = fmaxf(most, weights[t]);
    if (c.Stays(head, t)) kept_most = fmaxf(kept_most, weights[t]);
  }
  most = team.Max(most);
  kept_most = team.Max(kept_most);
  double sum = 0, kept_sum = 0;
  for (uint32_t t = team.id(); t < seen; t += team.count()) {
    const float logit = weights[t];
    const bool counts = logit != -INFINITY;
    const float weight = counts ? Exp2(logit - most) : 0;
    const float kept_weight = counts && c.Stays(head, t) ? Exp2(logit - kept_most) : 0;
    weights[t] = weight;
    kept_weights[t] = kept_weight;
    sum += double{weight};
    kept_sum += double{kept_weight};
  }
  sum = team.Sum(sum);
  kept_sum = team.Sum(kept_sum);
  team.Sync();
  const float share = sum > 0 ? static_cast<float>(1 / sum) : NAN;
  const float kept_share = kept_sum > 0 ? static_cast<float>(1 / kept_sum) : 0;
  double whole = 0, moved = 0;
  // All lanes go around equally often, since the team makes the sums below.
  for (uint32_t base = 0; base < kv.v.head_dim; base += team.row_width() * Team::kColumns) {
    const uint32_t first = base + team.in_row() * Team::kColumns;
    const uint32_t left = first < kv.v.head_dim ? kv.v.head_dim - first : 0;
    const uint32_t count = left < Team::kColumns ? left : Team::kColumns;
    float sums[2][Team::kColumns] = {};
    if (count > 0) {
      WithDtype(kv.dtype,
                DriftColumns<Team>{team, kv, head, seen, first, count, weights, kept_weights, sums});
    }
    for (uint32_t j = 0; j < Team::kColumns; ++j) {
      const float all = team.SumOfRows(sums[0][j]) * share;
      const float kept = team.SumOfRows(sums[1][j]) * kept_share;
      if (j >= count || team.row() != 0) continue;
      whole += double{all} * double{all};
      moved += double{all - kept} * double{all - kept};
    }
  }
  whole = team.Sum(whole);
  moved = team.Sum(moved);
  if (team.id() != 0) return;
  const double drift = whole > 0 ? sqrt(moved / whole) : moved > 0 ? 1 : moved;
  c.drifts[row] = static_cast<float>(drift);
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_DRIFT_ROWS_H_
