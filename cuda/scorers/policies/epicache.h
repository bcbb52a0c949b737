// EpiCache: a token's largest attention from an episode's patched prompt, over its queries and the GQA group.
//
// The engine runs the patched prompt (instruction and episode text) without caching it. It gives each
// token's peak, or the prompt's queries as a window behind the sequence. episodes.h finds the episode that
// answers a question.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_EPICACHE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_EPICACHE_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct Epicache : SignalPolicy<&Plane::peak> {
  static constexpr PolicyFacts kFacts = {
      .name = "epicache",
      .title = "EpiCache",
      .source = "arXiv 2509.17396",
      .description =
          "Keeps what an episode's patched prompt attends most (maximum over its queries and the heads that "
          "share K), one block set per episode.",
      .needs = kNeedPeak,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_EPICACHE_H_
