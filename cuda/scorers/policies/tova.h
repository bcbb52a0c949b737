// TOVA: the token that the newest query attends least goes. Nothing is protected, not the newest token either.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_TOVA_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_TOVA_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Tova {
  static constexpr PolicyFacts kFacts = {
      .name = "tova",
      .title = "TOVA",
      .source = "arXiv 2401.06104",
      .description =
          "Keeps the tokens that the newest query attends most; the mean over heads. Nothing is protected by "
          "age.",
      .needs = kNeedLatest,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.latest[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_TOVA_H_
