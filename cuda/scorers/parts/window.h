// The attention of a window of queries over the sequence's keys: a softmax that keeps its log-sum-exp.
//
// A key that is not finite takes no part in the softmax, and its token's statistics are NaN.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_WINDOW_H_
#define KVPOOL_CUDA_SCORERS_PARTS_WINDOW_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// Loads the plane's queries as floats, times the scale: [query head of the group][query][k_head_dim].
template <typename Team>
KVPOOL_HOST_DEVICE void LoadQueries(const Team& team, const ScoreContext& c, uint32_t plane) {
  const QueryWindow& window = c.signals.window;
  const uint32_t dim = c.shape().k_head_dim;
  const uint32_t layer = plane / c.shape().kv_heads, head = plane % c.shape().kv_heads;
  const float scale = window.scale != 0 ? window.scale : 1 / sqrtf(static_cast<float>(dim));
  float* const to = c.queries + c.QueryFloats() * plane;
  for (uint32_t i = team.id(); i < c.QueryFloats(); i += team.count()) {
    const uint32_t d = i % dim, query = i / dim % window.queries, in_group = i / dim / window.queries;
    const unsigned char* const at = static_cast<const unsigned char*>(window.data) +
                                    layer * window.layer_stride_bytes + query * window.query_stride_bytes +
                                    uint64_t{head * c.group() + in_group} * window.head_stride_bytes +
                                    d * BytesOf(window.dtype);
    to[i] = LoadElement(at, window.dtype) * scale;
  }
  team.Sync();
}

// The number of keys that query w sees: it is at token tokens - queries + w, or behind the sequence.
KVPOOL_HOST_DEVICE inline uint32_t KeysSeen(const ScoreContext& c, uint32_t query) {
  if (c.signals.window.behind) return c.shape().tokens;
  const uint32_t after = c.signals.window.queries - 1 - query;
  return c.shape().tokens > after ? c.shape().tokens - after : 0;
}

// The logits of queries [first, first + count) of a plane and one token: each lane of the row team has that of
// query first + in_row(). REQUIRES: count <= row_width().
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE float OwnLogit(const Team& team, const ScoreContext& c, uint32_t plane,
                                                uint32_t token, uint32_t first, uint32_t count) {
  const uint32_t dim = c.shape().k_head_dim;
  return team.template ProductWithOwn<dtype>(
      c.kv.KeyRow(plane / c.shape().kv_heads, plane % c.shape().kv_heads, token), c.kv.k.dim_stride_bytes,
      dim, c.queries + c.QueryFloats() * plane + uint64_t{first} * dim, count);
}

// Row teams share the tokens, whose keys each reads once for so many queries as its lanes have in these.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void WindowLse(const Team& team, const ScoreContext& c, uint32_t plane) {
  constexpr uint32_t kEach = 4;  // queries of a lane
  const uint32_t width = team.row_width(), queries = c.signals.window.queries, all = c.group() * queries;
  for (uint32_t base = 0; base < all; base += width * kEach) {
    float most[kEach], sum[kEach];
    uint32_t seen[kEach];
    KVPOOL_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t query = base + i * width + team.in_row();
      most[i] = -INFINITY, sum[i] = 0;
      seen[i] = query < all ? KeysSeen(c, query % queries) : 0;
    }
    for (uint32_t t = team.row(); t < c.shape().tokens; t += team.rows()) {
      KVPOOL_UNROLL
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t first = base + i * width;
        if (first >= all) continue;
        const float logit =
            OwnLogit<dtype>(team, c, plane, t, first, all - first < width ? all - first : width);
        if (t >= seen[i] || !IsFinite(logit)) continue;
        if (logit > most[i]) {
          sum[i] = sum[i] * expf(most[i] - logit) + 1;
          most[i] = logit;
        } else {
          sum[i] += expf(logit - most[i]);
        }
      }
    }
    KVPOOL_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t query = base + i * width + team.in_row();
      const float all_most = team.GreatestOfRows(most[i]);
      const double all_sum = team.SumOfRows(sum[i] != 0 ? double{sum[i] * expf(most[i] - all_most)} : 0.0);
      if (team.row() != 0 || query >= all) continue;
      c.lse[uint64_t{plane} * all + query] = all_most + static_cast<float>(log(all_sum));
    }
  }
  team.Sync();
}

// Count, mean and sum of squared distances from it, of numbers that come in parts (Chan, Golub, LeVeque 1979).
struct Moments {
  float count = 0, mean = 0, squares = 0;

  KVPOOL_HOST_DEVICE void Add(float part_count, float part_mean, float part_squares) {
    const float sum = count + part_count, delta = part_mean - mean;
    mean += delta * part_count / sum;
    squares += part_squares + delta * delta * count * part_count / sum;
    count = sum;
  }
};

// The unbiased variance of `count` numbers, from their sum and the sum of their squares.
KVPOOL_HOST_DEVICE inline double VarianceOf(double sum, double squares, uint32_t count) {
  if (count < 2) return 0;
  const double apart = squares - sum * sum / count;
  return apart > 0 ? apart / (count - 1) : 0;
}

// Fills window_mean, window_variance and window_latest, each the mean over the group, window_peak, the maximum over
// it, and the plane's spread. Row teams share the tokens, and the lanes of each the queries.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void WindowStatistics(const Team& team, const ScoreContext& c,
                                                       uint32_t plane) {
  const uint32_t queries = c.signals.window.queries, group = c.group(), tokens = c.shape().tokens;
  const uint32_t width = team.row_width(), all = group * queries;
  const float* const lse = c.lse + uint64_t{plane} * all;
  const uint64_t own = uint64_t{plane} * tokens;
  double entropy = 0, spread = 0, sum = 0, squares_sum = 0;
  for (uint32_t t = team.row(); t < tokens; t += team.rows()) {
    const bool before_window = t + c.signals.window.own_tokens() < tokens;
    float mean_sum = 0, variance_sum = 0, peak = 0, latest_sum = 0;
    Moments of_head;
    for (uint32_t first = 0; first < all; first += width) {
      const uint32_t end = all - first < width ? all : first + width;
      const float logit = OwnLogit<dtype>(team, c, plane, t, first, end - first);
      const uint32_t query = first + team.in_row();
      float p = 0;
      if (query < end && t < KeysSeen(c, query % queries))
        p = IsFinite(logit) ? expf(logit - lse[query]) : NAN;
      if (before_window && p == p) entropy -= double{p} * log(double{p} + 1e-10);
      // The query heads of which these lanes have queries.
      for (uint32_t begin = first; begin < end;) {
        const uint32_t head_end = (begin / queries + 1) * queries;
        const uint32_t part_end = head_end < end ? head_end : end;
        const bool counts = query >= begin && query < part_end;
        const float count = static_cast<float>(part_end - begin);
        const float mean = team.RowSum(counts ? p : 0) / count;
        const float apart = counts ? p - mean : 0;
        of_head.Add(count, mean, team.RowSum(apart * apart));
        peak = GreaterOf(peak, team.RowGreatest(counts ? p : 0));
        begin = part_end;
        if (part_end != head_end) continue;
        mean_sum += of_head.mean;
        variance_sum += queries > 1 ? of_head.squares / static_cast<float>(queries - 1) : 0;
        latest_sum += team.RowSum(query == head_end - 1 ? p : 0);
        of_head = {};
      }
    }
    if (team.in_row() != 0) continue;
    if (before_window && variance_sum == variance_sum) spread += double{variance_sum};
    const float heads = static_cast<float>(group);
    c.window_mean[own + t] = mean_sum / heads;
    if (mean_sum == mean_sum) {
      sum += double{mean_sum / heads};
      squares_sum += double{mean_sum / heads} * double{mean_sum / heads};
    }
    c.window_variance[own + t] = variance_sum / heads;
    c.window_peak[own + t] = peak;
    c.window_latest[own + t] = latest_sum / heads;
  }
  entropy = team.Sum(entropy);
  spread = team.Sum(spread);
  sum = team.Sum(sum);
  squares_sum = team.Sum(squares_sum);
  if (team.id() == 0) c.spreads[plane] = {entropy, spread, VarianceOf(sum, squares_sum, tokens)};
  team.Sync();
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_WINDOW_H_
