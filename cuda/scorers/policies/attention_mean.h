// The mean attention that a token received: column sums of attention over the queries so far.
//
// More queries see an early token than a late one; norm=visible_queries divides by the number of queries that
// could see the token.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_ATTENTION_MEAN_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_ATTENTION_MEAN_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct AttentionMean {
  enum : uint32_t { kNorm };
  static constexpr ParamFacts kParams[] = {
      {"norm", ParamType::kChoice, 0, 0, 1, "none|visible_queries",
       "what the sum is divided by: all queries, or those that could see the token"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "attention_mean",
      .title = "Attention importance",
      .source = "survey baseline; ObservedAttentionPress of kvpress",
      .description =
          "Keeps tokens by the mean attention they received. With norm=visible_queries the sum is divided by "
          "the queries that could see the token, without which early tokens gain.",
      .needs = kNeedMass,
      .params = kParams,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      const float queries = params.Is(kNorm, 0) ? plane.Count(0) : plane.Count(i);
      scores[i] = queries > 0 ? plane.mass[i] / queries : 0;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_ATTENTION_MEAN_H_
