// From scores of planes to scores of rows (a sequence, its layers, or its planes), and from tokens to blocks.
#ifndef KVPOOL_CUDA_SCORERS_REDUCE_H_
#define KVPOOL_CUDA_SCORERS_REDUCE_H_

#include <cmath>
#include <cstdint>

#include "cuda/lane.h"
#include "cuda/scorers/kv_view.h"
#include "cuda/scorers/order.h"
#include "cuda/scorers/team.h"

namespace kvpool::scorers {

enum class TokenReduction : uint8_t { kMean, kSum, kMax, kP90 };  // Tokens of a block to its score.
enum class PlaneReduction : uint8_t { kMean, kMax };              // Heads of a layer; layers of a group.

// values[(layer * heads + head) * items + i] to row[i], over the heads of layers [first_layer, end_layer), then over
// those layers.
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

// Lanes take packs of items, begin and end in packs.
template <typename Team>
KVPOOL_HOST_DEVICE void ReducePlanes(const Team& team, const PlaneReductions& r, uint64_t begin,
                                     uint64_t end) {
  const bool mean_heads = r.over_heads == PlaneReduction::kMean;
  const bool mean_layers = r.over_layers == PlaneReduction::kMean;
  for (uint64_t pack = begin + team.id(); pack < end; pack += team.count()) {
    const uint64_t first = pack * kPack;
    const uint32_t count = r.items - first < kPack ? static_cast<uint32_t>(r.items - first) : kPack;
    float total[kPack];
    for (uint32_t j = 0; j < kPack; ++j) total[j] = mean_layers ? 0 : -INFINITY;
    for (uint32_t layer = r.first_layer; layer < r.end_layer; ++layer) {
      float of_layer[kPack];
      for (uint32_t j = 0; j < kPack; ++j) of_layer[j] = mean_heads ? 0 : -INFINITY;
      for (uint32_t head = 0; head < r.heads; ++head) {
        const float* const values = r.values + (uint64_t{layer} * r.heads + head) * r.items + first;
        for (uint32_t j = 0; j < kPack; ++j) {
          if (j < count)
            of_layer[j] = mean_heads ? of_layer[j] + values[j] : GreaterOf(of_layer[j], values[j]);
        }
      }
      for (uint32_t j = 0; j < kPack; ++j) {
        const float x = mean_heads ? of_layer[j] / static_cast<float>(r.heads) : of_layer[j];
        total[j] = mean_layers ? total[j] + x : GreaterOf(total[j], x);
      }
    }
    const float layers = static_cast<float>(r.end_layer - r.first_layer);
    for (uint32_t j = 0; j < kPack; ++j) {
      if (j < count) r.row[first + j] = mean_layers ? total[j] / layers : total[j];
    }
  }
}

// Linear between the ranks next to 0.9 (n - 1), as numpy's default. NaN if any is.
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

// Blocks of one row: over the tokens that are there, all of them but in a last block partly filled.
template <typename Team>
KVPOOL_HOST_DEVICE void ReduceTokens(const Team& team, const KvShape& shape, TokenReduction over_tokens,
                                     const float* token_scores, float* block_scores) {
  for (uint32_t block = team.id(); block < shape.blocks(); block += team.count()) {
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

#endif  // KVPOOL_CUDA_SCORERS_REDUCE_H_
