// Scores brought to mean 0 and deviation 1 over tokens.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_NORMALISE_H_
#define KVPOOL_CUDA_SCORERS_PARTS_NORMALISE_H_

#include <cmath>
#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/element.h"

namespace kvpool::scorers {

// Brings scores[first, end) to mean 0 and unbiased deviation 1. Scores that are not finite have no part in the two.
// Below a deviation of 1e-8 only the mean goes. REQUIRES: the scores are visible to all lanes.
template <typename Team>
KVPOOL_HOST_DEVICE void Normalise(const Team& team, uint32_t first, uint32_t end, float* scores) {
  double sum = 0, square = 0;
  uint32_t counted = 0;
  for (uint32_t i = first + team.id(); i < end; i += team.count()) {
    if (!IsFinite(scores[i])) continue;
    sum += double{scores[i]};
    ++counted;
  }
  counted = team.Count(counted);
  const double mean = team.Sum(sum) / (counted > 0 ? counted : 1);
  for (uint32_t i = first + team.id(); i < end; i += team.count()) {
    if (!IsFinite(scores[i])) continue;
    const double from_mean = double{scores[i]} - mean;
    square += from_mean * from_mean;
  }
  const double deviation = sqrt(team.Sum(square) / (counted > 1 ? counted - 1 : 1));
  for (uint32_t i = first + team.id(); i < end; i += team.count()) {
    scores[i] = static_cast<float>((double{scores[i]} - mean) / (deviation < 1e-8 ? 1 : deviation));
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_NORMALISE_H_
