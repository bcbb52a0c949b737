// Keeps the tokens with the shortest keys, which correlate with high attention over time.
//
// The score is -‖K‖. 1/‖K‖ would order tokens alike but not the means of blocks. The first two layers, where
// the correlation fails, have no say in what all layers keep together. The paper leaves them whole; here the
// layers of a group keep equally many tokens, so that an engine does that by a layer group that it does not prune.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_INVERSE_KEY_L2_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_INVERSE_KEY_L2_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct InverseKeyL2 {
  enum : uint32_t { kSkipLayers };
  static constexpr ParamFacts kParams[] = {
      {"skip_layers", ParamType::kInt, 2, 0, 1024, "",
       "first layers of the model that have no say in a row over all layers"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "inverse_key_l2",
      .title = "Inverse key L2",
      .source = "Devoto et al., arXiv 2406.11430",
      .description =
          "Keeps tokens with short keys (score -‖K‖), which go with high attention over time. Layers 0 and 1 "
          "have no say in what all layers keep together; where layers are pruned apart they are pruned too.",
      .needs = kNeedNorms,
      .params = kParams,
      .silent_layers = [](const Params& params) { return params.Int(kSkipLayers); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = -plane.k_norm[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_INVERSE_KEY_L2_H_
