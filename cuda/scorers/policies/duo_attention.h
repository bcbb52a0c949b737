// DuoAttention: retrieval heads keep all of the sequence, streaming heads the sinks and a recent window.
//
//   head        weight        token               score
//   retrieval   >= threshold  any                 1 + t / tokens, which is from 1 to below 2
//   streaming   < threshold   sink or recent      2
//                             any other           t / tokens, below 1
//
// The weights are a number for each [layer][kv head], as the authors' full_attention_heads.tsv has them clipped to 0 to
// 1; a threshold at a quantile of them is their sparsity. Where the heads of a layer share its budget (kvpool-lab
// --heads=ada), streaming heads lose their middle before a retrieval head loses a token. Where each head keeps equally
// many tokens, a retrieval head keeps its most recent ones. (arXiv 2410.10819, section 2.3.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_DUO_ATTENTION_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_DUO_ATTENTION_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct DuoAttention {
  enum : uint32_t { kThreshold, kSinks, kRecent };
  static constexpr ParamFacts kParams[] = {
      {"threshold", ParamType::kFloat, 0.5f, 0, 1, "", "weight from which on a head is a retrieval head"},
      {"sinks", ParamType::kInt, 128, 0, 1 << 20, "", "tokens at the start that stay with a streaming head"},
      {"recent", ParamType::kInt, 256, 0, 1 << 20, "", "most recent tokens that stay with a streaming head"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "duo_attention",
      .title = "DuoAttention",
      .source = "arXiv 2410.10819, ICLR 2025",
      .description =
          "Retrieval heads keep all, streaming heads sinks and a recent window, by a weight for each head "
          "from a file. It needs budgets that the heads of a layer share: with equal ones a retrieval head "
          "keeps its most recent tokens.",
      .needs = kNeedWeights,
      .params = kParams,
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t { return shape.planes(); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const float weight = plane.weights[uint64_t{plane.layer} * plane.model_heads + plane.model_head];
    const bool retrieval = weight >= params[kThreshold];
    const uint32_t tokens = plane.tokens;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      const bool end = i < params.Int(kSinks) || tokens - i <= params.Int(kRecent);
      const float age = static_cast<float>(i) / static_cast<float>(tokens);
      scores[i] = retrieval ? 1 + age : end ? 2 : age;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_DUO_ATTENTION_H_
