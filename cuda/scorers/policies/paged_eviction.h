// PagedEviction: keeps tokens whose value is long and whose key is short.
//
// Short keys correlate with high attention over time (Devoto et al.), and a long value changes the output
// more when it is attended. A token's score is ‖V‖ / ‖K‖ of each kv head; a block's is the mean of that
// over heads, tokens and layers. One block leaves each time the newest has just filled. The first block
// holds the attention sinks, and the newest often scores lowest though the model has just read it: both
// stay unless paper_literal.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_PAGED_EVICTION_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_PAGED_EVICTION_H_

#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct PagedEviction {
  enum : uint32_t { kEps, kRatio, kPaperLiteral, kFirstBlocks, kLastBlocks };
  static constexpr ParamFacts kParams[] = {
      {"eps", ParamType::kFloat, 1e-6f, 0, 1, "", "least ‖K‖ that is divided by"},
      {"ratio", ParamType::kChoice, 0, 0, 1, "per_token|of_sums",
       "block score: mean of the tokens' ratios, or sum of mean ‖V‖ over sum of mean ‖K‖ + 1e-8 of each "
       "layer"},
      {"paper_literal", ParamType::kBool, 0, 0, 1, "", "protect nothing, as the paper's text"},
      {"protect_first_blocks", ParamType::kInt, 1, 0, 1 << 20, "", "blocks at the start that stay"},
      {"protect_last_blocks", ParamType::kInt, 1, 0, 1 << 20, "", "full blocks at the end that stay"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "paged_eviction",
      .title = "PagedEviction",
      .source = "arXiv 2509.04377, Findings of EACL 2026",
      .description =
          "Keeps tokens with a high ‖V‖/‖K‖: long values matter to the output, short keys draw attention. "
          "Reads K and V alone. Prompts are compacted token by token, decoding drops a whole block each time "
          "one fills; the first and the newest block stay unless paper_literal.",
      .needs = kNeedNorms | kNeedValueNorms,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        if (params.Is(kPaperLiteral, 1)) return {};
        return {.first_blocks = params.Int(kFirstBlocks), .last_blocks = params.Int(kLastBlocks)};
      },
      // Whole blocks are pruned, so the tokens behind the last full one come on top, as in the authors' code.
      .compact_to = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> uint32_t {
        return params.Is(kPaperLiteral, 1) ? budget_tokens
                                           : budget_tokens + shape.tokens % shape.tokens_per_block;
      },
      .own_blocks = [](const Params& params) { return params.Is(kRatio, 1); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      scores[i] = plane.v_norm[i] / GreaterOf(plane.k_norm[i], params[kEps]);
    }
  }

  // The ratio of sums. The number of heads cancels, so sums over heads stand for means.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreBlocks(const Team& team, const ScoreContext& context, PlaneRange planes,
                                             uint32_t scratch_index, const Params& params,
                                             float* block_scores) {
    const KvShape& shape = context.shape();
    for (uint32_t block = team.id(); block < shape.blocks(); block += team.count()) {
      double values = 0, keys = 0;
      for (uint32_t p = planes.first; p < planes.first + planes.count; ++p) {
        const uint64_t first = uint64_t{p} * shape.tokens + block * shape.tokens_per_block;
        for (uint32_t t = 0; t < shape.TokensOf(block); ++t) {
          values += double{context.v_norms[first + t]};
          keys += double{context.k_norms[first + t]};
        }
      }
      block_scores[block] = static_cast<float>(values / planes.count / (keys / planes.count + 1e-8));
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_PAGED_EVICTION_H_
