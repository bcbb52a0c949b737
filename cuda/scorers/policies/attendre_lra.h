// Least recently attended: the entry leaves whose last hit among a chunk's top attention is oldest.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LRA_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LRA_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct AttendreLra : SignalPolicy<&Plane::last_attended> {
  static constexpr PolicyFacts kFacts = {
      .name = "attendre_lra",
      .title = "Attendre LRA",
      .source = "arXiv 2401.04881",
      .description =
          "Keeps entries whose last top-attention hit is most recent; memory is fed chunk by chunk, "
          "last_attended is the chunk's number. The paper's memory of queries, which wait for later keys, is "
          "not here.",
      .needs = kNeedLastAttended,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LRA_H_
