// SAGE-KV: keeps sinks, recent tokens, and of the tokens between those that the prompt's last token
// attends most.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_SAGE_KV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_SAGE_KV_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct SageKv : SignalPolicy<&Plane::latest> {
  enum : uint32_t { kSinks, kRecent };
  static constexpr ParamFacts kParams[] = {
      {"sinks", ParamType::kInt, 4, 0, 1 << 20, "", "tokens at the start that stay"},
      {"recent", ParamType::kInt, 64, 1, 1 << 20, "",
       "most recent tokens that stay, the last prompt token among them; at most half the budget"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "sage_kv",
      .title = "SAGE-KV",
      .source = "arXiv 2503.08879",
      .description =
          "Once after prefill: keeps sinks, a recent window, and of the middle what the last prompt token "
          "attends most, per kv head.",
      .needs = kNeedLatest,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        const uint32_t half = budget_tokens / 2;
        return {.first_tokens = params.Int(kSinks),
                .last_tokens = params.Int(kRecent) < half ? params.Int(kRecent) : half};
      },
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_SAGE_KV_H_
