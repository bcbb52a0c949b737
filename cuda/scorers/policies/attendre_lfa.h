// Least frequently attended: the entry leaves that had the fewest hits among chunks' top attention, or the
// least attention in all.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LFA_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LFA_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct AttendreLfa {
  enum : uint32_t { kCount };
  static constexpr ParamFacts kParams[] = {
      {"count", ParamType::kChoice, 0, 0, 1, "hits|mass", "what is counted"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "attendre_lfa",
      .title = "Attendre LFA",
      .source = "arXiv 2401.04881",
      .description =
          "Keeps entries attended most often: hits among chunks' top attention, or accumulated attention. "
          "The paper's memory of queries, which wait for later keys, is not here.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return params.Is(kCount, 0) ? kNeedHits : kNeedMass;
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count())
      scores[i] = params.Is(kCount, 0) ? plane.hits[i] : plane.mass[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_ATTENDRE_LFA_H_
