// LagKV: keeps the tokens whose K and V vary most over their elements, as the tokens that come next see it.
//
// Behind the sinks the sequence is divided into partitions of `lag` tokens; each but the last has the one after it for
// a reference. With the reference's least and greatest value of each element, min_d and max_d:
//
//   s(x) = standard deviation over d of (x_d - min_d) / (max_d - min_d), unbiased
//   u    = (softmax of s(K) + softmax of s(V)) / 2, each softmax over the partition
//
// A token's score is its rank by u in its partition, from 0, over `lag`; with cross_scoring it is u itself, so that
// partitions compete. Sinks, the last partition and the tokens behind it score 1. A sequence shorter than the sinks and
// two partitions is scored by recency. An element that is the same in all of the reference counts as 0.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_LAGKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_LAGKV_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Lagkv {
  enum : uint32_t { kLag, kSinks, kCrossScoring };
  static constexpr ParamFacts kParams[] = {
      {"lag", ParamType::kInt, 128, 1, 1024, "", "tokens of a partition"},
      {"sinks", ParamType::kInt, 4, 0, 1 << 20, "", "tokens at the start that stay"},
      {"cross_scoring", ParamType::kBool, 0, 0, 1, "", "partitions compete, not only the tokens of each"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "lagkv",
      .title = "LagKV",
      .source = "arXiv 2504.04704; LagKVPress of kvpress",
      .description =
          "Keeps, of each partition, the tokens whose K and V vary most over their elements, on the scale of "
          "the partition that follows. Reads K and V alone; the last whole partition and what is behind it "
          "stay.",
      .needs = kNeedKeys | kNeedValues,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        return {.first_tokens = params.Int(kSinks)};
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t lag = params.Int(kLag), sinks = params.Int(kSinks), tokens = plane.tokens;
    const uint32_t behind = tokens > sinks ? tokens - sinks : 0;
    const uint32_t scored = behind / lag > 1 ? (behind / lag - 1) * lag : 0;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      const bool recent = scored > 0 || i < sinks;
      scores[i] = recent ? 1 : static_cast<float>(i - sinks) / static_cast<float>(behind);
    }
    for (uint32_t first = sinks; first < sinks + scored; first += lag) {
      team.Sync();
      for (uint32_t i = first + team.id(); i < first + lag; i += team.count()) scores[i] = 0;
      AddHalf(team, plane, plane.kv->k, first, lag, scores);
      AddHalf(team, plane, plane.kv->v, first, lag, scores);
      if (params.Is(kCrossScoring, 0)) RankPartition(team, plane.scratch, lag, scores + first);
    }
  }

 private:
  KVPOOL_HOST_DEVICE static float At(const Plane& plane, const KvPlane& of, uint32_t token, uint32_t d) {
    const KvView& kv = *plane.kv;
    const unsigned char* const row =
        kv.Row(of, token / plane.tokens_per_block, plane.layer, token % plane.tokens_per_block, plane.head);
    return LoadElement(row + d * of.dim_stride_bytes, kv.dtype);
  }

  // Adds half the softmax of s(K), or of s(V), to the scores of the partition at `first`.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void AddHalf(const Team& team, const Plane& plane, const KvPlane& of,
                                         uint32_t first, uint32_t lag, float* scores) {
    float* const deviations = plane.scratch;
    float* const least = plane.scratch + uint64_t{kScratchRows} * plane.tokens;
    float* const over = least + of.head_dim;
    FindBounds(team, plane, of, first + lag, lag, least, over);
    for (uint32_t t = team.row(); t < lag; t += team.rows()) {
      double sum = 0, square = 0;
      for (uint32_t d = team.in_row(); d < of.head_dim; d += team.row_width()) {
        sum += double{(At(plane, of, first + t, d) - least[d]) * over[d]};
      }
      const double mean = team.RowSum(sum) / of.head_dim;
      for (uint32_t d = team.in_row(); d < of.head_dim; d += team.row_width()) {
        const double from_mean = double{(At(plane, of, first + t, d) - least[d]) * over[d]} - mean;
        square += from_mean * from_mean;
      }
      square = team.RowSum(square);
      const double freedom = of.head_dim > 1 ? of.head_dim - 1 : 1;
      if (team.in_row() == 0) deviations[t] = static_cast<float>(sqrt(square / freedom));
    }
    team.Sync();
    float greatest = 0;
    for (uint32_t t = team.id(); t < lag; t += team.count()) {
      if (IsFinite(deviations[t])) greatest = GreaterOf(greatest, deviations[t]);
    }
    greatest = team.Max(greatest);
    double sum = 0;
    for (uint32_t t = team.id(); t < lag; t += team.count()) {
      deviations[t] = expf(deviations[t] - greatest);
      if (IsFinite(deviations[t])) sum += double{deviations[t]};
    }
    sum = team.Sum(sum);
    for (uint32_t t = team.id(); t < lag; t += team.count()) {
      const float share = static_cast<float>(double{deviations[t]} / sum);
      scores[first + t] += IsFinite(share) ? share / 2 : NAN;
    }
    team.Sync();
  }

  // The least of each element over the `lag` tokens from `first`, and 1 / (greatest - least), 0 where that is no
  // number. Elements that are not finite are left out.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void FindBounds(const Team& team, const Plane& plane, const KvPlane& of,
                                            uint32_t first, uint32_t lag, float* least, float* over) {
    // All lanes go around equally often, since the team finds the greatest below.
    for (uint32_t base = 0; base < of.head_dim; base += team.row_width() * Team::kColumns) {
      const uint32_t column = base + team.in_row() * Team::kColumns;
      const uint32_t left = column < of.head_dim ? of.head_dim - column : 0;
      const uint32_t count = left < Team::kColumns ? left : Team::kColumns;
      float low[Team::kColumns], high[Team::kColumns];
      for (uint32_t j = 0; j < Team::kColumns; ++j) low[j] = INFINITY, high[j] = -INFINITY;
      for (uint32_t t = team.row(); t < lag; t += team.rows()) {
        for (uint32_t j = 0; j < Team::kColumns; ++j) {
          if (j >= count) break;
          const float x = At(plane, of, first + t, column + j);
          if (!IsFinite(x)) continue;
          low[j] = LesserOf(low[j], x);
          high[j] = GreaterOf(high[j], x);
        }
      }
      for (uint32_t j = 0; j < Team::kColumns; ++j) {
        const float smallest = -team.GreatestOfRows(-low[j]);
        const float range = team.GreatestOfRows(high[j]) - smallest;
        if (j >= count || team.row() != 0) continue;
        const bool varies = range > 0 && IsFinite(range);
        least[column + j] = varies ? smallest : 0;
        over[column + j] = varies ? 1 / range : 0;
      }
    }
    team.Sync();
  }

  // Replaces scores[lag] by their ranks over `lag`; equal ones rank oldest lowest. NaN stays. It takes lag^2 comparisons,
  // which is why `lag` has a low limit.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void RankPartition(const Team& team, float* ranks, uint32_t lag, float* scores) {
    for (uint32_t i = team.id(); i < lag; i += team.count()) {
      const uint64_t own = OrderOf(scores[i], i);
      uint32_t below = 0;
      for (uint32_t j = 0; j < lag; ++j) below += OrderOf(scores[j], j) < own;
      ranks[i] = scores[i] != scores[i] ? scores[i] : static_cast<float>(below) / static_cast<float>(lag);
    }
    team.Sync();
    for (uint32_t i = team.id(); i < lag; i += team.count()) scores[i] = ranks[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_LAGKV_H_
