// H2O: heavy hitters by cumulative attention, and the most recent tokens.
//
// The recent window stays, and of the tokens before it those of the highest cumulative attention that the
// budget has room for.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_H2O_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_H2O_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct H2o : SignalPolicy<&Plane::mass> {
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
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_H2O_H_
