// LRU-K with K = 2 (O'Neil et al., SIGMOD 1993): the block whose access before the last is
// longest ago leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_LRU_K_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_LRU_K_H_

#include <cstdint>
#include <string_view>

#include "server/replacement/parts/ghost_list.h"
#include "server/replacement/parts/ranked_policy.h"

namespace kvpool {

struct LruKNode {
  uint64_t hash;
  // The numbers of its last access and of the one before; 0 if there was none. Blocks without one leave
  // first, by last use.
  uint64_t last;
  uint64_t previous;
  uint64_t last_use;
};

// Contents that left are remembered for as many evictions as there are blocks: the paper's Retained
// Information Period.
class LruKPolicy final : public RankedPolicy<LruKNode> {
 public:
  explicit LruKPolicy(const PolicyOptions& options) : RankedPolicy(options.max_blocks) {}

  std::string_view name() const override { return "lru_k"; }
  void OnInsert(BlockId block, const Content& content) override;
  void OnHit(BlockId block, uint64_t now_ms) override;
  void OnUsed(BlockId block, uint64_t now_ms) override { node(block).last_use = ++uses_; }
  void OnEvict(BlockId block) override;
  void Prefetch(BlockId block, uint64_t hash) const override {
    RankedPolicy::Prefetch(block, hash);
    history_.Prefetch(hash);
  }
  double bytes_per_block() const override {
    return RankedPolicy::bytes_per_block() + GhostList::kBytesPerGhost;
  }

 private:
  Rank RankOfNode(const LruKNode& node) const override {
    return {.major = node.previous, .minor = node.last_use};
  }

  GhostList history_;  // Contents that left, with their last access.
  uint32_t resident_ = 0;
  uint64_t accesses_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_LRU_K_H_
