// Priorities that contents earn by use and lose with time, as engines set them by hand with SetRetention.
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
  float priority;   // 0 to kMaxPriority, when it was set
  Reuse said;       // the hint about the latest use
  uint64_t set_at;  // inserted blocks
};

// TensorRT-LLM retains blocks by a priority of 0 to 100 that lasts for a duration, and among equals evicts
// the least recently used. Here a content begins with the default priority p. Each time it is found again its
// priority rises by p, up to kMaxPriority, and each turnover of the cache, in which as many blocks are
// inserted as there are, halves it. A hint sets it: to kMaxPriority if a reuse is expected, else to 1.
// Priorities that engines set themselves are the pool's and come before those of any policy.
//
// As all priorities halve at one rate, the order of two blocks changes only when one is used. The rank is the
// time at which the priority falls to 1.
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
    // Counted in whole blocks: among equals the least recently used leaves.
    const double falls = static_cast<double>(n.set_at) + half_life_ * std::log2(std::max(1.0f, n.priority));
    return {.major = static_cast<uint64_t>(falls), .minor = n.last_use};
  }

  const double half_life_;
  uint64_t inserted_ = 0, uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_RETENTION_H_
