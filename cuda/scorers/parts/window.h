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

template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE float Logit(const Team& team, const ScoreContext& c, uint32_t plane,
                                             uint32_t token, const float* query) {
  const unsigned char* const row = c.kv.KeyRow(plane / c.shape().kv_heads, plane % c.shape().kv_heads, token);
  const uint64_t stride = c.kv.k.dim_stride_bytes;
  return stride == BytesOf(dtype)
             ? SumOverRow<dtype, true, RowOp::kProduct>(team, row, stride, c.shape().k_head_dim, query)
             : SumOverRow<dtype, false, RowOp::kProduct>(team, row, stride, c.shape().k_head_dim, query);
}

template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void WindowLse(const Team& team, const ScoreContext& c, uint32_t plane) {
  const uint32_t queries = c.signals.window.queries;
  for (uint32_t i = 0; i < c.group() * queries; ++i) {
    const float* const query = c.queries + c.QueryFloats() * plane + uint64_t{i} * c.shape().k_head_dim;
    const uint32_t seen = KeysSeen(c, i % queries);
    float most = -INFINITY, sum = 0;
    for (uint32_t t = team.row(); t < seen; t += team.rows()) {
      const float logit = Logit<dtype>(team, c, plane, t, query);
      if (!IsFinite(logit)) continue;
      if (logit > most) {
        sum = sum * expf(most - logit) + 1;
        most = logit;
      } else {
        sum += expf(logit - most);
      }
    }
    const float all_most = team.Max(most);
    const double all = team.Sum(team.in_row() == 0 && sum != 0 ? double{sum * expf(most - all_most)} : 0.0);
    if (team.id() == 0) {
      c.lse[uint64_t{plane} * c.group() * queries + i] = all_most + static_cast<float>(log(all));
    }
  }
  team.Sync();
}

// The unbiased variance of `count` numbers, from their sum and the sum of their squares.
KVPOOL_HOST_DEVICE inline double VarianceOf(double sum, double squares, uint32_t count) {
  if (count < 2) return 0;
  const double apart = squares - sum * sum / count;
  return apart > 0 ? apart / (count - 1) : 0;
}

// Fills window_mean, window_variance (by Welford's method) and window_latest, each the mean over the group,
// window_peak, the maximum over it, and the plane's spread.
template <KvDtype dtype, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE void WindowStatistics(const Team& team, const ScoreContext& c,
                                                       uint32_t plane) {
  const uint32_t queries = c.signals.window.queries, group = c.group(), tokens = c.shape().tokens;
  const float* const lse = c.lse + uint64_t{plane} * group * queries;
  const uint64_t own = uint64_t{plane} * tokens;
  double entropy = 0, spread = 0, sum = 0, squares_sum = 0;
  for (uint32_t t = team.row(); t < tokens; t += team.rows()) {
    const bool before_window = t + c.signals.window.own_tokens() < tokens;
    float mean_sum = 0, variance_sum = 0, peak = 0, latest_sum = 0;
    for (uint32_t g = 0; g < group; ++g) {
      float mean = 0, squares = 0, latest = 0;
      for (uint32_t w = 0; w < queries; ++w) {
        const uint32_t i = g * queries + w;
        float p = 0;
        if (t < KeysSeen(c, w)) {
          const float logit = Logit<dtype>(
              team, c, plane, t, c.queries + c.QueryFloats() * plane + uint64_t{i} * c.shape().k_head_dim);
          p = IsFinite(logit) ? expf(logit - lse[i]) : NAN;
        }
        const float delta = p - mean;
        mean += delta / static_cast<float>(w + 1);
        squares += delta * (p - mean);
        peak = GreaterOf(peak, p);
        latest = p;
        if (before_window && team.in_row() == 0 && p == p) entropy -= double{p} * log(double{p} + 1e-10);
      }
      const float variance = queries > 1 ? squares / static_cast<float>(queries - 1) : 0;
      mean_sum += mean;
      variance_sum += variance;
      latest_sum += latest;
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
