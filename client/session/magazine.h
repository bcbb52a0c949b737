// Leased blocks kept in the engine's process, last in first out, so that Lease and Release are local.
//
// What the magazine knows of a block, by its ref:
//
//   stocked   leased to the session, unused           -> lent (Take) | gone (TakeSurplus)
//   lent      leased to the session, with the engine  -> stocked (Put) | gone (Share, Put behind a fence)
//   gone      anything else: the daemon alone knows
//
// Only a lent block may come back here. A block that was sealed, referenced once more or put behind a fence
// is the daemon's to free; one that is stocked, or that was lent under another generation, is given back by
// mistake and refused, for it would be handed out twice.
//
// Two threads use it: the engine's (Take, Put, Share) and the stream's (Refill, Wanted, TakeSurplus).
#ifndef KVPOOL_CLIENT_SESSION_MAGAZINE_H_
#define KVPOOL_CLIENT_SESSION_MAGAZINE_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "client/session/spin_lock.h"
#include "proto/support/block_ref.h"

namespace kvpool {

class Magazine {
 public:
  // `max_blocks`: most the space can have. `target`: blocks to keep; see SessionOptions::magazine_blocks.
  Magazine(uint32_t max_blocks, uint32_t target);

  // ---- Engine thread
  struct Taken {
    bool ok = false;
    bool ask = false;    // The stock fell below the low mark: wake the stream's thread.
    uint32_t stock = 0;  // Blocks left.
  };
  // Fills `out` or takes nothing; then `out.size()` is what the next refill aims at.
  Taken Take(absl::Span<BlockRef> out);

  struct PutOutcome {
    uint32_t refused = 0;
    bool surplus = false;  // The stock is above the high mark: wake the stream's thread.
  };
  // Keeps the refs that were lent, if `fenced` is false. Appends to `rest` those that the daemon
  // must be told of.
  PutOutcome Put(absl::Span<const BlockRef> refs, bool fenced, std::vector<BlockRef>* rest);
  // Aims the next refill at `count` blocks or more. The caller wakes the stream's thread.
  void Ask(uint32_t count);
  // The blocks are no longer the engine's alone.
  void Share(absl::Span<const BlockRef> refs);
  uint32_t stock() const;

  // ---- Stream thread
  // Blocks to ask the daemon for, if the engine asked; 0: none, or they are on their way. After a revocation the next
  // Take asks again. `scarce`: there is pressure, so only a few are kept.
  uint32_t Wanted(bool scarce);
  // Whether Wanted or TakeSurplus have something to do.
  bool NeedsCare() const;
  // The answer to what Wanted asked for, possibly empty. Refs beyond max_blocks are dropped.
  void Refill(absl::Span<const BlockRef> refs);
  // The daemon wants `count` unused blocks back.
  void Revoke(uint64_t count);
  // Appends to `out` the blocks that go back.
  void TakeSurplus(std::vector<BlockRef>* out);

 private:
  // What entries_ holds of a block: its generation << 2 | State, so that one comparison tells both.
  enum State : uint64_t { kGone = 0, kStocked = 1, kLent = 2 };
  struct Free {
    void operator()(uint64_t* entries) const { std::free(entries); }
  };
  // More blocks than this are a surplus.
  size_t high() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
    return std::max<size_t>(size_t{2} * target_, demand_);
  }
  static uint64_t Entry(BlockRef ref, State state) { return uint64_t{ref.generation} << 2 | state; }

  const uint32_t max_blocks_;
  const uint32_t target_;
  mutable SpinLock lock_;
  std::vector<BlockRef> stock_ ABSL_GUARDED_BY(lock_);
  // Indexed by block id. Pages without a block of this session stay untouched. Guarded by lock_; the
  // annotation does not work on a unique_ptr to an array.
  const std::unique_ptr<uint64_t[], Free> entries_;
  uint32_t demand_ ABSL_GUARDED_BY(lock_) = 0;   // Largest Take that came up short and may come again.
  uint32_t forget_ ABSL_GUARDED_BY(lock_) = 0;   // Takes until demand_ is given up.
  uint64_t revoked_ ABSL_GUARDED_BY(lock_) = 0;  // Blocks the daemon wants back.
  // Blocks that a refill aims at: few at first, twice as many each time, up to target_. A session that leases
  // little must not have cached blocks of others evicted for a stock that it never uses.
  uint32_t keep_ ABSL_GUARDED_BY(lock_);
  uint32_t low_ ABSL_GUARDED_BY(lock_);       // A refill is due when the stock is smaller.
  bool asked_ ABSL_GUARDED_BY(lock_) = true;  // The stream's thread was woken, or a refill is under way.
  bool refilling_ ABSL_GUARDED_BY(lock_) = false;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_MAGAZINE_H_
