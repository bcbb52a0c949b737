// Least recently attended: the step at which the engine last saw attention above its threshold. A token that never
// was holds the step at which it was appended, or a negative one; equal steps leave in position order.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_LRU_TOKEN_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_LRU_TOKEN_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct LruToken {
  static constexpr PolicyFacts kFacts = {
      .name = "lru_token",
      .title = "Token LRU",
      .source = "baseline",
      .description =
          "Keeps tokens that were attended most recently, by the engine's last_attended steps; equal ones "
          "leave oldest first.",
      .needs = kNeedLastAttended,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.last_attended[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_LRU_TOKEN_H_
