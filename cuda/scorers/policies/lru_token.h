// Least recently attended, by the step at which the engine last saw attention above its threshold. A token
// that was never attended has the step at which it was appended, or a negative one. Tokens of equal steps
// leave in the order of their positions.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_LRU_TOKEN_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_LRU_TOKEN_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct LruToken : SignalPolicy<&Plane::last_attended> {
  static constexpr PolicyFacts kFacts = {
      .name = "lru_token",
      .title = "Token LRU",
      .source = "baseline",
      .description =
          "Keeps tokens that were attended most recently, by the engine's last_attended steps; equal ones "
          "leave oldest first.",
      .needs = kNeedLastAttended,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_LRU_TOKEN_H_
