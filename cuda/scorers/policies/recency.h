// Keeps the last tokens.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_RECENCY_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_RECENCY_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Recency {
  static constexpr PolicyFacts kFacts = {
      .name = "recency",
      .title = "Recency",
      .source = "baseline",
      .description = "Keeps the most recent tokens; reads nothing.",
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count())
      scores[i] = static_cast<float>(i) / static_cast<float>(plane.tokens);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_RECENCY_H_
