// The base of policies of queues: each resident block has a place in one of a few, and the oldest on offer of
// one leaves.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_QUEUE_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_QUEUE_POLICY_H_

#include <cstdint>
#include <vector>

#include "proto/support/check.h"
#include "server/base/virtual_array.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/policy.h"

namespace kvpool {

// Blocks that may not leave keep their places. OldestOffered finds the first that may leave by a heap of
// those on offer, ordered by place, instead of a walk from the oldest on.
template <int kQueues>
class QueuePolicy : public ReplacementPolicy {
 public:
  void OnOffer(BlockId block) final {
    const uint32_t b = Index(block);
    heaps_[nodes_[b].queue].Insert(b, {.major = nodes_[b].place});
    ++offered_;
  }
  void OnWithdraw(BlockId block) final {
    heaps_[nodes_[Index(block)].queue].Remove(Index(block));
    --offered_;
  }
  size_t Upcoming(absl::Span<BlockId> blocks) const final {
    size_t n = 0;
    for (const OfferHeap& heap : heaps_) n += heap.NearTop(blocks.subspan(n));
    return n;
  }
  Rank Standing(BlockId block) const override {
    const Node& node = nodes_[Index(block)];
    return {.major = node.queue, .minor = node.place};
  }
  void Prefetch(BlockId block, uint64_t) const override {
    nodes_.Prefetch(Index(block));
    heap_places_.Prefetch(Index(block));
  }
  uint32_t offered() const final { return offered_; }
  double bytes_per_block() const override { return sizeof(Node) + sizeof(uint32_t) + 24; }

 protected:
  explicit QueuePolicy(uint32_t max_blocks)
      : nodes_(max_blocks), heap_places_(max_blocks), heaps_(kQueues, OfferHeap(&heap_places_)) {}

  // Enters a new content as the newest of that queue.
  void Insert(uint32_t b, uint64_t hash, int queue) {
    nodes_[b].hash = hash;
    nodes_[b].mark = 0;
    Append(b, queue);
  }
  void Remove(uint32_t b) {
    const Node& node = nodes_[b];
    Queue& q = queues_[node.queue];
    (node.older == 0 ? q.oldest : nodes_[node.older].newer) = node.newer;
    (node.newer == 0 ? q.newest : nodes_[node.newer].older) = node.older;
    --q.size;
  }
  // Moves the block to the newest end of that queue, which may be its own, whether it is on offer or not.
  void Move(uint32_t b, int queue) {
    const bool offered = heap_places_[b] != 0;
    if (offered) heaps_[nodes_[b].queue].Remove(b);
    Remove(b);
    Append(b, queue);
    if (offered) heaps_[queue].Insert(b, {.major = nodes_[b].place});
  }
  // 0 if there is none.
  uint32_t Oldest(int queue) const { return queues_[queue].oldest; }
  uint32_t OldestOffered(int queue) const { return heaps_[queue].first(); }
  int queue(uint32_t b) const { return nodes_[b].queue; }
  uint32_t size(int queue) const { return queues_[queue].size; }
  uint32_t resident() const {
    uint32_t sum = 0;
    for (const Queue& q : queues_) sum += q.size;
    return sum;
  }
  // A small number that the policy keeps with a block; at first 0.
  uint8_t mark(uint32_t b) const { return nodes_[b].mark; }
  void set_mark(uint32_t b, uint8_t mark) { nodes_[b].mark = mark; }
  uint64_t hash(uint32_t b) const { return nodes_[b].hash; }

 private:
  void Append(uint32_t b, int queue) {
    Node& node = nodes_[b];
    Queue& q = queues_[queue];
    node.place = ++last_place_;
    node.queue = static_cast<uint64_t>(queue);
    node.older = q.newest;
    node.newer = 0;
    (q.newest == 0 ? q.oldest : nodes_[q.newest].newer) = b;
    q.newest = b;
    ++q.size;
  }

  struct Node {
    uint64_t hash;
    uint32_t older, newer;
    uint64_t place : 48;  // Grows along a queue.
    uint64_t queue : 8;
    uint64_t mark : 8;
  };
  static_assert(sizeof(Node) == 24);
  struct Queue {
    uint32_t oldest = 0, newest = 0, size = 0;
  };

  VirtualArray<Node> nodes_;
  HeapPlaces heap_places_;
  std::vector<OfferHeap> heaps_;
  Queue queues_[kQueues];
  uint64_t last_place_ = 0;
  uint32_t offered_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_QUEUE_POLICY_H_
