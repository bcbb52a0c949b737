// TOVA: the token that the newest query attends least leaves. No token is protected, not even the newest.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_TOVA_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_TOVA_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct Tova : SignalPolicy<&Plane::latest> {
  static constexpr PolicyFacts kFacts = {
      .name = "tova",
      .title = "TOVA",
      .source = "arXiv 2401.06104",
      .description =
          "Keeps the tokens that the newest query attends most; the mean over heads. Nothing is protected by "
          "age.",
      .needs = kNeedLatest,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_TOVA_H_
