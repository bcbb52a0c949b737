// The blocks on offer, least rank first: a 4-ary heap that knows where each block is.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_OFFER_HEAP_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_OFFER_HEAP_H_

#include <algorithm>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/check.h"
#include "server/base/virtual_array.h"
#include "server/replacement/policy.h"

namespace kvpool {

// REQUIRES: value >= 0. Ranks of greater values are greater.
inline uint64_t RankOf(double value) { return std::bit_cast<uint64_t>(value + 0.0); }

// The place of each block in its heap, from 1; 0: it is in none. Heaps that divide the blocks among them
// share this.
using HeapPlaces = VirtualArray<uint32_t>;

class OfferHeap {
 public:
  explicit OfferHeap(HeapPlaces* places) : places_(*places) {}

  uint32_t size() const { return static_cast<uint32_t>(entries_.size()); }
  bool empty() const { return entries_.empty(); }
  // The block of the least rank, ties broken by block id; 0 if the heap is empty.
  uint32_t first() const { return empty() ? 0 : entries_[0].block; }
  // The blocks that are near the top, most of them among those of least rank; answers how many.
  size_t NearTop(absl::Span<BlockId> blocks) const {
    const size_t n = std::min<size_t>(blocks.size(), size());
    for (size_t i = 0; i < n; ++i) blocks[i] = BlockId{entries_[i].block};
    return n;
  }
  // REQUIRES: not empty.
  const Rank& first_rank() const { return entries_[0].rank; }

  // REQUIRES: the block is in no heap of these places.
  void Insert(uint32_t block, const Rank& rank) {
    KVPOOL_CHECK(places_[block] == 0, "block %u is on offer already", block);
    entries_.push_back({rank, block});
    Up(size() - 1, entries_.back());
  }
  // REQUIRES: it is in this heap.
  void Remove(uint32_t block) {
    const uint32_t place = places_[block] - 1;
    KVPOOL_CHECK(place < size() && entries_[place].block == block, "block %u is not on offer", block);
    places_[block] = 0;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (place == size()) return;
    if (place > 0 && last < entries_[(place - 1) / kArity]) {
      Up(place, last);
    } else {
      Down(place, last);
    }
  }

 private:
  static constexpr uint32_t kArity = 4;
  struct Entry {
    Rank rank;
    uint32_t block;
    friend auto operator<=>(const Entry&, const Entry&) = default;
  };

  void Put(uint32_t place, const Entry& entry) {
    entries_[place] = entry;
    places_[entry.block] = place + 1;
  }
  void Up(uint32_t place, const Entry entry) {
    for (; place > 0 && entry < entries_[(place - 1) / kArity]; place = (place - 1) / kArity) {
      Put(place, entries_[(place - 1) / kArity]);
    }
    Put(place, entry);
  }
  void Down(uint32_t place, const Entry entry) {
    for (uint64_t child; (child = uint64_t{place} * kArity + 1) < size();) {
      uint64_t least = child;
      for (uint64_t other = child + 1; other < child + kArity && other < size(); ++other) {
        if (entries_[other] < entries_[least]) least = other;
      }
      if (!(entries_[least] < entry)) break;
      Put(place, entries_[least]);
      place = static_cast<uint32_t>(least);
    }
    Put(place, entry);
  }

  HeapPlaces& places_;
  std::vector<Entry> entries_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_OFFER_HEAP_H_
