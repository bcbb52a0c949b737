// Least recently used, by priority: of the cached blocks without resident children, the one of the lowest
// priority goes first, and among those the one whose last use is longest ago.
#ifndef KVPOOL_SERVER_REPLACEMENT_LRU_H_
#define KVPOOL_SERVER_REPLACEMENT_LRU_H_

#include <array>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/container/btree_set.h"
#include "server/pool/virtual_array.h"
#include "server/replacement/policy.h"

namespace kvpool {

// The order is exact: the same victims as a scan of all cached blocks for the first one that may leave.
//
// Each priority has one list in the order of use. `order` grows along a list: a use appends with the next
// number, a change of priority puts the block in front of all of its new list with a number below all others
// (what is no longer dear, or was made cheap, has been waiting already).
//
// A block that Victims meets before its children leaves the list and is set aside, so that it is met once. It
// keeps its `order`, which is below that of everything behind it in the list. When its last child goes it
// joins `ready_`, which is sorted by (priority, order): the next victim is the lesser of the first of ready_
// and the oldest of the list, as if the block had never left its place.
class LruPolicy final : public ReplacementPolicy {
 public:
  explicit LruPolicy(uint32_t max_blocks);

  std::string_view name() const override { return "lru"; }
  void OnCached(BlockId block, const BlockFacts& facts) override;
  void OnUncached(BlockId block) override;
  void OnTouched(BlockId block, const BlockFacts& facts) override;
  void OnPriority(BlockId block, uint8_t priority) override;
  void OnChildless(BlockId block) override;
  void Victims(uint32_t count, const Chain& chain, std::vector<BlockId>* victims) override;
  void Prefetch(BlockId block) const override { nodes_.Prefetch(Index(block)); }
  uint32_t size() const override { return size_; }
  double bytes_per_block() const override { return sizeof(Node); }

 private:
  enum Place : uint64_t { kNowhere, kListed, kAside, kReady };
  struct Node {
    uint32_t older;  // Towards the next victim; 0 at the end, as block 0 is never cached.
    uint32_t newer;
    int64_t order : 54;
    int64_t priority : 8;
    uint64_t place : 2;
  };
  static_assert(sizeof(Node) == 16);
  struct List {
    uint32_t oldest = 0;
    uint32_t newest = 0;
  };
  using Key = std::tuple<int, int64_t, uint32_t>;  // Priority, order, block.

  void Append(uint32_t block, uint8_t priority);
  // Out of wherever it is.
  void Remove(uint32_t block);
  void Unlink(uint32_t block);
  Key KeyOf(uint32_t block) const {
    return {static_cast<int>(nodes_[block].priority), nodes_[block].order, block};
  }
  // The least by key of the lists and ready_, or 0.
  uint32_t First() const;

  VirtualArray<Node> nodes_;
  std::array<List, kMaxPriority + 1> lists_;
  std::array<uint64_t, (kMaxPriority + 64) / 64> present_{};  // Bit p: lists_[p] is not empty.
  absl::btree_set<Key> ready_;
  int64_t last_order_ = 0;
  int64_t first_order_ = 0;
  uint32_t size_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_LRU_H_
