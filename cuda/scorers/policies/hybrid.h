// The weighted sum of attention, recency and a score of K and V, each brought to one scale.
//
// A term of weight 0 is neither needed nor computed. With a single weight above 0 tokens are in the order of
// that term's policy.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_HYBRID_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_HYBRID_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/policies/attention_mean.h"
#include "cuda/scorers/policies/keydiff.h"
#include "cuda/scorers/policies/paged_eviction.h"
#include "cuda/scorers/policies/recency.h"

namespace kvpool::scorers {

struct Hybrid {
  enum : uint32_t { kAttention, kRecency, kScore, kTerm, kNormalise };
  static constexpr ParamFacts kParams[] = {
      {"attention", ParamType::kFloat, 0.4f, 0, 1, "", "weight of mean attention"},
      {"recency", ParamType::kFloat, 0.3f, 0, 1, "", "weight of recency"},
      {"score", ParamType::kFloat, 0.3f, 0, 1, "", "weight of the score term"},
      {"term", ParamType::kChoice, 0, 0, 1, "keydiff|paged_eviction", "the score term"},
      {"normalise", ParamType::kChoice, 0, 0, 1, "minmax|l2", "how a term is brought to scale"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "hybrid",
      .title = "Hybrid",
      .source = "survey 'hybrid' policy",
      .description =
          "Weighted sum of mean attention, recency and a score of K and V (KeyDiff or PagedEviction), each "
          "normalised over the sequence.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        const Needs term = params.Is(kTerm, 0) ? kNeedUnitAnchor : kNeedNorms | kNeedValueNorms;
        return (params[kAttention] != 0 ? Needs{kNeedMass} : 0) | (params[kScore] != 0 ? term : 0);
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = 0;
    float* const term = plane.scratch;
    for (uint32_t t = kAttention; t <= kScore; ++t) {
      if (params[t] == 0) continue;
      team.Sync();
      if (t == kAttention) {
        AttentionMean::Score(team, plane, {}, term);
      } else if (t == kRecency) {
        Recency::Score(team, plane, {}, term);
      } else if (params.Is(kTerm, 0)) {
        Keydiff::Score(team, plane, {}, term);
      } else {
        PagedEviction::Score(team, plane, PagedEvictionDefaults(), term);
      }
      team.Sync();
      AddNormalised(team, plane.tokens, params.Is(kNormalise, 1), params[t], term, scores);
    }
  }

 private:
  KVPOOL_HOST_DEVICE static Params PagedEvictionDefaults() {
    Params params;
    params.values[PagedEviction::kEps] = 1e-6f;
    return params;
  }

  // A term that is the same for all tokens adds nothing under minmax. NaN stays NaN.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void AddNormalised(const Team& team, uint32_t tokens, bool l2, float weight,
                                               const float* term, float* scores) {
    float least = INFINITY, greatest = -INFINITY;
    double square = 0;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      if (!IsFinite(term[i])) continue;
      if (term[i] < least) least = term[i];
      if (term[i] > greatest) greatest = term[i];
      square += double{term[i]} * double{term[i]};
    }
    least = team.Min(least);
    greatest = team.Max(greatest);
    const float length = static_cast<float>(sqrt(team.Sum(square)));
    const float from = l2 ? 0 : least;
    const float over = l2 ? length : greatest - least;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      const float x = over > 0 ? (term[i] - from) / over : 0 * term[i];
      scores[i] += weight * x;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_HYBRID_H_
