// Kernels that only the GPU check uses, lane-generic like all others.
#ifndef KVPOOL_TESTS_GPU_PROBE_KERNELS_H_
#define KVPOOL_TESTS_GPU_PROBE_KERNELS_H_

#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool {

struct CountRequest {
  uint64_t* counter;
  uint64_t rounds;
};

// Writes 1, 2, … rounds into the counter: whoever shares the memory sees whether the kernel still runs.
template <typename Lane>
KVPOOL_HOST_DEVICE void CountUp(const Lane& lane, const CountRequest& request) {
  if (lane.id() != 0) return;
  volatile uint64_t* const counter = request.counter;
  for (uint64_t round = 1; round <= request.rounds; ++round) *counter = round;
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_GPU_PROBE_KERNELS_H_
