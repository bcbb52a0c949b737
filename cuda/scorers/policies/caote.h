// CAOTE: what a token's loss does to the head's output, with another policy's scores as attention.
//
// Exact for the weights given (value_error.h), for tokens and for blocks.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_CAOTE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_CAOTE_H_

#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/value_error.h"

namespace kvpool::scorers {

struct Caote {
  static constexpr ParamFacts kParams[] = {
      {"host", ParamType::kChoice, 0, 0, 0, "",
       "the policy whose scores are the attention; its parameters as host.NAME"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "caote",
      .title = "CAOTE",
      .source = "arXiv 2504.14051",
      .description =
          "Weighs each token by what its loss does to the head's output: host score, brought to sum 1, as "
          "attention, times the distance of its value from the output. Blocks get the exact form for a whole "
          "block.",
      .needs = kNeedHost | kNeedValues | kNeedValueNorms,
      .params = kParams,
      .default_host = "h2o",
      .own_blocks = [](const Params& params) { return true; },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    ScoreValueErrors(team, plane, /*mean_of_values=*/false, scores);
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreBlocks(const Team& team, const ScoreContext& context, PlaneRange planes,
                                             uint32_t scratch_index, const Params& params,
                                             float* block_scores) {
    ScoreBlockErrors(team, context, planes, scratch_index, /*mean_of_values=*/false, block_scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_CAOTE_H_
