// The block table of one space: who may touch which block, and under which key it is found.
//
// A block that is there is in exactly one state, and the states sum to the capacity, always:
//
//   free         nobody may touch it                       -> leased (Lease)
//   leased       one session writes                        -> sealed (Seal) | free (last Release)
//                                                             | quarantined (EndSession)
//   sealed       refs > 0; its sharers read                -> cached (last Release)
//   cached       refs = 0; content valid; evictable        -> sealed (Match) | free (Reclaim)
//   quarantined  its session ended, its processes may run  -> free (FreeQuarantine)
//   withheld     to be given back with others              -> absent (Shrink) | free (PutBack)
//
//   absent       its memory is not there; no part of the capacity   -> free (Enter)
//
// Any range of blocks may leave and come back, so ids of blocks that are there may lie beyond the capacity, and in front of absent
// ones. An absent block's record stays: its generation goes on where it was when the block comes back, and a ref to the block
// as it was before stays stale for ever.
//
// A session may hold any part of the pool, and one hold any length of chain. So that no call takes long, ends
// of sessions and of chains are put off beyond some thousand blocks, and done slice by slice in Tidy: such a
// block is leased, quarantined or sealed for a while longer than the table says.
//
// Only a cached block without resident children may be a victim. Block 0 is the null block and is no part of
// the capacity.
//
// Generation. It moves when a block is leased. A ref answered by Lease names that life of the block: the same
// ref is good while the block is leased, sealed, cached and matched by others, until the block is freed; then
// it is stale. A block whose generation is 2^32 - 1 is in its last generation: when that life ends the block
// is retired, quarantined for ever. So that retiring it breaks no promise, such a block is never counted as
// available and stays charged until its session ends.
//
// refs of a sealed block = holds of all sessions + sealed children + 1 if pinned. A session holds a block any
// number of times: a lease or a match is one hold, Ref adds one, Release takes one; a session that ended
// keeps its holds until FreeQuarantine, since its processes may still read. A sealed child holds its parent,
// and so on up the chain (full attention groups): whatever is behind a cached block is cached too, so every
// cached block can be reclaimed, leaf by leaf. A pinned block's parent is pinned too, at least as long.
// Blocks of windowed groups have no parents.
//
// Credit. Each leased or sealed block is charged to at most one session: the one that took it from the
// available (free or cached) ones. The charge ends when the block is available again, not when that session
// lets go: memory that others still hold has not come back. So this holds always, and a session's guarantee
// is always there to be leased:
//
//   available = free + cached - cached ones in their last generation
//   promised  = sum over open sessions of max(0, guaranteed - charged)
//   available >= promised
//
// Lease, Match, Pin and Seal (the hold on a canonical block, the link to a parent) stop short of breaking it.
// A session may enter with a guarantee that rests on blocks to come; of that, `promised` has what Promise
// found so far.
//
// Chains. What a call costs is linear in the blocks and keys that it names: it visits no more than some
// thousand blocks besides, in front of these (PoolRep::kMostSteps). What lies farther is refused (kTooFar),
// not linked, not matched, and may be had by naming blocks nearer to the root first.
//
// BlockPool is a deterministic state machine: no clock, thread, I/O or GPU inside; time and victims come in as arguments; same
// calls, same answers, but for the random key of a condemned block. Not thread-safe: the space's mutex is around it. A verb of a
// session that has ended, or never was, does nothing: kNotHeld, kCap.
//
// Bookkeeping per block that has come, at a capacity that is a power of two: record 64 bytes, index 4, LRU 16, ghosts 4
// (index and ghosts up to twice that at other capacities); a session adds 2 per block in the 1024-block pages
// that it holds blocks in. Blocks that may come take addresses, and no memory.
#ifndef KVPOOL_SERVER_POOL_BLOCK_POOL_H_
#define KVPOOL_SERVER_POOL_BLOCK_POOL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/block_ref.h"
#include "server/pool/pool_types.h"
#include "server/pool/reuse_curve.h"
#include "server/pool/undo_log.h"

namespace kvpool {

class AsyncPolicy;
class ReplacementPolicy;
struct UseHint;

class PoolRep;

class BlockPool {
 public:
  // The policy sees every event and chooses victims; owned.
  BlockPool(const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Takes over what an earlier pool of the same options left in the table (PoolTable), as far as it is of blocks that are there:
  // `there` has their ranges, in order. What sessions held stays held. What was done since the last Commit is undone. Ghosts are lost.
  // So is the policy: until another has taken over the least recently used block leaves (has_stand_in).
  // REQUIRES: there is a table, and nothing else was called before.
  RecoveredPool Recover(TimeMs now, absl::Span<const BlockRange> there);
  // A session that Recover found goes on: it is open, with these limits, and what was leased to it is leased. Its guarantee
  // is unmet as far as it does not have the blocks: Promise finds the rest. False: it can't, and stays ended. REQUIRES:
  // nothing but Recover and this was called before.
  bool Resume(Holder session, const SessionLimits& limits);
  // What was done since the last call is done for good: it may be answered. For a pool in a table, whose turn this ends.
  void Commit();
  // Its turns are counted from 1, by this process and those before it; 0 without a table.
  const UndoLog& undo_log() const;

  // It is about to have so many blocks, with the null block: the memory of what is looked up by hash comes now, where the first
  // verbs would touch one of its pages for each key. Needs no lock.
  void Expect(uint32_t blocks);
  // What is looked up by hash grows for so many, by at most `most` buckets and as many sets of ghosts. False: there is more to do.
  bool Prepare(uint32_t blocks, uint32_t most);
  // So many at once are some 0.1 ms.
  static constexpr uint32_t kPrepareSlice = 1024;
  // Adds free blocks behind the last one, for which it does what Prepare has not done: of thousands of blocks that is a long hold.
  // RESOURCE_EXHAUSTED beyond max_blocks. FAILED_PRECONDITION between Vacate and Shrink.
  absl::Status Grow(uint32_t blocks);
  // The same of these absent blocks. INVALID_ARGUMENT: they are not among 1 to max_blocks - 1. FAILED_PRECONDITION: some are
  // there, or others are to be vacated.
  absl::Status Enter(BlockRange range);

  // ---- Giving back
  // These blocks are to go. They are leased only where no other is free, their content is moved (Move) or evicted, and once free
  // they are withheld. REQUIRES: they are there, and no others are to go.
  void Vacate(BlockRange range);
  // They are to stay after all: those that were withheld are free again. It goes through `most` of them. True: there are more.
  bool PutBack(uint32_t most);
  // Withholds up to `most` blocks of the range that are free; none that is promised to a session.
  void Withhold(uint32_t most);
  // All blocks of the range are withheld, and leave the pool: they are absent. False: not all are.
  bool Shrink();
  // Looks at some `blocks` blocks for the children of those that are to be vacated. True: all were looked at.
  bool NoteChildren(uint32_t blocks);
  // Frees what at most so many blocks' children were noted in, of notes that are of no use any more. True: there are more.
  bool FreeNotes(uint32_t most);
  // Not while nothing is to be vacated, or a HandOver is under way.
  bool can_move() const;
  // `from`, a cached block that is to go, moves to `to`, which `own` has leased and to which its bytes were copied: it is found
  // there from now on, and is cached; `from` is free. To the policy it is a new block that was used now. False, and nothing has
  // changed: `from` is in use or has left, is in its last generation, or has children of which not all are noted or more than
  // `most_children`.
  bool Move(Holder own, TimeMs now, BlockRef from, BlockRef to, uint32_t most_children);

  // RESOURCE_EXHAUSTED when the guarantee is more than is unpromised and `coming` together (with the
  // numbers), or at 65,534 sessions. INVALID_ARGUMENT: guaranteed above max_blocks. All that is unpromised is
  // promised at once, as far as it is needed: nobody else can take it until the rest is there.
  // `id` is the caller's name for it, which Recover answers; a pool in a table needs it to be neither 0 nor that of
  // another session that holds anything.
  absl::StatusOr<Holder> AddSession(const SessionLimits& limits, uint32_t coming = 0, uint64_t id = 0);
  // Promises the session what is unpromised now, up to its guarantee. True: that is promised whole.
  bool Promise(Holder session);
  // Ends the session and its guarantee. Its leases become quarantined; the sealed blocks that it
  // holds stay held.
  void EndSession(Holder session);
  // Call it when no process of the session is left: its quarantined blocks become free, its holds on sealed
  // ones end, from the highest block down. Answers how many holds end. REQUIRES: EndSession was called.
  uint64_t FreeQuarantine(Holder session);
  // Goes on with what these two, and ends of chains, have left to do: about `blocks` blocks of it. False:
  // nothing is left.
  bool Tidy(uint32_t blocks);
  bool untidy() const;
  // So many at once are some 0.1 ms, and 1 ms where they are strewn.
  static constexpr uint32_t kTidySlice = 1024;

  // The next verbs are about these blocks and keys: prefetches what they will read, all together. Only advice.
  void Prefetch(Holder session, absl::Span<const BlockRef> blocks, absl::Span<const BlockKey> keys);

  // Appends refs of up to `count` free blocks, now leased, from the slabs with most in use (lease_order.h); none if the session may take fewer than `min`. It
  // stops at `most`, for a caller that goes on in another hold of its lock.
  // Reclaims (reason kDirect) when free blocks run short, up to 2,048: where that is not enough the shortfall
  // is kReclaiming, and asking again gets further.
  LeaseOutcome Lease(Holder session, TimeMs now, uint32_t count, uint32_t min, std::vector<BlockRef>* out,
                     uint32_t most = UINT32_MAX);

  // Seals blocks that are consecutive in one sequence, entry by entry. `parent` is the key of the block in
  // front of the first, or null. outcomes is parallel to entries.
  //
  //   the chain's key names no block      this block is sealed under it
  //   it names one, !leave_duplicate      that block is canonical and held once more
  //   it names one, leave_duplicate       that block is touched
  //   an alias names a block              it keeps naming that block
  //   an alias names none                 it names this block
  //
  // The parent of a block is the one that the chain's key of the entry in front names by then. There is no
  // link to a parent that is not resident, is of another group, or is cached and promised to sessions. A
  // canonical block from `mapped_end` on is not held: kUnmapped. Nor is one that is doubted: kDoubted.
  void Seal(Holder session, TimeMs now, const BlockKey* parent, absl::Span<const SealEntry> entries,
            absl::Span<SealVerdict> outcomes, uint32_t mapped_end = UINT32_MAX);

  // Answers the longest prefix that is resident in every group asked and is a whole number of blocks in each;
  // takes a hold on each of its blocks. A prefix that credit or the cap do not cover is answered shorter. A
  // query of a group that the pool lacks, or with tokens_per_block 0, is answered by an empty prefix.
  void Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out);
  // A long match may come in parts, so that nobody waits for all of it. Each takes what Match of its queries would, and
  // all of them are one lookup: CountLookup counts it once, and CountMissed the keys behind its end.
  void MatchOn(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out);
  void CountMissed(TimeMs now, absl::Span<const BlockKey> keys);
  void CountLookup(const LookupCounts& counts);

  // Takes one hold off each block. The blocks come root first and are touched tail first, so that LRU
  // takes leaves before parents. The policy is told `hint`. Reuse::kNever binds every policy: of the
  // blocks named, those that this call caches leave before all others until they are found again, unless
  // they have a priority of their own. So a pruned beam's private blocks go first, and those that a
  // surviving beam holds stay.
  void Release(Holder session, TimeMs now, const UseHint& hint, absl::Span<const BlockRef> blocks,
               absl::Span<Verdict> verdicts);
  void Release(Holder session, TimeMs now, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts);
  void Ref(Holder session, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts);
  // The verdict on a block that the session holds: kDone if it is leased, or sealed in `group`; kWrongState
  // if it is sealed in another group, or sealed and no group is given.
  void CheckHeld(Holder session, std::optional<uint32_t> group, absl::Span<const BlockRef> blocks,
                 absl::Span<Verdict> verdicts);
  // Counts as a use of each. Answers how many were resident and current.
  uint32_t Touch(TimeMs now, absl::Span<const BlockRef> blocks);
  // Tells the policy how valuable a scorer found each block among the others: from 0, the least, to 1, the
  // most. Answers how many were resident and current.
  uint32_t SetScores(TimeMs now, absl::Span<const BlockRef> blocks, absl::Span<const float> scores);
  // Pins each block and the chain in front of it. Where `most` is below the pin budget, it is the budget.
  void Pin(TimeMs now, TimeMs until, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts,
           uint32_t most = UINT32_MAX);
  // Skips blocks that a pinned child keeps pinned, so it goes from the last block named to the first. Answers
  // how many were unpinned.
  uint32_t Unpin(absl::Span<const BlockRef> blocks);
  // `most` is as in Pin.
  void SetRetention(TimeMs now, const Retention& retention, absl::Span<const BlockRef> blocks,
                    absl::Span<Verdict> verdicts, uint32_t most = UINT32_MAX);
  // Ends pins and retentions whose time is over, at most `most`. True: there are more.
  bool Expire(TimeMs now, uint32_t most = UINT32_MAX);

  // Evicts victims of the policy's choice until `count` more blocks are free or nothing may leave; answers
  // how many were freed. `log`, if given, gets each block that left, also those retired instead of freed.
  uint32_t Reclaim(TimeMs now, uint32_t count, EvictReason reason, std::vector<Eviction>* log);
  // Evicts these, skipping refs whose generation moved since they were chosen and blocks that may not leave.
  // Parents in the list leave after their children, whatever its order.
  uint32_t Reclaim(TimeMs now, absl::Span<const BlockRef> victims, EvictReason reason,
                   std::vector<Eviction>* log);

  // Appends some `count` cached blocks that are likely to leave soon, the first first, each followed by the chain in front of it; none
  // twice in one call, none that is condemned. Where the policy can't name them, all cached blocks have their turn from call to call.
  struct Departing {
    BlockRef ref;
    BlockKey key;
  };
  void NextToLeave(uint32_t count, std::vector<Departing>* out);

  // From now on this policy sees every event and chooses victims. It takes over what is resident and what is
  // on offer, in the order in which the old one would have evicted it. Answers the old one, for the caller to
  // destroy outside the lock. O(n log n) in the resident blocks; a HandOver does the same in short steps.
  std::unique_ptr<ReplacementPolicy> SetPolicy(TimeMs now, std::unique_ptr<ReplacementPolicy> policy);
  class HandOver;  // server/pool/hand_over.h

  // Nobody has taken over since Recover: SetPolicy or a HandOver is due.
  bool has_stand_in() const;

  // Does the policy decide outside the lock (server/replacement/policies/async_policy.h)?
  bool decides_outside() const;
  // It, if it does, or null.
  AsyncPolicy* async_policy();

  // ---- Sums of content
  // Of a block's content as it was sealed. It outlives the pool in a table that has room for it. Ignored if the ref is not
  // resident any more, or condemned.
  void KeepSum(BlockRef ref, uint32_t sum);
  // Null: there is none, or the ref is not resident.
  std::optional<uint32_t> SumOf(BlockRef ref) const;
  // A doubted block has a sum, is found by no match, and a seal under its key is refused (kDoubted). Recover doubts those that it
  // finds with a sum (PoolOptions::keeps_sums): they are to be compared, and believed or condemned.
  bool IsDoubted(BlockRef ref) const;
  void Believe(BlockRef ref);
  uint32_t doubted() const;
  // Its content is not what was sealed: its key is one that nobody knows from now on, in the table as well, so that another block
  // can be sealed under the one that it had, and it has no sum for anybody here. It is as any other for those who hold it or have
  // blocks behind it. That it may leave only this process knows: the next finds the sum in the table, and doubts it.
  void Condemn(BlockRef ref);
  bool IsCondemned(BlockRef ref) const;
  // Looks at `look` condemned blocks behind block `*at`, round and round, and moves that on; appends those that may leave.
  void NextCondemned(uint32_t* at, uint32_t look, std::vector<BlockRef>* out) const;
  // Looks at `look` blocks behind block `*at`, round and round, and moves that on; appends those that have a sum, `most` at most.
  enum class WithSum : uint8_t { kAll, kDoubted };
  void NextWithSum(WithSum which, uint32_t* at, uint32_t look, size_t most, std::vector<BlockRef>* out) const;

  // ---- Views
  // Blocks without the null block: the sum of the states.
  uint32_t capacity() const;
  // Ids of blocks are below this one. It is the capacity and 1 where none in front of the last block is absent.
  uint32_t end_block() const;
  // What Vacate said, as far as it was not put back; empty: no block is to go.
  BlockRange going() const;
  // The block that would be leased next; UINT32_MAX: none is free.
  uint32_t lowest_free() const;
  std::array<uint32_t, kBlockStates> counts() const;
  // The same of some blocks, which are all there: each is looked at.
  std::array<uint32_t, kBlockStates> CountIn(BlockRange range) const;
  // The two sides of the invariant of credit.
  uint32_t available() const;
  uint32_t promised() const;
  // Blocks under the pin budget, and the budget.
  uint32_t pinned() const;
  uint32_t pin_budget() const;
  // Blocks that the last verb visited, those that it named among them or not: each is as much work as one that it named.
  uint32_t steps() const;
  const PoolCounters& counters() const;
  // The direct evictions since the last call, for histograms; at most 4096 are kept.
  std::vector<Eviction> TakeDirectEvictions();
  // NOT_FOUND: no such block is there.
  absl::StatusOr<BlockView> View(BlockId block, TimeMs now) const;
  // The block has the content that the ref was answered for: nobody has written to it since it was sealed.
  bool IsResident(BlockRef ref) const;
  // The resident block of a key, or kNullRef.
  BlockRef Find(const BlockKey& key) const;
  // How many milliseconds ago a key was evicted; NOT_FOUND if it is resident or its eviction
  // is not remembered.
  absl::StatusOr<uint32_t> EvictedAgo(const BlockKey& key, TimeMs now) const;
  struct Holdings {
    uint32_t leased = 0, referenced = 0, charged = 0;
    SessionLimits limits;
  };
  Holdings holdings(Holder session) const;
  uint32_t holds(Holder session, BlockId block) const;
  // How many blocks of [first, end) the session holds, in a step for each 1,024 of them and some 0.1 us at either end.
  uint32_t held_in(Holder session, uint32_t first, uint32_t end) const;
  // The session's holds on all blocks: what FreeQuarantine would end.
  uint64_t holds(Holder session) const;
  // The most blocks that an open session could lease, by credit and by its cap; 0 for others.
  uint32_t credit_room(Holder session) const;
  uint32_t cap_room(Holder session) const;
  // False: AddSession refuses whatever blocks there are, until blocks that are charged to sessions which are gone are free.
  bool has_session_slot() const;
  // What the session's guarantee is more than it was promised: that is to come.
  uint32_t unmet(Holder session) const;
  // The session's unused guarantee: what it can lease whatever others do.
  uint32_t guaranteed_free(Holder session) const;
  const ReplacementPolicy& policy() const;
  // Hits that each of the last `step` blocks in use brings, and that each of so many more would, where there can be `most`.
  ReuseCurve::Slopes reuse(uint32_t step, uint32_t most, TimeMs now) const;
  // The policy is told of events a little later than they happen (policy_feed.h): at the latest when it is asked
  // something, and here. Is there enough to tell that it is worth a call that no verb waits for?
  void TellPolicy();
  bool policy_waits() const;
  // Bytes of the tables once every block up to max_blocks is in use, without sessions' holds.
  uint64_t bookkeeping_bytes() const;
  // Walks everything and aborts on the first broken invariant. O(capacity): for tests and for operators.
  void CheckInvariants() const;

 private:
  using Rep = PoolRep;
  friend class MatchSearch;
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_BLOCK_POOL_H_
