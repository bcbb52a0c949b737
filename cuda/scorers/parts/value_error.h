// The error that leaving a token out makes in a head's output (CAOTE), exact under renormalisation. With
// weights a, sum a = 1, and the output X = sum a_i v_i:
//
//   without token j                             X moves by a_j / (1 - a_j) * ‖X - v_j‖
//   without a block of weight m and mean u      X moves by m / (1 - m) * ‖X - u‖
//
// The weights are a host policy's scores, brought to sum 1.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_VALUE_ERROR_H_
#define KVPOOL_CUDA_SCORERS_PARTS_VALUE_ERROR_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/host_scores.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// The element of V at `column` of a token's row.
KVPOOL_HOST_DEVICE inline float ValueAt(const KvView& kv, const unsigned char* row, uint32_t column) {
  return LoadElement(row + column * kv.v.dim_stride_bytes, kv.dtype);
}

// The vector that is taken for X.
enum class HeadOutput : uint8_t {
  kWeighted,  // sum a_i v_i
  kMean,      // the mean of v_i: it needs no weights
};

// Fills weights[plane.tokens] and output[v_head_dim]. A token whose weight is not finite has no part
// in either. Row teams share the tokens, and the lanes of each the columns.
template <HeadOutput kind, typename Team>
KVPOOL_HOST_DEVICE void WeightsAndOutput(const Team& team, const Plane& plane, float* weights,
                                         float* output) {
  constexpr bool mean_of_values = kind == HeadOutput::kMean;
  const KvView& kv = *plane.kv;
  const double sum = CopyNonNegative(team, plane.host, plane.tokens, weights);
  for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
    weights[i] = sum > 0 ? static_cast<float>(double{weights[i]} / sum) : weights[i];
  }
  team.Sync();
  // All lanes go around equally often, since the team makes the sums below.
  for (uint32_t base = 0; base < kv.v.head_dim; base += team.row_width() * Team::kColumns) {
    const uint32_t first = base + team.in_row() * Team::kColumns;
    const uint32_t count = first >= kv.v.head_dim                   ? 0
                           : kv.v.head_dim - first < Team::kColumns ? kv.v.head_dim - first
                                                                    : Team::kColumns;
    double sums[Team::kColumns] = {};
    uint32_t counted = 0;
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      if (!IsFinite(weights[t]) || !IsFinite(plane.v_norm[t])) continue;
      ++counted;
      const unsigned char* const row = kv.ValueRow(plane.layer, plane.head, t);
      const double weight = mean_of_values ? 1 : double{weights[t]};
      for (uint32_t j = 0; j < Team::kColumns; ++j) {
        if (j < count) sums[j] += weight * double{ValueAt(kv, row, first + j)};
      }
    }
    const uint32_t of_all = team.SumOfRows(counted);
    const double over = mean_of_values && of_all > 0 ? of_all : 1;
    for (uint32_t j = 0; j < Team::kColumns; ++j) {
      const double column = team.SumOfRows(sums[j]);
      if (j < count && team.row() == 0) output[first + j] = static_cast<float>(column / over);
    }
  }
  team.Sync();
}

KVPOOL_HOST_DEVICE inline float ErrorOf(double weight, double distance) {
  return weight < 1 ? static_cast<float>(weight / (1 - weight) * distance) : INFINITY;
}

template <HeadOutput kind, typename Team>
KVPOOL_HOST_DEVICE void ScoreValueErrors(const Team& team, const Plane& plane, float* scores) {
  const KvView& kv = *plane.kv;
  float* const weights = plane.scratch;
  float* const output = plane.scratch + uint64_t{kScratchRows} * plane.tokens;
  WeightsAndOutput<kind>(team, plane, weights, output);
  for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
    const float square =
        SumOverRow<RowOp::kDistance>(team, kv.ValueRow(plane.layer, plane.head, t), kv.v, kv.dtype, output);
    if (team.in_row() != 0) continue;
    scores[t] = weights[t] != weights[t] ? weights[t] : ErrorOf(double{weights[t]}, sqrt(double{square}));
  }
}

// The block form, its mean over the planes.
template <HeadOutput kind, typename Team>
KVPOOL_HOST_DEVICE void ScoreBlockErrors(const Team& team, const ScoreContext& context, PlaneRange planes,
                                         uint32_t scratch_index, float* block_scores) {
  const KvShape& shape = context.shape();
  for (uint32_t block = team.id(); block < shape.blocks(); block += team.count()) block_scores[block] = 0;
  for (uint32_t p = planes.first; p < planes.first + planes.count; ++p) {
    const Plane plane = context.At(p, scratch_index);
    float* const weights = plane.scratch;
    float* const output = plane.scratch + uint64_t{kScratchRows} * plane.tokens;
    team.Sync();
    WeightsAndOutput<kind>(team, plane, weights, output);
    for (uint32_t block = team.row(); block < shape.blocks(); block += team.rows()) {
      const uint32_t first = block * shape.tokens_per_block;
      double weight = 0, square = 0;
      for (uint32_t t = 0; t < shape.TokensOf(block); ++t) weight += double{weights[first + t]};
      for (uint32_t d = team.in_row(); d < shape.v_head_dim; d += team.row_width()) {
        double moved = weight * double{output[d]};
        for (uint32_t t = 0; t < shape.TokensOf(block); ++t) {
          const unsigned char* const row = context.kv.ValueRow(plane.layer, plane.head, first + t);
          moved -= double{weights[first + t]} * double{ValueAt(context.kv, row, d)};
        }
        square += moved * moved;
      }
      square = team.RowSum(square);
      if (team.in_row() != 0) continue;
      // ‖m X - sum a v‖ is m ‖X - u‖.
      const float error = weight < 1 ? static_cast<float>(sqrt(square) / (1 - weight)) : INFINITY;
      block_scores[block] += (weight != weight ? NAN : error) / static_cast<float>(planes.count);
    }
  }
}

// The part that policies with this score share.
template <HeadOutput kind>
struct ValueErrorPolicy {
  static constexpr ParamFacts kParams[] = {
      {"host", ParamType::kChoice, 0, 0, 0, "",
       "the policy whose scores are the attention; its parameters as host.NAME"},
  };
  static constexpr Needs kNeeds = kNeedHost | kNeedValues | kNeedValueNorms;
  static constexpr bool HasOwnBlocks(const Params&) { return true; }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    ScoreValueErrors<kind>(team, plane, scores);
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreBlocks(const Team& team, const ScoreContext& context, PlaneRange planes,
                                             uint32_t scratch_index, const Params& params,
                                             float* block_scores) {
    ScoreBlockErrors<kind>(team, context, planes, scratch_index, block_scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_VALUE_ERROR_H_
