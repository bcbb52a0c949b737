// Which slab the next lease is from: the first one, or else of those with a block to lease one with most blocks in use.
//
// A slab can be given back once none of its blocks is leased, sealed or quarantined; what is cached there moves. So what is leased
// next goes where something is in use in any case, and a slab with little in use comes to have nothing. Blocks in use count, and
// not how few are free: with a cache hardly any is free anywhere, which says nothing of who keeps a slab. Without a cache
// the lowest free block of the pool, or the slab with the fewest, would do as well. With one the lowest leaves fewer slabs unused
// (lease_order_test.cc), and the fewest fewer still.
//
// Slabs whose blocks in use have the same number of binary digits are alike, and the lowest of them is next. So a slab changes
// its rank seldom, and most often where it matters, near none. Ranks of slabs with a block to lease are bits of one FreeSet,
// by rank and then by slab: what is next is its lowest, some words away for any number of slabs, and is looked for when a rank
// changes or a slab has no more to lease.
//
// A slab here is any `slab_blocks` blocks in a row. That is one of the space's as long as those in front of it are whole; one
// that was made smaller, for want of room, shifts those behind it against these, and what is next to each other stays together
// all the same.
#ifndef KVPOOL_SERVER_POOL_LEASE_ORDER_H_
#define KVPOOL_SERVER_POOL_LEASE_ORDER_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "server/base/virtual_array.h"
#include "server/pool/free_set.h"
#include "server/pool/pool_types.h"

namespace kvpool {

class LeaseOrder {
 public:
  // Of blocks below `end`. `slab_blocks` 0: all are one slab's.
  LeaseOrder(uint32_t end, uint32_t slab_blocks)
      : slab_blocks_(Least(end, slab_blocks)),
        reciprocal_(UINT64_MAX / slab_blocks_ + 1),
        stride_(Stride(end, slab_blocks_)),
        slabs_(end / slab_blocks_ + 1),
        by_rank_(stride_ * Ranks(slab_blocks_)) {}

  // A block comes to be in use, or is so no more.
  void Use(uint32_t block) { Change(SlabOf(block), 1, 0); }
  void EndUse(uint32_t block) { Change(SlabOf(block), -1, 0); }
  // A block may be leased from now on, which was in use up to now or was not.
  void Add(uint32_t block, bool was_in_use) { Change(SlabOf(block), was_in_use ? -1 : 0, 1); }
  // Blocks of one slab, of which this is one, are leased.
  void Lease(uint32_t block, uint32_t blocks) {
    Change(SlabOf(block), static_cast<int32_t>(blocks), -static_cast<int32_t>(blocks));
  }
  // The same of all blocks of the range that are in `free`.
  void Add(const FreeSet& free, BlockRange range) {
    EachSlab(free, range, [this](uint32_t slab, int32_t blocks) { Change(slab, 0, blocks); });
  }
  void Remove(const FreeSet& free, BlockRange range) {
    EachSlab(free, range, [this](uint32_t slab, int32_t blocks) { Change(slab, 0, -blocks); });
  }
  // The slab that is next; no blocks: there is none to lease.
  BlockRange next() const { return next_slab_; }

  // What invariants are checked by.
  size_t slabs() const { return slabs_.size(); }
  uint32_t SlabOf(uint32_t block) const {
    return static_cast<uint32_t>(static_cast<unsigned __int128>(reciprocal_) * block >> 64);
  }
  uint32_t in_use(uint32_t slab) const { return slabs_[slab].in_use; }
  uint32_t to_lease(uint32_t slab) const { return slabs_[slab].to_lease; }

 private:
  struct Slab {
    uint32_t in_use;
    uint32_t to_lease;  // Free ones that are to be kept.
  };
  // The first slab's, and one for each number of digits.
  static uint32_t Ranks(uint32_t slab_blocks) { return 2 + std::bit_width(slab_blocks); }
  // The power of two that has a number for each slab.
  static uint32_t Stride(uint32_t end, uint32_t slab_blocks) { return std::bit_ceil(end / slab_blocks + 1); }
  // Two at least, for the reciprocal, and so many that the numbers of all ranks have 32 bits.
  static uint32_t Least(uint32_t end, uint32_t slab_blocks) {
    uint32_t blocks = std::max(slab_blocks == 0 ? end : slab_blocks, 2u);
    while (end / blocks >= 1 << 26) blocks *= 2;
    return blocks;
  }
  uint32_t Place(uint32_t slab, uint32_t in_use) const {
    const uint32_t rank = slab == 0 ? 0 : Ranks(slab_blocks_) - 1 - std::bit_width(in_use);
    return rank * stride_ + slab;
  }
  void Change(uint32_t slab, int32_t in_use, int32_t to_lease) {
    Slab& s = slabs_[slab];
    const Slab before = s;
    s.in_use += in_use;
    s.to_lease += to_lease;
    // Most of the time it stays where it is. Numbers of as many digits have more in common than not.
    const bool moves = (before.in_use ^ s.in_use) > (before.in_use & s.in_use) && slab != 0;
    if ((before.to_lease > 0) != (s.to_lease > 0) || (moves && s.to_lease > 0)) Rank(slab, before);
  }
  void Rank(uint32_t slab, Slab before) {
    if (before.to_lease > 0) by_rank_.Erase(Place(slab, before.in_use));
    if (slabs_[slab].to_lease > 0) by_rank_.Insert(Place(slab, slabs_[slab].in_use));
    next_slab_ = {};
    if (by_rank_.empty()) return;
    const uint64_t first = uint64_t{by_rank_.Lowest() & (stride_ - 1)} * slab_blocks_;
    next_slab_ = {static_cast<uint32_t>(first),
                  static_cast<uint32_t>(std::min<uint64_t>(first + slab_blocks_, UINT32_MAX))};
  }
  template <typename Do>
  void EachSlab(const FreeSet& free, BlockRange range, Do act) {
    for (uint64_t at = range.first; at < range.end;) {
      const uint32_t slab = SlabOf(static_cast<uint32_t>(at));
      const uint64_t next = std::min<uint64_t>(range.end, (uint64_t{slab} + 1) * slab_blocks_);
      act(slab,
          static_cast<int32_t>(free.CountRange(static_cast<uint32_t>(at), static_cast<uint32_t>(next))));
      at = next;
    }
  }

  const uint32_t slab_blocks_;
  // It is 2^64 / slab_blocks, rounded up: exact for numbers of 32 bits (Lemire, Kaser and Kurz, 2019).
  const uint64_t reciprocal_;
  const uint32_t stride_;
  VirtualArray<Slab> slabs_;
  FreeSet by_rank_;  // Numbers by Place, of slabs with a block to lease.
  BlockRange next_slab_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_LEASE_ORDER_H_
