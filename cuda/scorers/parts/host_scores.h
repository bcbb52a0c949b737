// The part that policies over another policy's scores share.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_HOST_SCORES_H_
#define KVPOOL_CUDA_SCORERS_PARTS_HOST_SCORES_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// Copies a host's scores minus their least if that is negative, so that they can be weights and factors.
// Returns the sum of the finite ones; the others are copied as they are.
template <typename Team>
KVPOOL_HOST_DEVICE double CopyNonNegative(const Team& team, const float* host, uint32_t n, float* copy) {
  float least = 0;
  for (uint32_t i = team.id(); i < n; i += team.count()) {
    if (IsFinite(host[i]) && host[i] < least) least = host[i];
  }
  least = team.Min(least);
  double sum = 0;
  for (uint32_t i = team.id(); i < n; i += team.count()) {
    copy[i] = host[i] - least;
    if (IsFinite(copy[i])) sum += double{copy[i]};
  }
  sum = team.Sum(sum);
  team.Sync();
  return sum;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_HOST_SCORES_H_
