// Recency, and what a scorer said of the block.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SCORE_WEIGHTED_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SCORE_WEIGHTED_H_

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct ScoreWeightedNode {
  uint64_t last_use;
  float score;  // Less a half; 0 of a block that was never scored.
};

// Scores come from device operations that read the block, as its place among the blocks of the sequence that was
// scored: whatever the scorer's scale, the middle is worth nothing. The most valuable of a sequence is as good as
// used kWeight / 2 turnovers of the cache later than it was, the least valuable as much earlier. A turnover is as many
// uses as there are blocks, of which being computed is one. Without scores this is LRU.
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

  // Uses are counted from span_ / 2 on, so that none is moved below 0.
  Rank RankOfNode(const ScoreWeightedNode& node) const override {
    return {.major = RankOf(static_cast<double>(node.last_use) + span_ / 2 + node.score * span_),
            .minor = node.last_use};
  }

  const double span_;
  uint64_t uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_SCORE_WEIGHTED_H_
