// Recency, shifted by the score of the block.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SCORE_WEIGHTED_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SCORE_WEIGHTED_H_

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct ScoreWeightedNode {
  uint64_t last_use;
  float score;  // the score - 0.5; 0 of a block that was never scored
};

// rank = last use + kWeight * (score - 0.5) * turnover, where a turnover is as many uses as there are blocks,
// and being computed counts as a use. A score is the block's place among the blocks of its sequence, from 0,
// the least valuable, to 1, as device operations found it, so the scorer's own scale does not matter. Without
// scores this is LRU.
class ScoreWeightedPolicy final : public RankedPolicy<ScoreWeightedNode> {
 public:
  explicit ScoreWeightedPolicy(const PolicyOptions& options)
      : RankedPolicy(options.max_blocks), span_(kWeight * options.max_blocks) {}

  std::string_view name() const override { return "score_weighted"; }
  void OnInsert(BlockId block, const Content&) override { node(block) = {.last_use = ++uses_, .score = 0}; }
  void OnHit(BlockId, uint64_t) override {}
  void OnScore(BlockId block, float score) override {
    node(block).score = std::clamp(score, 0.0f, 1.0f) - 0.5f;
  }
  void OnUsed(BlockId block, uint64_t) override { node(block).last_use = ++uses_; }
  void OnEvict(BlockId) override {}

 private:
  static constexpr double kWeight = 0.5;

  // Uses are counted from span_ / 2 on, so that no rank is below 0.
  Rank RankOfNode(const ScoreWeightedNode& node) const override {
    return {.major = RankOf(static_cast<double>(node.last_use) + span_ / 2 + node.score * span_),
            .minor = node.last_use};
  }

  const double span_;
  uint64_t uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_SCORE_WEIGHTED_H_
