// KVzip: a token's largest attention while the model repeats its context, over the repetition's queries and the GQA
// group.
//
// The engine runs the repeat prompt behind the sequence, chunk by chunk, without caching it. It gives each token's peak
// over all chunks, as kvpress and the authors do: of each chunk's queries, with softmax over the sinks, the chunk's own
// keys and the prompt's. Given the queries themselves as a window behind the sequence (of which 1,024 at most go at
// once), the softmax is over the sequence's keys alone. EpiCache takes the same signal of another prompt. The authors
// spread one budget over all heads of all layers. (arXiv 2505.23416, section 3.2.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_KVZIP_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_KVZIP_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/signal_policy.h"

namespace kvpool::scorers {

struct Kvzip : SignalPolicy<&Plane::peak> {
  enum : uint32_t { kSinks };
  static constexpr ParamFacts kParams[] = {
      {"sinks", ParamType::kInt, 4, 0, 1 << 20, "", "tokens at the start that stay"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "kvzip",
      .title = "KVzip",
      .source = "arXiv 2505.23416, NeurIPS 2025",
      .description =
          "Keeps what the model attends most while it repeats the context (maximum over the repetition's "
          "queries and the heads that share K), and sinks; fit for any later question. The engine runs the "
          "repeat prompt.",
      .needs = kNeedPeak,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        return {.first_tokens = params.Int(kSinks)};
      },
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_KVZIP_H_
