// KeyDiff: keeps the keys that differ most from the mean key.
//
// The score is -cos(k, anchor). The anchor is the mean over resident tokens of k/‖k‖, as the authors have it,
// or of k. A key of length 0 has no direction; its score is 0.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_KEYDIFF_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_KEYDIFF_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Keydiff {
  enum : uint32_t { kAnchor };
  static constexpr ParamFacts kParams[] = {
      {"anchor", ParamType::kChoice, 0, 0, 1, "unit|mean", "mean of k/‖k‖, or of k"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "keydiff",
      .title = "KeyDiff",
      .source = "arXiv 2504.15364",
      .description =
          "Keeps keys that differ most from the mean key (score -cos): near-duplicates go, the odd ones out "
          "stay. Reads K alone.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return params.Is(kAnchor, 0) ? kNeedUnitAnchor : kNeedMeanAnchor;
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      const float length = plane.k_norm[i] * plane.anchor_norm;
      scores[i] = length == 0 ? 0 : -plane.anchor_dot[i] / length;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_KEYDIFF_H_
