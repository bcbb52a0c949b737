// Reductions of scores: from planes to rows (a sequence, its layers, or its planes), and from tokens
// to blocks.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_REDUCE_H_
#define KVPOOL_CUDA_SCORERS_PARTS_REDUCE_H_

#include <cmath>
#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// Reduces the tokens of a block.
enum class TokenReduction : uint8_t { kMean, kSum, kMax, kP90 };
// Reduces the heads of a layer, and the layers of a group.
enum class PlaneReduction : uint8_t { kMean, kMax };

// Reduces values[(layer * heads + head) * items + i] to row[i]: over the heads of each of the layers
// [first_layer, end_layer), then over these layers.
struct PlaneReductions {
  const float* values = nullptr;
  uint64_t items = 0;
  uint32_t heads = 0;
  uint32_t first_layer = 0;
  uint32_t end_layer = 0;
  PlaneReduction over_heads = PlaneReduction::kMean;
  PlaneReduction over_layers = PlaneReduction::kMean;
  float* row = nullptr;
};

// A pack is Team::kColumns items of each lane of a row team: the row teams share the layers.
template <typename Team>
KVPOOL_HOST_DEVICE uint64_t PacksOf(const Team& team, uint64_t items) {
  const uint64_t pack = uint64_t{Team::kColumns} * team.row_width();
  return (items + pack - 1) / pack;
}

// Packs [begin, end).
template <typename Team>
KVPOOL_HOST_DEVICE void ReducePlanes(const Team& team, const PlaneReductions& r, uint64_t begin,
                                     uint64_t end) {
  constexpr uint32_t kColumns = Team::kColumns;
  const bool mean_heads = r.over_heads == PlaneReduction::kMean;
  const bool mean_layers = r.over_layers == PlaneReduction::kMean;
  for (uint64_t pack = begin; pack < end; ++pack) {
    const uint64_t first = (pack * team.row_width() + team.in_row()) * kColumns;
    const uint32_t count = first >= r.items             ? 0
                           : r.items - first < kColumns ? static_cast<uint32_t>(r.items - first)
                                                        : kColumns;
    float total[kColumns];
    for (uint32_t j = 0; j < kColumns; ++j) total[j] = mean_layers ? 0 : -INFINITY;
    for (uint32_t layer = r.first_layer + team.row(); layer < r.end_layer; layer += team.rows()) {
      float of_layer[kColumns];
      for (uint32_t j = 0; j < kColumns; ++j) of_layer[j] = mean_heads ? 0 : -INFINITY;
      for (uint32_t head = 0; head < r.heads; ++head) {
        const float* const values = r.values + (uint64_t{layer} * r.heads + head) * r.items + first;
        for (uint32_t j = 0; j < kColumns; ++j) {
          if (j < count)
            of_layer[j] = mean_heads ? of_layer[j] + values[j] : GreaterOf(of_layer[j], values[j]);
        }
      }
      for (uint32_t j = 0; j < kColumns; ++j) {
        const float x = mean_heads ? of_layer[j] / static_cast<float>(r.heads) : of_layer[j];
        total[j] = mean_layers ? total[j] + x : GreaterOf(total[j], x);
      }
    }
    const float layers = static_cast<float>(r.end_layer - r.first_layer);
    for (uint32_t j = 0; j < kColumns; ++j) {
      const float all = mean_layers ? team.SumOfRows(total[j]) / layers : team.GreatestOfRows(total[j]);
      if (j < count && team.row() == 0) r.row[first + j] = all;
    }
  }
}

// Linear between the ranks next to 0.9 (n - 1), numpy's default; NaN if any score is.
KVPOOL_HOST_DEVICE inline float Percentile90(const float* scores, uint32_t n) {
  const double at = 0.9 * (n - 1);
  const uint32_t rank = static_cast<uint32_t>(at);
  const auto key = [&](uint32_t i) { return OrderOf(scores[i], i); };
  const auto ranked = [&](uint32_t k) {
    return scores[static_cast<uint32_t>(KthLowest(OneLane(), n, k, key))];
  };
  for (uint32_t i = 0; i < n; ++i) {
    if (scores[i] != scores[i]) return scores[i];
  }
  const float low = ranked(rank);
  if (rank + 1 >= n || at == rank) return low;
  return low + static_cast<float>(at - rank) * (ranked(rank + 1) - low);
}

// Block scores of one row, over the valid tokens of each block. The team takes share `share` of `shares` of
// the blocks.
template <typename Team>
KVPOOL_HOST_DEVICE void ReduceTokens(const Team& team, const KvShape& shape, TokenReduction over_tokens,
                                     const float* token_scores, float* block_scores, uint32_t share = 0,
                                     uint32_t shares = 1) {
  for (uint32_t block = share * team.count() + team.id(); block < shape.blocks();
       block += shares * team.count()) {
    const float* const scores = token_scores + uint64_t{block} * shape.tokens_per_block;
    const uint32_t tokens = shape.TokensOf(block);
    double sum = 0;
    float greatest = -INFINITY;
    for (uint32_t t = 0; t < tokens; ++t) {
      sum += double{scores[t]};
      greatest = GreaterOf(greatest, scores[t]);
    }
    switch (over_tokens) {
      case TokenReduction::kMean:
        block_scores[block] = static_cast<float>(sum / tokens);
        break;
      case TokenReduction::kSum:
        block_scores[block] = static_cast<float>(sum);
        break;
      case TokenReduction::kMax:
        block_scores[block] = greatest;
        break;
      case TokenReduction::kP90:
        block_scores[block] = Percentile90(scores, tokens);
        break;
    }
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_REDUCE_H_
