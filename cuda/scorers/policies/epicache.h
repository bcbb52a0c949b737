// EpiCache: a token's largest attention from an episode's patched prompt, over its queries and the GQA group.
//
// The engine runs the patched prompt (instruction and episode text) without caching it and writes each token's peak,
// or hands its queries as a window behind the sequence. Which episode answers a question: episodes.h.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_EPICACHE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_EPICACHE_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Epicache {
  static constexpr PolicyFacts kFacts = {
      .name = "epicache",
      .title = "EpiCache",
      .source = "arXiv 2509.17396",
      .description =
          "Keeps what an episode's patched prompt attends most (maximum over its queries), one block set per "
          "episode.",
      .needs = kNeedPeak,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.peak[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_EPICACHE_H_
