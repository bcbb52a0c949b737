// Compactor: leverage of keys, blended with attention that is not causal.
//
//   score = blending * z(leverage) + z(attention * ‖V‖, averaged over three neighbours)
//
// of the tokens behind the first and before the last ones that stay, with z as in leverage.h. The attention is what the
// engine gives as attention mass: of each chunk of 256 tokens with all of its queries and keys, softmax of q.k (which
// kvpress does not divide by sqrt d), summed over the queries and averaged over the query heads that read the kv head.
// The ends score as the greatest of the others. kvpress's z is over a layer's heads together, which blends heads of
// unlike deviation otherwise. (arXiv 2507.08143, section 3; kvpress's CompactorPress.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_COMPACTOR_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_COMPACTOR_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/leverage.h"
#include "cuda/scorers/parts/normalise.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/pooling.h"
#include "cuda/scorers/parts/team.h"
#include "cuda/scorers/policies/leverage.h"

namespace kvpool::scorers {

struct Compactor {
  // Those from kSketch on are the parameters of Leverage.
  enum : uint32_t { kBlending, kSinks, kRecent, kSketch, kRope };
  static constexpr ParamFacts kParams[] = {
      {"blending", ParamType::kFloat, -1, -1, 1e6f, "",
       "weight of the leverage; -1: the share of the tokens that leaves, 0.35 without a budget"},
      {"sinks", ParamType::kInt, 8, 0, 1 << 20, "", "tokens at the start that stay"},
      {"recent", ParamType::kInt, 4, 0, 1 << 20, "", "most recent tokens that stay"},
      Leverage::kParams[Leverage::kSketch],
      Leverage::kParams[Leverage::kRope],
      Leverage::kParams[Leverage::kTheta],
      Leverage::kParams[Leverage::kPairing],
  };
  static constexpr PolicyFacts kFacts = {
      .name = "compactor",
      .title = "Compactor",
      .source = "arXiv 2507.08143; CompactorPress of kvpress",
      .description =
          "Keeps keys that lie far from the others (leverage) and tokens that are attended within their "
          "chunk of the "
          "prompt, whether by earlier or later queries: the engine gives that attention as its mass. Nothing "
          "of a "
          "question is read.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return LeverageNeeds(RopeSource(params.Int(kRope))) | kNeedMass | kNeedValueNorms;
      },
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        return {.first_tokens = params.Int(kSinks), .last_tokens = params.Int(kRecent)};
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim, uint64_t given)
          -> uint64_t { return LeverageWeights(RopeSource(params.Int(kRope)), shape, given); },
      .scratch_floats = [](const Params& params, const KvShape& shape) -> uint64_t {
        return LeverageScratchFloats(shape, params.Int(kSketch));
      },
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return LeverageProducts(shape, params.Int(kSketch)); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t tokens = plane.tokens;
    const uint32_t first = params.Int(kSinks) < tokens ? params.Int(kSinks) : tokens;
    const uint32_t last = params.Int(kRecent) < tokens - first ? params.Int(kRecent) : tokens - first;
    LeverageTerms terms = Leverage::TermsOf(plane, params, kSketch);
    terms.first = first;
    terms.end = tokens - last;
    LeverageOf(team, plane, terms, scores);
    float* const attended = plane.scratch;
    float* const pooled = plane.scratch + tokens;
    for (uint32_t i = first + team.id(); i < terms.end; i += team.count()) {
      attended[i] = plane.mass[i] * plane.v_norm[i];
    }
    team.Sync();
    Normalise(team, first, terms.end, scores);
    Pool(team, Pooling::kAverage, 3, attended + first, terms.end - first, pooled + first);
    team.Sync();
    Normalise(team, first, terms.end, pooled);
    const float leaves = 1 - static_cast<float>(plane.budget_tokens) / static_cast<float>(tokens);
    const float blending = params[kBlending] >= 0    ? params[kBlending]
                           : plane.budget_tokens > 0 ? (leaves > 0 ? leaves : 0)
                                                     : 0.35f;
    float greatest = -INFINITY;
    for (uint32_t i = first + team.id(); i < terms.end; i += team.count()) {
      scores[i] = blending * scores[i] + pooled[i];
      if (IsFinite(scores[i])) greatest = GreaterOf(greatest, scores[i]);
    }
    greatest = team.Max(greatest);
    const float end = IsFinite(greatest) ? greatest : 0;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      if (i < first || i >= terms.end) scores[i] = end;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_COMPACTOR_H_
