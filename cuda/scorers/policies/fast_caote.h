// FastCAOTE: CAOTE with the mean of V in place of the head's output, which needs no weighted sum.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_FAST_CAOTE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_FAST_CAOTE_H_

#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/value_error.h"

namespace kvpool::scorers {

struct FastCaote {
  static constexpr ParamFacts kParams[] = {
      {"host", ParamType::kChoice, 0, 0, 0, "",
       "the policy whose scores are the attention; its parameters as host.NAME"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "fast_caote",
      .title = "FastCAOTE",
      .source = "arXiv 2504.14051",
      .description = "CAOTE with the mean of the values in place of the head's output.",
      .needs = kNeedHost | kNeedValues | kNeedValueNorms,
      .params = kParams,
      .default_host = "h2o",
      .own_blocks = [](const Params& params) { return true; },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    ScoreValueErrors(team, plane, /*mean_of_values=*/true, scores);
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreBlocks(const Team& team, const ScoreContext& context, PlaneRange planes,
                                             uint32_t scratch_index, const Params& params,
                                             float* block_scores) {
    ScoreBlockErrors(team, context, planes, scratch_index, /*mean_of_values=*/true, block_scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_FAST_CAOTE_H_
