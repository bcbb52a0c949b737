// SIEVE (Zhang et al., NSDI 2024): a hand sweeps a FIFO queue and evicts what was not asked for since its
// last visit.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_SIEVE_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_SIEVE_H_

#include <cstdint>
#include <string_view>

#include "server/base/virtual_array.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/policy.h"

namespace kvpool {

struct SieveNode {
  uint64_t place : 63;  // the number of its insertion
  uint64_t visited : 1;
};

// The hand moves from old to new over the blocks on offer and clears their marks; a block without a mark
// leaves. At the newest block it begins anew with the oldest. Blocks that may not leave keep their marks.
class SievePolicy final : public ReplacementPolicy {
 public:
  explicit SievePolicy(const PolicyOptions& options);

  std::string_view name() const override { return "sieve"; }
  void OnInsert(BlockId block, const Content&) override {
    nodes_[Index(block)] = {.place = ++insertions_, .visited = 0};
  }
  void OnHit(BlockId block, uint64_t) override { nodes_[Index(block)].visited = 1; }
  void OnUsed(BlockId, uint64_t) override {}
  void OnEvict(BlockId block) override;
  void OnOffer(BlockId block) override;
  void OnWithdraw(BlockId block) override;
  BlockId Victim(uint64_t now_ms) override;
  Rank Standing(BlockId block) const override {
    const SieveNode& node = nodes_[Index(block)];
    return {.major = node.visited, .minor = node.place};
  }
  void Prefetch(BlockId block, uint64_t) const override {
    nodes_.Prefetch(Index(block));
    heap_places_.Prefetch(Index(block));
  }
  uint32_t offered() const override { return ahead().size() + behind().size(); }
  double bytes_per_block() const override { return sizeof(SieveNode) + sizeof(uint32_t) + 24; }

 private:
  const OfferHeap& ahead() const { return heaps_[ahead_]; }
  const OfferHeap& behind() const { return heaps_[1 - ahead_]; }
  OfferHeap& HeapOf(const SieveNode& node) { return heaps_[node.place >= hand_ ? ahead_ : 1 - ahead_]; }

  // Begins the next sweep. REQUIRES: nothing is ahead.
  void BeginAnew();

  VirtualArray<SieveNode> nodes_;
  HeapPlaces heap_places_;
  // heaps_[ahead_] has the blocks that the hand has yet to visit in this sweep, the other one the rest.
  OfferHeap heaps_[2];
  int ahead_ = 0;
  // The least place that the hand has yet to visit.
  uint64_t hand_ = 0;
  uint64_t insertions_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_SIEVE_H_
