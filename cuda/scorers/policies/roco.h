// RoCo: mean attention, within the scope of tokens whose attention varies least.
//
//   m = mass / count, sd = sqrt(mass_square / count - m^2)
//
// Candidates are the (budget - recent) tokens of the lowest sd, where the last tokens count as varying most.
// The lowest m among the candidates leaves. The other tokens' scores are raised by 2, which keeps means over
// heads or tokens finite.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_ROCO_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_ROCO_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Roco {
  enum : uint32_t { kRecent, kProtectLast };
  static constexpr ParamFacts kParams[] = {
      {"recent", ParamType::kInt, -1, -1, 1 << 30, "",
       "taken off the number of candidates; -1: 0.3 of the budget"},
      {"protect_last", ParamType::kInt, -1, -1, 1 << 30, "",
       "most recent tokens that count as varying most; -1: as many as recent (the authors' code: 10)"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "roco",
      .title = "RoCo",
      .source = "arXiv 2402.06262 (EasyKV)",
      .description =
          "Mean attention instead of H2O's sum, which favours age; tokens whose attention varies much are "
          "protected. Needs the sum and the sum of squares of attention.",
      .needs = kNeedMass | kNeedMassSquare,
      .params = kParams,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t budget = plane.budget_tokens == 0 ? plane.tokens : plane.budget_tokens;
    const uint32_t recent = params[kRecent] < 0 ? budget * 3 / 10 : params.Int(kRecent);
    const uint32_t protect_last = params[kProtectLast] < 0 ? recent : params.Int(kProtectLast);
    float* const deviations = plane.scratch;
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      const float count = plane.Count(i) > 0 ? plane.Count(i) : 1;
      const float mean = plane.mass[i] / count;
      const float variance = plane.mass_square[i] / count - mean * mean;
      const bool late = i + protect_last >= plane.tokens;
      scores[i] = mean;
      deviations[i] = late ? 1e9f : variance > 0 ? sqrtf(variance) : variance != variance ? variance : 0;
    }
    team.Sync();
    const uint32_t candidates = budget > recent ? budget - recent : 1;
    if (candidates >= plane.tokens) return;
    const auto key = [&](uint32_t i) { return OrderOf(deviations[i], i); };
    const uint64_t last = KthLowest(team, plane.tokens, candidates - 1, key);
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      if (key(i) > last) scores[i] += 2;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_ROCO_H_
