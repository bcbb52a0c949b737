// Least recently attended: the entry whose last hit among a chunk's top attention is oldest.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LRA_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LRA_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct AttendreLra {
  static constexpr PolicyFacts kFacts = {
      .name = "attendre_lra",
      .title = "Attendre LRA",
      .source = "arXiv 2401.04881",
      .description =
          "Keeps entries whose last top-attention hit is most recent; memory is fed chunk by chunk, "
          "last_attended is the chunk's number.",
      .needs = kNeedLastAttended,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.last_attended[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LRA_H_
