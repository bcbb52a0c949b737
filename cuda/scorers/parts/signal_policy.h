// The body of policies that rank tokens by one signal as it is given: a token's score is its value.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_SIGNAL_POLICY_H_
#define KVPOOL_CUDA_SCORERS_PARTS_SIGNAL_POLICY_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

template <const float* Plane::*signal>
struct SignalPolicy {
  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = (plane.*signal)[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_SIGNAL_POLICY_H_
