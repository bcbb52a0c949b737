// One-dimensional pooling of the scores of tokens before the query window.
//
// The stride is 1. Half a kernel of zeros is padded at both ends and counted in averages, as torch's
// avg_pool1d does by default; a maximum sees no padding. A token that is not a number leaves alone, not with its
// neighbours: in their averages it is a zero, and no maximum sees it.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_POOLING_H_
#define KVPOOL_CUDA_SCORERS_PARTS_POOLING_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

enum class Pooling : uint8_t { kAverage, kMax, kNone };

// pooled[i] is over values[i - kernel / 2 … i + kernel / 2], i < n. REQUIRES: kernel is odd.
template <typename Team>
KVPOOL_HOST_DEVICE void Pool(const Team& team, Pooling pooling, uint32_t kernel, const float* values,
                             uint32_t n, float* pooled) {
  const uint32_t half = kernel / 2;
  for (uint32_t i = team.id(); i < n; i += team.count()) {
    const uint32_t begin = i > half ? i - half : 0;
    const uint32_t end = n - i > half ? i + half + 1 : n;
    float sum = 0, greatest = values[i];
    for (uint32_t j = begin; j < end; ++j) {
      const float value = values[j];
      if (value != value) continue;
      sum += value;
      greatest = GreaterOf(greatest, value);
    }
    const bool is_own = pooling == Pooling::kNone || values[i] != values[i];
    pooled[i] = is_own ? values[i] : pooling == Pooling::kMax ? greatest : sum / static_cast<float>(kernel);
  }
}

// Pools values[0, tokens - window) into scores; the window's tokens keep their own values.
template <typename Team>
KVPOOL_HOST_DEVICE void PoolBeforeWindow(const Team& team, Pooling pooling, uint32_t kernel,
                                         const float* values, uint32_t window, uint32_t tokens,
                                         float* scores) {
  const uint32_t before = tokens > window ? tokens - window : 0;
  Pool(team, pooling, kernel, values, before, scores);
  for (uint32_t i = before + team.id(); i < tokens; i += team.count()) scores[i] = values[i];
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_POOLING_H_
