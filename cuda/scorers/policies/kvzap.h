// KVzap: KVzip's score of a token, foreseen from hidden states by a small model for each layer. They are the input of the
// layer's attention, behind its first norm, of which the authors' models are trained.
//
//   model=linear   w_h . x + b_h
//   model=mlp      w2_h . gelu(W1 x + b1) + b2_h, in which the layer's heads share W1
//
// The score is about the logarithm of KVzip's, one for each kv head h. The weights are those of the authors' layers one
// behind the other, each as its state_dict has them: w [kv head][hidden_dim], b [kv head], or W1 [units][hidden_dim],
// b1 [units], w2 [kv head][units], b2 [kv head]. output=flag says which tokens are above the threshold, by which the
// authors prune in place of a budget (DMS). A plane computes W1 x for itself: the mlp costs once more for each kv head
// of a layer. (arXiv 2601.07891, section 3; kvpress's KVzapPress and DMSPress.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_KVZAP_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_KVZAP_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/gelu.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"
#include "cuda/scorers/parts/token_network.h"

namespace kvpool::scorers {

struct Kvzap {
  enum : uint32_t { kModel, kOutput, kThreshold, kRecent };
  static constexpr ParamFacts kParams[] = {
      {"model", ParamType::kChoice, 0, 0, 1, "mlp|linear", "the form of the weights"},
      {"output", ParamType::kChoice, 0, 0, 1, "score|flag", "flag: 1 at the threshold and above, else 0"},
      {"threshold", ParamType::kFloat, -4, -1e6f, 1e6f, "", "score from which on a token is kept"},
      {"recent", ParamType::kInt, 128, 0, 1 << 20, "",
       "most recent tokens that stay; at most half the budget"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "kvzap",
      .title = "KVzap",
      .source = "arXiv 2601.07891",
      .description =
          "Keeps what KVzip would, as a small model for each layer foresees it from hidden states behind the "
          "layer's first norm, with weights from a file, and a recent window. The authors drop what is below "
          "a threshold; here a "
          "budget says how much leaves, and output=flag which tokens are below.",
      .needs = kNeedHidden | kNeedWeights,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        const uint32_t recent = params.Int(kRecent);
        return {.last_tokens = recent < budget_tokens / 2 ? recent : budget_tokens / 2};
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t {
        const uint64_t heads = shape.kv_heads, layers = shape.layers;
        if (params.Is(kModel, 1)) return layers * heads * (uint64_t{hidden_dim} + 1);
        // The least number of units that makes it `given` or more.
        const uint64_t unit = uint64_t{hidden_dim} + 1 + heads;
        const uint64_t rest = given > layers * heads ? given - layers * heads : 1;
        return layers * ((rest + layers * unit - 1) / (layers * unit) * unit + heads);
      },
      // Each token is multiplied with all weights of its layer.
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return static_cast<double>(weight_count) / shape.layers; },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t dim = plane.signals->hidden_dim;
    const uint64_t heads = plane.model_heads;
    const uint64_t of_layer = plane.signals->weight_count / plane.layers;
    const float* const own = plane.weights + plane.layer * of_layer;
    TokenNetwork network = {.w1 = own, .dim = dim};
    if (params.Is(kModel, 0)) {
      network.units = (of_layer - heads) / (dim + 1 + heads);
      network.b1 = own + network.units * dim;
      network.w2 = network.b1 + (plane.model_head + 1) * network.units;
      network.b2 = network.b1[(heads + 1) * network.units + plane.model_head];
    }
    const float* const b = own + heads * dim;
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      const auto x = [&](uint32_t d) { return plane.hidden[uint64_t{t} * dim + d]; };
      const double score =
          params.Is(kModel, 0)
              ? OutputOf(team, network, x, [](float sum) { return Gelu(sum); })
              : double{ProductOf(team, own + plane.model_head * dim, x, dim)} + double{b[plane.model_head]};
      if (team.in_row() != 0) continue;
      const float flag = score != score ? NAN : score >= double{params[kThreshold]} ? 1 : 0;
      scores[t] = params.Is(kOutput, 0) ? static_cast<float>(score) : flag;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_KVZAP_H_
