// Least frequently used, with dynamic ageing (LFU-DA, Arlitt et al. 1999).
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_LFU_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_LFU_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct LfuNode {
  uint64_t accesses;
  uint64_t worth;
  uint64_t last_use;
};

// worth = accesses + the worth of the last victim at the block's last access, so what is used now overtakes
// what was popular once. Ties leave by last use.
class LfuPolicy final : public RankedPolicy<LfuNode> {
 public:
  explicit LfuPolicy(const PolicyOptions& options) : RankedPolicy(options.max_blocks) {}

  std::string_view name() const override { return "lfu"; }
  void OnInsert(BlockId block, const Content&) override {
    node(block) = {.accesses = 1, .worth = age_ + 1, .last_use = ++uses_};
  }
  void OnHit(BlockId block, uint64_t) override { node(block).worth = age_ + ++node(block).accesses; }
  void OnUsed(BlockId block, uint64_t) override { node(block).last_use = ++uses_; }
  void OnEvict(BlockId block) override { age_ = node(block).worth > age_ ? node(block).worth : age_; }

 private:
  Rank RankOfNode(const LfuNode& node) const override {
    return {.major = node.worth, .minor = node.last_use};
  }

  uint64_t age_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_LFU_H_
