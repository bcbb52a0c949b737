// The base of policies that give each block a rank, which only events of that block change: the least leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_RANKED_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_RANKED_POLICY_H_

#include <cstdint>

#include "server/base/virtual_array.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/policy.h"

namespace kvpool {

// Node is what the policy keeps of a block; before a block's first use all its bytes are zero.
template <typename Node>
class RankedPolicy : public ReplacementPolicy {
 public:
  void OnOffer(BlockId block) final { heap_.Insert(Index(block), RankOfNode(nodes_[Index(block)])); }
  void OnWithdraw(BlockId block) final { heap_.Remove(Index(block)); }
  BlockId Victim(uint64_t now_ms) final { return BlockId{heap_.first()}; }
  size_t Upcoming(absl::Span<BlockId> blocks) const final { return heap_.NearTop(blocks); }
  Rank Standing(BlockId block) const final { return RankOfNode(nodes_[Index(block)]); }
  void Prefetch(BlockId block, uint64_t) const override {
    nodes_.Prefetch(Index(block));
    places_.Prefetch(Index(block));
  }
  uint32_t offered() const final { return heap_.size(); }
  double bytes_per_block() const override { return sizeof(Node) + kHeapBytes; }

 protected:
  // A place, and an entry in the heap, which only blocks on offer have.
  static constexpr double kHeapBytes = sizeof(uint32_t) + 24;

  explicit RankedPolicy(uint32_t max_blocks) : nodes_(max_blocks), places_(max_blocks), heap_(&places_) {}
  virtual Rank RankOfNode(const Node& node) const = 0;
  Node& node(BlockId block) { return nodes_[Index(block)]; }

 private:
  VirtualArray<Node> nodes_;
  HeapPlaces places_;
  OfferHeap heap_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_RANKED_POLICY_H_
