// Least recently used: the block whose last use ended longest ago leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_LRU_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_LRU_H_

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "server/base/virtual_array.h"
#include "server/replacement/policy.h"

namespace kvpool {

// Exact LRU: a list in the order of last use. Nearly every offer belongs at one of its ends: a leaf that was
// just used at the newest, the parent of a victim at the oldest. Offers that belong in between are kept
// beside the list in a sorted set, and the next victim is the older of the two fronts.
class LruPolicy final : public ReplacementPolicy {
 public:
  explicit LruPolicy(const PolicyOptions& options) : nodes_(options.max_blocks) {}

  std::string_view name() const override { return "lru"; }
  void OnInsert(BlockId block, const Content&) override { nodes_[Index(block)].last_use = ++last_use_; }
  void OnHit(BlockId, uint64_t) override {}
  void OnUsed(BlockId block, uint64_t) override { nodes_[Index(block)].last_use = ++last_use_; }
  void OnOffer(BlockId block) override;
  void OnWithdraw(BlockId block) override;
  void OnEvict(BlockId) override {}
  BlockId Victim(uint64_t now_ms) override;
  size_t Upcoming(absl::Span<BlockId> blocks) const override;
  Rank Standing(BlockId block) const override { return {.major = nodes_[Index(block)].last_use}; }
  void Prefetch(BlockId block, uint64_t) const override { nodes_.Prefetch(Index(block)); }
  // Appends up to `count` of those on offer, the next to leave first.
  void Oldest(uint32_t count, std::vector<BlockId>* out) const;
  // The number of the block's last use among those of all blocks, from 1.
  uint64_t last_use(BlockId block) const { return nodes_[Index(block)].last_use; }
  uint32_t offered() const override { return listed_ + static_cast<uint32_t>(between_.size()); }
  // There are hardly ever blocks between.
  double bytes_per_block() const override { return sizeof(Node); }

 private:
  struct Node {
    uint32_t
        older;  // the neighbour nearer to being the next victim; 0 at the end, as block 0 is never offered
    uint32_t newer;
    uint64_t last_use : 63;
    uint64_t between : 1;
  };
  static_assert(sizeof(Node) == 16);

  VirtualArray<Node> nodes_;
  uint32_t oldest_ = 0, newest_ = 0, listed_ = 0;
  absl::btree_set<std::pair<uint64_t, uint32_t>> between_;  // (last use, block)
  uint64_t last_use_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_LRU_H_
