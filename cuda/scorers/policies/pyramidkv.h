// PyramidKV: SnapKV's score with a budget that falls from layer to layer (budgets.h).
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_PYRAMIDKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_PYRAMIDKV_H_

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/policies/snapkv.h"

namespace kvpool::scorers {

struct Pyramidkv : Snapkv {
  static constexpr PolicyFacts kFacts = {
      .name = "pyramidkv",
      .title = "PyramidKV",
      .source = "arXiv 2406.02069",
      .description =
          "SnapKV's score with budgets that fall arithmetically over layers: lower layers spread their "
          "attention. The budgets (PlanBudgets) need a layer group for each layer: in one group of all "
          "layers it is SnapKV.",
      .needs = kNeedWindowMean,
      .params = kParams,
      .protect_window = true,
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_PYRAMIDKV_H_
