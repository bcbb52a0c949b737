// The order of scores, and a search for the k-th of them that needs no memory.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_ORDER_H_
#define KVPOOL_CUDA_SCORERS_PARTS_ORDER_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/element.h"

namespace kvpool::scorers {

// A number that ascends with the score: NaN gives 0, then come -Inf … +Inf; -0 and 0 are equal.
KVPOOL_HOST_DEVICE inline uint32_t OrderOf(float score) {
  if (score != score) return 0;
  const uint32_t bits = BitsOf(score == 0 ? 0.0f : score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// Equal scores: the lower index goes first.
KVPOOL_HOST_DEVICE inline uint64_t OrderOf(float score, uint32_t index) {
  return uint64_t{OrderOf(score)} << 32 | index;
}

// The k-th lowest, counted from 0, of key(0) … key(n - 1), which must all differ. It is found bit by bit,
// with 64 counts over the team.
template <typename Team, typename Key>
KVPOOL_HOST_DEVICE uint64_t KthLowest(const Team& team, uint32_t n, uint32_t k, const Key& key) {
  uint64_t found = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t candidate = found | uint64_t{1} << bit;
    uint32_t below = 0;
    for (uint32_t i = team.id(); i < n; i += team.count()) below += key(i) < candidate;
    if (team.Count(below) <= k) found = candidate;
  }
  return found;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_ORDER_H_
