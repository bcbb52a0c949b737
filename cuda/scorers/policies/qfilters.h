// Q-Filters: keeps the keys that lie in the direction of the head's queries.
//
// The score is -filter.k with one filter for each kv head, which points away from the queries: the first right-singular
// vector of the head's queries, with the sign by which most of them have a negative product with it, and the mean over
// the query heads that read the kv head. The weights are the filters, [layer][kv head][k_head_dim].
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_QFILTERS_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_QFILTERS_H_

#include <cstdint>

#include "cuda/scorers/parts/features.h"
#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Qfilters {
  static constexpr PolicyFacts kFacts = {
      .name = "qfilters",
      .title = "Q-Filters",
      .source = "arXiv 2503.02812; QFilterPress of kvpress",
      .description =
          "Keeps keys that lie in the direction of the head's queries: one product of each key with a "
          "calibrated vector of its head (kvpool-lab calibrate).",
      .needs = kNeedKeys | kNeedWeights,
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t { return uint64_t{shape.planes()} * shape.k_head_dim; },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const KvView& kv = *plane.kv;
    const float* const filter =
        plane.weights + (uint64_t{plane.layer} * plane.model_heads + plane.model_head) * kv.shape.k_head_dim;
    WithDtype(kv.dtype, ProductsOfType<Team>{team, plane, filter, scores});
    team.Sync();
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = -scores[i];
  }

 private:
  template <typename Team>
  struct ProductsOfType {
    const Team& team;
    const Plane& plane;
    const float* filter;
    float* products;
    template <KvDtype dtype>
    KVPOOL_HOST_DEVICE void Run() const {
      const KvView& kv = *plane.kv;
      KeyProducts<dtype>(team, kv, plane.layer, plane.head, {0, kv.shape.blocks()}, filter, products);
    }
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_QFILTERS_H_
