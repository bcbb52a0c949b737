// H2O: heavy hitters by cumulative attention, and the most recent tokens.
//
// What stays is the budget's worth of top cumulative attention outside the recent window, and that window.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_H2O_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_H2O_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct H2o {
  enum : uint32_t { kRecent, kSinks };
  static constexpr ParamFacts kParams[] = {
      {"recent", ParamType::kInt, -1, -1, 1 << 30, "", "most recent tokens that stay; -1: half the budget"},
      {"sinks", ParamType::kInt, 0, 0, 1 << 20, "", "tokens at the start that stay (D2O's copy: 4)"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "h2o",
      .title = "H2O",
      .source = "arXiv 2306.14048",
      .description =
          "Keeps heavy hitters by cumulative attention, and a recent window (half the budget unless given).",
      .needs = kNeedMass,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        const uint32_t recent = params[kRecent] < 0 ? budget_tokens / 2 : params.Int(kRecent);
        return {.first_tokens = params.Int(kSinks), .last_tokens = recent};
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.mass[i];
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_H2O_H_
