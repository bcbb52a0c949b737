// StreamingLLM: keeps the first tokens, which draw attention whatever they contain, and the most recent ones.
//
// Keys keep their rotation, so positions are those in the text. An engine that wants positions inside the
// cache stores its keys unrotated.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_STREAMING_LLM_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_STREAMING_LLM_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct StreamingLlm {
  enum : uint32_t { kSinks };
  static constexpr ParamFacts kParams[] = {
      {"sinks", ParamType::kInt, 4, 0, 1 << 20, "", "tokens at the start that stay"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "streaming_llm",
      .title = "StreamingLLM",
      .source = "arXiv 2309.17453",
      .description =
          "Keeps the first tokens (attention sinks) and the most recent ones; reads nothing. In blocks: the "
          "oldest block after the sinks goes first. Keys keep their rotation: positions are those of the "
          "text, where the paper's are those in the cache.",
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        return {.first_tokens = params.Int(kSinks)};
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      const bool sink = static_cast<float>(i) < params[kSinks];
      scores[i] = sink ? 1 : static_cast<float>(i) / static_cast<float>(plane.tokens);
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_STREAMING_LLM_H_
