#include "cuda/scorers/rank_rows.h"

#include <algorithm>
#include <cmath>

#include "cuda/scorers/parts/reduce.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {
namespace {

// A mean or a maximum, value by value.
class Reduced {
 public:
  explicit Reduced(PlaneReduction reduction)
      : mean_(reduction == PlaneReduction::kMean), value_(mean_ ? 0 : -INFINITY) {}
  void Add(float x) {
    value_ = mean_ ? value_ + x : GreaterOf(value_, x);
    ++count_;
  }
  float value() const { return mean_ ? value_ / static_cast<float>(count_) : value_; }

 private:
  const bool mean_;
  float value_;
  uint32_t count_ = 0;
};

void JoinHeads(const RankRows& ranks, float* rows) {
  const uint32_t heads = ranks.asked->shape.kv_heads;
  for (uint32_t layer = 0; layer < ranks.asked->shape.layers; ++layer) {
    for (const float* const rank : ranks.by_rank) {
      const float* const from = rank + uint64_t{layer} * heads * ranks.items;
      rows = std::copy(from, from + heads * ranks.items, rows);
    }
  }
}

void Join(const RankRows& ranks, PlaneReduction over_heads, float* rows) {
  const ScoreRequest& asked = *ranks.asked;
  if (asked.scope == Scope::kHead) return JoinHeads(ranks, rows);
  const auto over_ranks = [&](uint64_t at) {
    Reduced reduced(over_heads);
    for (const float* const rank : ranks.by_rank) reduced.Add(rank[at]);
    return reduced.value();
  };
  const bool layers_left = asked.scope == Scope::kSequence && ranks.plan->request.scope == Scope::kLayer;
  if (!layers_left) {
    for (uint64_t i = 0; i < ranks.plan->rows * ranks.items; ++i) rows[i] = over_ranks(i);
    return;
  }
  for (uint64_t i = 0; i < ranks.items; ++i) {
    Reduced reduced(asked.over_layers);
    for (uint32_t layer = ranks.plan->first_reduced_layer; layer < asked.shape.layers; ++layer) {
      reduced.Add(over_ranks(layer * ranks.items + i));
    }
    rows[i] = reduced.value();
  }
}

}  // namespace

ScoreRequest RequestOfRank(const ScoreRequest& asked, uint32_t rank, uint32_t ranks) {
  ScoreRequest own = asked;
  own.model_heads = ranks * asked.shape.kv_heads;
  own.first_model_head = rank * asked.shape.kv_heads;
  const auto& own_blocks = asked.policy.facts().own_blocks;
  const bool blocks_of_mean = own_blocks != nullptr && own_blocks(asked.policy.params);
  const bool alike = asked.over_heads == asked.over_layers &&
                     (asked.over_layers == PlaneReduction::kMean || !blocks_of_mean);
  if (ranks > 1 && asked.scope == Scope::kSequence && !alike) own.scope = Scope::kLayer;
  return own;
}

uint32_t RowsOfRanks(const ScoreRequest& asked, uint32_t ranks) {
  switch (asked.scope) {
    case Scope::kSequence:
      return 1;
    case Scope::kLayer:
      return asked.shape.layers;
    case Scope::kHead:
      return asked.shape.planes() * ranks;
  }
  return 1;
}

void JoinTokenRows(const RankRows& ranks, float* rows) { Join(ranks, ranks.asked->over_heads, rows); }

void JoinOwnBlockRows(const RankRows& ranks, float* rows) { Join(ranks, PlaneReduction::kMean, rows); }

void ReduceBlockRows(const ScoreRequest& asked, uint32_t rows, const float* token_rows, float* block_rows) {
  const KvShape& shape = asked.shape;
  for (uint32_t row = 0; row < rows; ++row) {
    ReduceTokens(OneLane(), shape, asked.over_tokens, token_rows + uint64_t{row} * shape.tokens,
                 block_rows + uint64_t{row} * shape.blocks());
  }
}

}  // namespace kvpool::scorers
