// The slabs of a space, and whether it should have another.
//
//   made      the device has made the slab for every rank; it is on its way to the members of all sessions
//   entered   its blocks are in the pool. Slabs enter in the order they were made, so entered <= made
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
  const std::vector<SlabRow>& slabs() const { return slabs_; }
  uint32_t entered() const { return entered_; }
  // True of a closed space whose slabs were taken, too.
  bool all_entered() const { return entered_ >= slabs_.size(); }
  uint32_t made_blocks() const { return end_block(static_cast<uint32_t>(slabs_.size())); }
  // Ids below this one lie in the first `slabs` slabs; the null block counts.
  uint32_t end_block(uint32_t slabs) const { return slabs == 0 ? 0 : slabs_[slabs - 1].end_block(); }
  uint32_t coming_blocks() const { return made_blocks() - (entered_ == 0 ? 0 : pool_.capacity() + 1); }
  uint64_t bytes() const;  // The sum over slabs and ranks.
  const SlabRow& RowOf(BlockId block) const;
  uint64_t AddressOf(BlockId block, size_t rank) const;
  bool complete() const;  // It has all the slabs that it may have.
  // The most blocks that it may have, the null block included: whole units, and one at least.
  uint32_t max_blocks() const;
  // So many without the null block; UINT32_MAX: as many as there is room for.
  void set_limit(uint32_t blocks, uint64_t now);

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
  // The last slab leaves the space; its blocks have left the pool. REQUIRES: all have entered, and it is not the first.
  void Leave(uint64_t now);
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

  const SpaceFacts& facts_;
  BlockPool& pool_;
  std::vector<SlabRow> slabs_;
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
