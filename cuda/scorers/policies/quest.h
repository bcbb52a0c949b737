// Quest: an upper bound of what a window's queries may attend in each block.
//
// A block's keys lie element by element between its key_min and its key_max, so that q.k of any of them is at most
// sum max(q key_min, q key_max). The paper has one query head for each kv head. Of several q is the mean: the bound is
// one of their mean logit, and holds more of their attention than the greatest bound of any of them does
// (client/integrations/RESULTS.md). Of several queries a block has the greatest bound. Every token has its block's.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_QUEST_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_QUEST_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Quest {
  static constexpr PolicyFacts kFacts = {
      .name = "quest",
      .title = "Quest",
      .source = "arXiv 2406.10774, ICML 2024",
      .description =
          "Keeps the blocks that a window's queries may attend most, by an upper bound of the heads' mean "
          "logit in each block from the least and greatest of its key elements. The paper drops nothing and "
          "reads the best blocks of each query: the verb Select.",
      .needs = kNeedQueries | kNeedKeyBounds,
  };

  // Row teams take blocks, and their lanes elements, kColumns at once.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params&, float* scores) {
    for (uint32_t block = team.row(); block < plane.kv->shape.blocks(); block += team.rows()) {
      float greatest = -INFINITY;
      for (uint32_t query = 0; query < plane.window_queries; ++query) {
        greatest = GreaterOf(greatest, Bound(team, plane, block, query));
      }
      const uint32_t tokens = plane.kv->shape.TokensOf(block);
      float* const of_block = scores + uint64_t{block} * plane.tokens_per_block;
      for (uint32_t t = team.in_row(); t < tokens; t += team.row_width()) of_block[t] = greatest;
    }
  }

 private:
  template <typename Team>
  KVPOOL_HOST_DEVICE static float Bound(const Team& team, const Plane& plane, uint32_t block,
                                        uint32_t query) {
    constexpr uint32_t kColumns = Team::kColumns;
    const uint32_t dim = plane.kv->shape.k_head_dim, whole = dim / kColumns * kColumns;
    const float* const least = plane.KeyMin(block);
    const float* const greatest = plane.KeyMax(block);
    const uint64_t of_head = uint64_t{plane.window_queries} * dim;
    const float* const first = plane.queries + uint64_t{query} * dim;
    const auto add = [&](uint32_t d, float* sum) {
      float q = 0;
      for (uint32_t g = 0; g < plane.group; ++g) q += first[g * of_head + d];
      *sum += GreaterOf(q * least[d], q * greatest[d]);
    };
    float sums[kColumns] = {};
    for (uint32_t d = team.in_row() * kColumns; d < whole; d += team.row_width() * kColumns) {
      for (uint32_t j = 0; j < kColumns; ++j) add(d + j, &sums[j]);
    }
    for (uint32_t d = whole + team.in_row(); d < dim; d += team.row_width()) add(d, &sums[0]);
    float sum = 0;
    for (uint32_t j = 0; j < kColumns; ++j) sum += sums[j];
    return team.RowSum(sum) / static_cast<float>(plane.group);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_QUEST_H_
