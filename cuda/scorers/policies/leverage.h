// Leverage: keeps keys that lie far from the others, on the scale of how all vary, by a sketch of the keys
// (parts/leverage.h), brought to mean 0 and deviation 1 over the tokens of a head.
//
// Keys are compared as they were before RoPE. What RoPE did is undone with the tokens' indices for positions, so this is
// for a prompt from which nothing has left. Frequencies are those of theta, or with rope=weights the weights: k_head_dim
// / 2 floats in radians for each position, for models that scale them. kvpress brings a layer's heads to mean 0 and
// deviation 1 together, which changes no order within a head. Keys of no more tokens than the sketch has columns are all
// as far from each other, but for what is added to G. (arXiv 2507.08143, section 3; kvpress's
// LeverageScorePress.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_LEVERAGE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_LEVERAGE_H_

#include <cstdint>

#include "cuda/scorers/parts/leverage.h"
#include "cuda/scorers/parts/normalise.h"
#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

// Whose frequencies of RoPE are undone, in the order of the choices of the parameter `rope`.
enum class RopeSource : uint8_t { kTheta, kWeights, kNone };

inline Needs LeverageNeeds(RopeSource rope) {
  return kNeedKeys | (rope == RopeSource::kWeights ? Needs{kNeedWeights} : 0);
}
inline uint64_t LeverageWeights(RopeSource rope, const KvShape& shape, uint64_t given) {
  return rope == RopeSource::kWeights ? shape.k_head_dim / 2 : given;
}

struct Leverage {
  enum : uint32_t { kSketch, kRope, kTheta, kPairing };
  static constexpr ParamFacts kParams[] = {
      {"sketch", ParamType::kInt, 48, 1, kMaxSketch, "", "columns of the sketch"},
      {"rope", ParamType::kChoice, 0, 0, 2, "theta|weights|none",
       "whose frequencies are undone: theta's, or given as weights; none: keys as they are cached"},
      {"theta", ParamType::kFloat, 10000, 1, 1e9f, "", "base of RoPE's frequencies"},
      {"pairing", ParamType::kChoice, 0, 0, 1, "half|interleaved",
       "the elements that RoPE turns together: f and f + d/2, or 2f and 2f + 1"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "leverage",
      .title = "Leverage",
      .source = "arXiv 2507.08143; LeverageScorePress of kvpress",
      .description =
          "Keeps keys that lie far from the others, on the scale of how all of them vary: leverage of the "
          "keys before "
          "RoPE, by a sketch of 48 directions that is the same for all heads. For a prompt from which "
          "nothing has "
          "left. Reads K alone, three times.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return LeverageNeeds(RopeSource(params.Int(kRope)));
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim, uint64_t given)
          -> uint64_t { return LeverageWeights(RopeSource(params.Int(kRope)), shape, given); },
      .scratch_floats = [](const Params& params, const KvShape& shape) -> uint64_t {
        return LeverageScratchFloats(shape, params.Int(kSketch));
      },
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return LeverageProducts(shape, params.Int(kSketch)); },
  };

  // The terms of a policy whose parameters from `first` on are this one's.
  KVPOOL_HOST_DEVICE static LeverageTerms TermsOf(const Plane& plane, const Params& params, uint32_t first) {
    const auto rope = RopeSource(params.Int(first + kRope));
    return {.sketch = params.Int(first + kSketch),
            .frequencies = rope == RopeSource::kWeights ? plane.weights : nullptr,
            .theta = rope == RopeSource::kNone ? 0 : params[first + kTheta],
            .interleaved = params.Is(first + kPairing, 1),
            .first = 0,
            .end = plane.tokens};
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    LeverageOf(team, plane, TermsOf(plane, params, 0), scores);
    team.Sync();
    Normalise(team, 0, plane.tokens, scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_LEVERAGE_H_
