// The slabs of a space, and whether it should have another.
//
//   made      the device has made the slab for every rank; it is on its way to the members of all sessions
//   entered   its blocks are in the pool. Slabs enter in the order they were made, so entered <= made
//   left      its memory is another space's. Its blocks are a hole among the ids of the others, which the next slab that is made
//             fills first, from the lowest block on
//
// So there are two orders. That in which slabs were made is the one in which they go out to members, are acknowledged, enter and
// are announced: whoever has some of them has the first ones. A slab that leaves takes no place in it any more, and one that comes
// back is the last. By the other one, that of their first blocks, memory is found. Slab 0 never leaves, and is the first in both.
//
// Growth comes before eviction. While the space's largest size, the device's budget and the tenant's share
// allow another slab, nothing cached is reclaimed but what an operator asks for: a verb that is short of
// blocks waits, or is told to ask again. Slabs are made as long as
//
//   spare + coming < max(ahead, wanted)
//
//   spare    free; less what is promised, once a session came short for what others were promised
//   coming   blocks of slabs that are made and have not entered
//   ahead    clamp(max(capacity / 32, learned), slab / 4, max(slab / 4, min(4 slabs, capacity / 4))), and never
//            below the low watermark. So much, and the rest of a slab, is all that a space has unasked for
//   learned  2 * ahead each time that a verb came short before a slab was there; half of what it was each time
//            that most of `ahead` was left
//   wanted   what a verb or a guarantee lacks, until the next slab is there
//
// Where memory that is the space's own by its weight lies with others, it comes before eviction, too: for kOwnWaitMs, and again
// from each slab that comes. If none does, nothing waits for it for the next kOwnPauseMs.
//
// Not thread-safe: the space's mutex is around it. Time comes in as an argument.
#ifndef KVPOOL_SERVER_SPACE_GROWTH_H_
#define KVPOOL_SERVER_SPACE_GROWTH_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "server/keeper/keeper_link.h"
#include "server/pool/block_pool.h"
#include "server/space/space_facts.h"

namespace kvpool {

inline constexpr uint32_t kMaxSlabsInFlight = 8;
// How long a slab waits for a ready session to map it.
inline constexpr uint64_t kPatienceMs = 1000;
// Others give a slab at a step's boundary of their engines: most steps are over in so long, and no verb is to wait for longer
// where an engine holds what it should give.
inline constexpr uint64_t kOwnWaitMs = 250;
inline constexpr uint64_t kOwnPauseMs = 10'000;

// One slab on all ranks.
struct SlabRow {
  uint32_t index = 0;  // What engines and a keeper call it: the lowest number that none had which is there.
  uint32_t first_block = 0;
  uint32_t block_count = 0;
  uint64_t bytes = 0;  // Each rank's slab has so many.
  uint64_t made_ms = 0;
  std::string id;  // 16 random bytes: members that have mapped it know it by them in another daemon, too.
  std::vector<std::shared_ptr<Slab>> by_rank;
  std::vector<Kept> kept;  // Each rank's, where a keeper has them.

  uint32_t end_block() const { return first_block + block_count; }
};

struct SpaceLease {
  LeaseOutcome outcome;
  bool growing = false;  // The rest comes with a slab.
};

class Growth {
 public:
  // Both outlive it.
  Growth(const SpaceFacts* facts, BlockPool* pool);

  // ---- Slabs
  // They are in the order in which they were made.
  const std::vector<SlabRow>& slabs() const { return slabs_; }
  uint32_t entered() const { return entered_; }
  // True of a closed space whose slabs were taken, too.
  bool all_entered() const { return entered_ >= slabs_.size(); }
  uint32_t made_blocks() const { return blocks_of(static_cast<uint32_t>(slabs_.size())); }
  // The first `slabs` slabs, as they were made, have so many blocks; the null block counts.
  uint32_t blocks_of(uint32_t slabs) const { return slabs == 0 ? 0 : blocks_of_[slabs - 1]; }
  // Blocks below this one lie in the first `slabs` slabs, or are in no slab.
  uint32_t end_of_prefix(uint32_t slabs) const {
    return slabs < slabs_.size() ? lowest_from_[slabs] : UINT32_MAX;
  }
  uint32_t coming_blocks() const { return made_blocks() - (entered_ == 0 ? 0 : pool_.capacity() + 1); }
  uint64_t bytes() const;  // The sum over slabs and ranks.
  const SlabRow& RowOf(BlockId block) const;
  uint64_t AddressOf(BlockId block, size_t rank) const;
  // It has all the slabs that it may have. So has one whose limit has no room for the whole slab that must come next.
  bool complete() const;
  // The most blocks that it may have, the null block included: whole units, and one at least.
  uint32_t max_blocks() const;
  // So many without the null block; UINT32_MAX: as many as there is room for.
  void set_limit(uint32_t blocks, uint64_t now);

  // Where the next slab goes, and how many blocks there is room for. What was given back comes first, the lowest one, and is made
  // anew as it was: so slabs without a hole are always those from 0 on, in the order of their blocks. REQUIRES: !complete().
  struct Place {
    uint32_t index = 0, first_block = 0, room_blocks = 0;
    bool whole = false;  // It was given back: it has all of these blocks again.
  };
  Place NextPlace() const;
  // Its place is the next one, or that which it had before.
  void Add(SlabRow row, uint64_t now);
  // The first slab that has not entered does.
  void EnterNext(uint64_t now);
  // Slabs of an earlier daemon, whose blocks the pool has recovered: they have entered.
  void Adopt(std::vector<SlabRow> rows, uint64_t now);
  // A member has mapped a slab: growth is not stalled.
  void OnMapped(uint64_t now) { moved_ms_ = now; }
  // A closed space gets no more slabs; those it has are taken from it and destroyed.
  void Close() { closed_ = true; }
  bool closed() const { return closed_; }
  std::vector<SlabRow> TakeSlabs();

  // ---- Giving back (give_back.h)
  // So many blocks between those of slabs are in none.
  uint32_t hole_blocks() const {
    return by_block_.empty() ? 0 : slabs_[by_block_.back()].end_block() - made_blocks();
  }
  // The next slab fills a hole, or a part of one.
  bool has_hole() const { return !gone_.empty(); }
  // Slabs have the numbers from 0 on, in the order in which they were made and in that of their blocks, and there is no hole; a
  // slab that is leaving was behind them.
  bool in_order() const;
  // Where there is no hole, this makes it so. REQUIRES: whoever has been sent a slab has mapped all, or has been told of none.
  void PutInOrder();
  // The slab with these blocks, which have left the pool, leaves the space. Answers at which place it was among slabs().
  // REQUIRES: all have entered, and it is not the first.
  uint32_t Leave(BlockRange blocks, uint64_t now);
  // It is no slab of the space any more, and members may still map it. No other is made meanwhile.
  const std::optional<SlabRow>& leaving() const { return leaving_; }
  // REQUIRES: leaving().
  SlabRow TakeLeft();

  // ---- Whether to make one
  bool NeedsSlab() const {
    return may_grow_ && !leaving_ && in_flight() < kMaxSlabsInFlight && short_of_blocks();
  }
  // The same, or a slab is on its way to the members.
  bool WantsSlab() const { return !all_entered() || NeedsSlab(); }
  bool short_of_blocks() const;
  // It would not be short without one slab of its own.
  bool has_unused_slab() const;
  // As far as is known there is room in the space and in the budget.
  bool may_grow() const { return may_grow_ && !leaving_.has_value(); }
  void set_may_grow(bool may_grow);
  // There was no room for one. Unblock does nothing before `retry_ms`.
  void Block(uint64_t retry_ms);
  void Unblock(uint64_t now);
  // It could be larger, and there was no room.
  bool blocked() const { return !may_grow_ && !slabs_.empty() && !complete(); }
  // By its weight the space should have another slab, and there is no room but what others have beyond theirs.
  void set_own_elsewhere(bool elsewhere) { own_elsewhere_ = elsewhere; }
  // A verb is short, or few blocks are free: is it to wait for the space's own, which others are asked for?
  bool WaitForOwn(uint64_t now);
  bool waits_for_own(uint64_t now) const { return now < own_until_ms_; }
  // After verbs: forgets what is no longer wanted, and notes when growth began.
  void Review(uint64_t now);
  // The last slab has entered, or none is wanted any more.
  void EndIfDone();

  // ---- Blocks
  // BlockPool::Lease. While the space can grow it evicts nothing and answers what there is.
  SpaceLease Lease(Holder session, uint64_t now, uint32_t count, uint32_t min, std::vector<BlockRef>* out,
                   uint32_t most = UINT32_MAX);
  void Want(uint32_t blocks) { wanted_blocks_ = std::max(wanted_blocks_, blocks); }
  // A verb came short for what sessions are promised: from now on that is no spare.
  void CountPromises() { promises_count_ = true; }
  uint32_t free_blocks() const { return pool_.counts()[static_cast<int>(BlockState::kFree)]; }
  uint32_t low_blocks() const { return low_blocks_; }
  uint32_t high_blocks() const { return high_blocks_; }
  // With a low watermark of 0 leases evict what they need, and nothing is reclaimed in the background.
  bool reclaims_ahead() const { return facts_.low_watermark > 0; }

 private:
  // So many blocks are wanted beside those there are. False: growth will not bring them.
  bool GrowFor(uint32_t blocks, uint64_t now);
  uint32_t AheadBlocks() const;  // The right number at this capacity, with what was learned.
  // What follows from the capacity.
  void SetWatermarks();
  // Before a slab enters: did the blocks that were spare last until now?
  void LearnAhead();
  uint32_t spare_blocks() const;
  size_t in_flight() const { return slabs_.size() - entered_; }
  // What follows from slabs_.
  void Reindex();
  // What was given back behind the last slab there is leaves no hole.
  void ForgetBehindLast();
  // Fills gone_ from the holes of an earlier daemon.
  void FindGone();

  const SpaceFacts& facts_;
  BlockPool& pool_;
  std::vector<SlabRow> slabs_;
  std::vector<uint32_t> blocks_of_;    // Blocks of the slabs up to each of these,
  std::vector<uint32_t> lowest_from_;  // and the lowest block from each on.
  std::vector<uint32_t> by_block_;     // Their places there, in the order of their blocks.
  std::vector<Place> gone_;            // Slabs that were given back in front of others, in order.
  std::optional<SlabRow> leaving_;
  uint32_t entered_ = 0;
  uint32_t limit_blocks_ = UINT32_MAX;
  bool closed_ = false;

  // These follow from the capacity, and from learned_blocks_. No watermark before the first slab.
  uint32_t low_blocks_ = 0;
  uint32_t high_blocks_ = 0;
  uint32_t ahead_blocks_ = 0;

  uint32_t learned_blocks_ = 0;
  bool came_short_ = false;  // Some verb did, since the last slab entered.
  uint32_t wanted_blocks_ = 0;
  bool promises_count_ = false;
  bool may_grow_ = true;
  uint64_t retry_ms_ = 0;
  bool own_elsewhere_ = false;
  uint64_t own_until_ms_ = 0, own_again_ms_ = 0;  // WaitForOwn begins no wait before the latter.
  // A slab is wanted, or under way, and made its last step at moved_ms_.
  bool growing_ = false;
  uint64_t moved_ms_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_GROWTH_H_
