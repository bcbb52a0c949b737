// The engine's own score of each token: logits, a model of its own, anything where higher stays.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_IMPORTANCE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_IMPORTANCE_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Importance {
  static constexpr PolicyFacts kFacts = {
      .name = "importance",
      .title = "Engine's importance",
      .source = "the engine",
      .description =
          "Scores that the engine gives (token logits, a model of its own); also the host of others.",
      .needs = kNeedImportance,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.importance[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_IMPORTANCE_H_
