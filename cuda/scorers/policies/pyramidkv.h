// PyramidKV: SnapKV's score; what differs is the budget, which falls from layer to layer (budgets.h).
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_PYRAMIDKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_PYRAMIDKV_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/policies/snapkv.h"

namespace kvpool::scorers {

struct Pyramidkv {
  static constexpr PolicyFacts kFacts = {
      .name = "pyramidkv",
      .title = "PyramidKV",
      .source = "arXiv 2406.02069",
      .description =
          "SnapKV's score with budgets that fall arithmetically over layers: lower layers spread their "
          "attention. Without per-layer pools it is SnapKV.",
      .needs = kNeedWindow,
      .params = Snapkv::kParams,
      .protect_window = true,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    Snapkv::Score(team, plane, params, scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_PYRAMIDKV_H_
