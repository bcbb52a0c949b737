// A learned importance: sigmoid(w2 . relu(W1 x + b1) + b2) of each token.
//
//   features=hidden   x is the token's hidden state
//   features=pool     x is eight features that need no hidden states: ‖K‖, ‖V‖, ‖V‖/‖K‖, cosine to the mean
//                     key, age and steps since last attended (both over the sequence's length), mean
//                     attention, and the layer over the number of layers
//
// The weights are W1 [m][d], b1 [m], w2 [m], b2, one behind the other.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_LEARNED_MLP_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_LEARNED_MLP_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"
#include "cuda/scorers/parts/token_network.h"

namespace kvpool::scorers {

struct LearnedMlp {
  enum : uint32_t { kFeatures };
  static constexpr uint32_t kPoolFeatures = 8;
  static constexpr ParamFacts kParams[] = {
      {"features", ParamType::kChoice, 0, 0, 1, "hidden|pool", "hidden states, or what the pool knows"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "learned_mlp",
      .title = "Learned MLP",
      .source = "after arXiv 2602.10238 and 2602.03203",
      .description =
          "A small network, trained offline to foresee attention, over hidden states or over eight features "
          "of the pool; weights from a safetensors file.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        const Needs pool = kNeedUnitAnchor | kNeedNorms | kNeedValueNorms | kNeedLastAttended | kNeedMass;
        return kNeedWeights | (params.Is(kFeatures, 0) ? kNeedHidden : pool);
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t {
        // m (d + 2) + 1 for the least m that makes it `given` or more.
        const uint64_t unit = (params.Is(kFeatures, 0) ? hidden_dim : kPoolFeatures) + 2;
        const uint64_t units = given > 1 ? (given - 1 + unit - 1) / unit : 1;
        return units * unit + 1;
      },
      // Each token is multiplied with all weights of its model.
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return static_cast<double>(weight_count); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const bool from_pool = params.Is(kFeatures, 1);
    const uint32_t dim = from_pool ? kPoolFeatures : plane.signals->hidden_dim;
    const uint64_t units = (plane.signals->weight_count - 1) / (dim + 2);
    const float* const b1 = plane.weights + units * dim;
    const TokenNetwork network = {
        .w1 = plane.weights, .b1 = b1, .w2 = b1 + units, .b2 = b1[2 * units], .units = units, .dim = dim};
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      const float* const x = from_pool ? nullptr : plane.hidden + uint64_t{t} * dim;
      const double logit = OutputOf(
          team, network, [&](uint32_t d) { return from_pool ? PoolFeature(plane, t, d) : x[d]; },
          [](float sum) { return GreaterOf(sum, 0); });
      if (team.in_row() == 0) scores[t] = static_cast<float>(1 / (1 + exp(-logit)));
    }
  }

  KVPOOL_HOST_DEVICE static float PoolFeature(const Plane& plane, uint32_t t, uint32_t feature) {
    const float length = plane.k_norm[t] * plane.anchor_norm;
    const float tokens = static_cast<float>(plane.tokens);
    switch (feature) {
      case 0:
        return plane.k_norm[t];
      case 1:
        return plane.v_norm[t];
      case 2:
        return plane.v_norm[t] / GreaterOf(plane.k_norm[t], 1e-6f);
      case 3:
        return length > 0 ? plane.anchor_dot[t] / length : 0;
      case 4:
        return static_cast<float>(plane.tokens - 1 - t) / tokens;
      case 5:
        return (plane.signals->now - plane.last_attended[t]) / tokens;
      case 6:
        return plane.Count(t) > 0 ? plane.mass[t] / plane.Count(t) : 0;
      default:
        return static_cast<float>(plane.layer) / static_cast<float>(plane.layers);
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_LEARNED_MLP_H_
