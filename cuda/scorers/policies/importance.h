// The engine's own score of each token: logits, the output of a model, anything whose highest values stay.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_IMPORTANCE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_IMPORTANCE_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct Importance : SignalPolicy<&Plane::importance> {
  static constexpr PolicyFacts kFacts = {
      .name = "importance",
      .title = "Engine's importance",
      .source = "the engine",
      .description =
          "Scores that the engine gives (token logits, a model of its own); also the host of others.",
      .needs = kNeedImportance,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_IMPORTANCE_H_
