// LazyEviction: attention recurs. A token is kept while it has been silent for less than the longest gap that
// it has come back from, and rather if it comes back often.
//
//   score = H1 + H2; MRI is the longest interval between two activations
//   H1    2 sigmoid(-(now - last) / MRI); if MRI is 0, 1 for a token that is active now and else 0
//   H2    falls with MRI, and is 0 if MRI is 0; h2 picks one of several transcriptions of the paper's formula
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_LAZY_EVICTION_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_LAZY_EVICTION_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct LazyEviction {
  enum : uint32_t { kH2, kWindow };
  static constexpr ParamFacts kParams[] = {
      {"h2", ParamType::kChoice, 0, 0, 3, "decreasing|inverse|inverse_less_one|off",
       "2s(-(MRI-1)), 2s(-1/MRI), 2s(-1/(MRI-1)), or none"},
      {"window", ParamType::kInt, 175, 0, 1 << 20, "",
       "most recent tokens that stay; at most half the budget"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "lazy_eviction",
      .title = "LazyEviction",
      .source = "arXiv 2506.15969",
      .description =
          "Keeps tokens whose silence is short against the longest gap they have come back from "
          "(last_attended, interval), evaluated every window steps; the last window stays.",
      .needs = kNeedLastAttended | kNeedInterval,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        const uint32_t half = budget_tokens / 2;
        return {.last_tokens = params.Int(kWindow) < half ? params.Int(kWindow) : half};
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      const double interval = double{plane.interval[i]};
      const double silence = double{plane.signals->now} - double{plane.last_attended[i]};
      if (interval != interval || silence != silence) {
        scores[i] = NAN;
      } else if (interval <= 0) {
        scores[i] = silence <= 0 ? 1 : 0;
      } else {
        scores[i] = static_cast<float>(FallingSigmoid(silence / interval) + H2(params, interval));
      }
    }
  }

 private:
  // 2 / (1 + e^x): 1 at 0.
  KVPOOL_HOST_DEVICE static double FallingSigmoid(double x) { return 2 / (1 + exp(x)); }
  KVPOOL_HOST_DEVICE static double H2(const Params& params, double interval) {
    switch (params.Int(kH2)) {
      case 0:
        return FallingSigmoid(interval - 1);
      case 1:
        return FallingSigmoid(1 / interval);
      case 2:
        return interval > 1 ? FallingSigmoid(1 / (interval - 1)) : 0;
      case 3:
        return 0;
    }
    return 0;
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_LAZY_EVICTION_H_
