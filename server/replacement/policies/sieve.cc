#include "server/replacement/policies/sieve.h"

namespace kvpool {

SievePolicy::SievePolicy(const PolicyOptions& options)
    : nodes_(options.max_blocks),
      heap_places_(options.max_blocks),
      heaps_{OfferHeap(&heap_places_), OfferHeap(&heap_places_)} {}

void SievePolicy::OnOffer(BlockId block) {
  const SieveNode& node = nodes_[Index(block)];
  HeapOf(node).Insert(Index(block), {.major = node.place});
}

void SievePolicy::OnWithdraw(BlockId block) { HeapOf(nodes_[Index(block)]).Remove(Index(block)); }

void SievePolicy::OnEvict(BlockId block) {
  if (nodes_[Index(block)].place != hand_) return;
  ++hand_;
  if (ahead().empty()) BeginAnew();
}

void SievePolicy::BeginAnew() {
  ahead_ = 1 - ahead_;
  hand_ = 0;
}

BlockId SievePolicy::Victim(uint64_t) {
  if (offered() == 0) return kNullBlock;
  for (;;) {
    if (ahead().empty()) BeginAnew();
    const uint32_t b = ahead().first();
    SieveNode& node = nodes_[b];
    if (!node.visited) {
      hand_ = node.place;
      return BlockId{b};
    }
    heaps_[ahead_].Remove(b);
    node.visited = 0;
    hand_ = node.place + 1;
    heaps_[1 - ahead_].Insert(b, {.major = node.place});
  }
}

}  // namespace kvpool
