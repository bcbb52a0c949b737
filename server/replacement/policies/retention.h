// Priorities that contents earn, and lose with time: what engines do by hand with SetRetention, done by use.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_RETENTION_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_RETENTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct RetentionNode {
  uint64_t last_use;
  float priority;   // When it was set; 0 to kMaxPriority.
  Reuse said;       // Of the latest use.
  uint64_t set_at;  // In blocks inserted until then.
};

// TensorRT-LLM retains blocks by a priority of 0 to 100 that lasts for a duration, and among equals evicts the least
// recently used. Here a content begins with the default priority, each time it is found again adds as much to what is
// left of it, up to the most there is, and it halves with each turnover of the cache, the time in which as many blocks
// are inserted as there are. What an engine says of a use sets it: to the most for what is expected, to next to
// nothing for what is not. Priorities that engines set themselves are the pool's guard and rule over all policies.
//
// As all halve alike, the order of two blocks changes only when one is used: the rank is the time at which the
// priority falls to 1.
class RetentionPolicy final : public RankedPolicy<RetentionNode> {
 public:
  explicit RetentionPolicy(const PolicyOptions& options)
      : RankedPolicy(options.max_blocks), half_life_(options.max_blocks) {}

  std::string_view name() const override { return "retention"; }
  void OnInsert(BlockId block, const Content&) override {
    node(block) = {
        .last_use = ++uses_, .priority = kDefaultPriority, .said = Reuse::kUnknown, .set_at = ++inserted_};
  }
  void OnHit(BlockId block, uint64_t) override {
    RetentionNode& n = node(block);
    const double left = n.priority * std::exp2(-static_cast<double>(inserted_ - n.set_at) / half_life_);
    Set(&n, left + kDefaultPriority);
    n.said = Reuse::kUnknown;
  }
  void OnHint(BlockId block, const UseHint& hint) override {
    if (hint.reuse != Reuse::kUnknown) node(block).said = hint.reuse;
  }
  void OnUsed(BlockId block, uint64_t) override {
    RetentionNode& n = node(block);
    n.last_use = ++uses_;
    if (n.said != Reuse::kUnknown) Set(&n, n.said == Reuse::kExpected ? kMaxPriority : 1);
  }
  void OnEvict(BlockId) override {}

 private:
  void Set(RetentionNode* n, double priority) {
    n->priority = static_cast<float>(std::min<double>(priority, kMaxPriority));
    n->set_at = inserted_;
  }
  Rank RankOfNode(const RetentionNode& n) const override {
    // In whole blocks: of those alike the least recently used leaves.
    const double falls = static_cast<double>(n.set_at) + half_life_ * std::log2(std::max(1.0f, n.priority));
    return {.major = static_cast<uint64_t>(falls), .minor = n.last_use};
  }

  const double half_life_;
  uint64_t inserted_ = 0, uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_RETENTION_H_
