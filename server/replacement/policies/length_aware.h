// Least frequently used, ties leaving by depth in the chain, deepest first: Mooncake's LengthAwareCache as
// its paper describes it.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_LENGTH_AWARE_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_LENGTH_AWARE_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct LengthAwareNode {
  uint32_t accesses;
  uint32_t depth;  // blocks in front of it
  uint64_t last_use;
};

class LengthAwarePolicy final : public RankedPolicy<LengthAwareNode> {
 public:
  explicit LengthAwarePolicy(const PolicyOptions& options) : RankedPolicy(options.max_blocks) {}

  std::string_view name() const override { return "length_aware"; }
  void OnInsert(BlockId block, const Content& content) override {
    const uint32_t depth = content.parent == kNullBlock ? 0 : node(content.parent).depth + 1;
    node(block) = {.accesses = 1, .depth = depth, .last_use = ++uses_};
  }
  void OnHit(BlockId block, uint64_t) override { ++node(block).accesses; }
  void OnUsed(BlockId block, uint64_t) override { node(block).last_use = ++uses_; }
  void OnEvict(BlockId) override {}

 private:
  Rank RankOfNode(const LengthAwareNode& node) const override {
    return {.major = uint64_t{node.accesses} << 32 | (UINT32_MAX - node.depth), .minor = node.last_use};
  }

  uint64_t uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_LENGTH_AWARE_H_
