// CAKE: mean attention of a query window plus gamma times its variance over the queries, pooled.
//
// A token whose attention changes may matter later. budgets.h has the layers' budgets, which follow from the
// attention's entropy and variance.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_CAKE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_CAKE_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/pooling.h"

namespace kvpool::scorers {

struct Cake {
  enum : uint32_t { kGamma, kPooling, kKernel };
  static constexpr ParamFacts kParams[] = {
      {"gamma", ParamType::kFloat, 200, 0, 1e6f, "", "weight of the variance"},
      {"pool", ParamType::kChoice, 0, 0, 2, "avg|max|none", "how neighbours are pooled"},
      {"kernel", ParamType::kInt, 5, 1, 255, "odd", "tokens pooled"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "cake",
      .title = "CAKE",
      .source = "arXiv 2503.12491, ICLR 2025",
      .description =
          "Keeps tokens by mean + gamma * variance of a query window's attention, pooled; layers get budgets "
          "by how spread and how changing their attention is (PlanBudgets), all at once after the prompt: "
          "the paper's cascade, which prunes layers while the prompt is computed, is not here.",
      .needs = kNeedWindowMean | kNeedWindowVariance,
      .params = kParams,
      .protect_window = true,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      plane.scratch[i] = plane.window_mean[i] + params[kGamma] * plane.window_variance[i];
    }
    team.Sync();
    PoolBeforeWindow(team, static_cast<Pooling>(params.Int(kPooling)), params.Int(kKernel), plane.scratch,
                     plane.window_tokens, plane.tokens, scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_CAKE_H_
