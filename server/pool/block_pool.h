// The block table of one space: who may touch which block, and under which key it is found.
//
// A block is in exactly one state, and the states sum to the capacity, always:
//
//   free         nobody may touch it                       -> leased (Lease)
//   leased       one session writes                        -> sealed (Seal) | free (last Release)
//                                                             | quarantined (EndSession)
//   sealed       refs > 0; its sharers read                -> cached (last Release)
//   cached       refs = 0; content valid; evictable        -> sealed (Match) | free (Reclaim)
//   quarantined  its session ended, its processes may run  -> free (FreeQuarantine)
//
// Only a cached block without resident children may be a victim. Block 0 is the null block and is no part of
// the capacity.
//
// Generation. It moves when a block is leased. A ref answered by Lease names that life of the block: the same
// ref is good while the block is leased, sealed, cached and matched by others, until the block is freed; then
// it is stale. A block in the last of its 2^32 lives is *spent*: when that ends it is retired, quarantined
// for ever. So that no promise is broken by this, a spent block is never counted as available and stays
// charged until its session ends.
//
// refs of a sealed block = holds of all sessions + sealed children + 1 if pinned. A session holds a block any
// number of times: a lease or a match is one hold, Ref adds one, Release takes one; a session that ended
// keeps its holds until FreeQuarantine, since its processes may still read. A sealed child holds its parent,
// and so on up the chain (full attention groups): whatever is behind a cached block is cached too, so every
// cached block can be had, leaf by leaf. A pinned block's parent is pinned too, at least as long. Blocks of
// windowed groups have no parents.
//
// Credit. Each leased or sealed block is charged to at most one session: the one that took it from the
// available (free or cached) ones. The charge ends when the block is available again, not when that session
// lets go: memory that others still hold has not come back. So this holds always, and a session's guarantee
// is always there to be leased:
//
//   available = free + cached - spent cached  >=  promised = sum over open sessions of max(0, guaranteed -
//   charged)
//
// Lease, Match, Pin and Seal (the hold on a canonical block, the link to a parent) stop short of breaking it.
//
// BlockPool is a deterministic state machine: no clock, thread, I/O or GPU inside; time and victims come in
// as arguments; same calls, same answers. Not thread-safe: the space's mutex is around it. A verb of a
// session that has ended, or never was, does nothing: kNotHeld, kCap.
//
// Bookkeeping per block, at a capacity that is a power of two: record 64 bytes, index 4, LRU 16, ghosts 4
// (index and ghosts up to twice that at other capacities); a session adds 2 per block in the 1024-block pages
// that it holds blocks in.
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

namespace kvpool {

struct Candidates;
class Judge;
class ReplacementPolicy;
struct Ranking;
struct UseHint;

class PoolRep;

class BlockPool {
 public:
  // The policy sees every event and chooses victims; owned.
  BlockPool(const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Adds free blocks behind the last one. RESOURCE_EXHAUSTED beyond max_blocks.
  absl::Status Grow(uint32_t blocks);

  // RESOURCE_EXHAUSTED when the guarantee is more than is unpromised (with the numbers), or at 65,534
  // sessions. INVALID_ARGUMENT: guaranteed above max_blocks.
  absl::StatusOr<Holder> AddSession(const SessionLimits& limits);
  // The session ends: its leases become quarantined; what it shares stays held. Its guarantee ends.
  void EndSession(Holder session);
  // No process of the session is left: quarantined blocks become free, its holds on sealed ones end.
  // REQUIRES: EndSession was called. Answers how many holds came back.
  uint64_t FreeQuarantine(Holder session);

  // Appends up to `count` refs of free blocks, now leased, or none if fewer than `min` are to be had.
  // Reclaims (reason kDirect) when free blocks run short.
  LeaseOutcome Lease(Holder session, TimeMs now, uint32_t count, uint32_t min, std::vector<BlockRef>* out);

  // Seals blocks that are consecutive in one sequence. `parent`: key of the block in front of the first, or
  // null. outcomes is parallel to entries.
  //
  // Entries are applied in order. The chain's key decides: if it names a block already (sealed long ago, or
  // by an entry before), that one is canonical and held once more, or touched if the entry leaves it. Other
  // keys that name a block already keep naming it; the rest name this one. The parent of a block is the one
  // that the chain's key of the entry in front then names; there is no link if that is not resident, is of
  // another group, or cached and promised to sessions.
  void Seal(Holder session, TimeMs now, const BlockKey* parent, absl::Span<const SealEntry> entries,
            absl::Span<SealOutcome> outcomes);

  // Longest prefix resident in every group asked, of a length that is a whole number of blocks in each; takes
  // a hold on each block answered. A prefix that credit or the cap do not cover is answered shorter. Nothing
  // is answered to a query of a group that the pool lacks, or with tokens_per_block 0.
  void Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out);

  // One hold fewer on each. Given root first; touched tail first, so that LRU takes leaves before parents.
  // `hint` is passed on to the policy. Reuse::kNever binds: what this caches of the blocks named leaves before
  // all others whatever the policy, until it is found again; a priority of its own goes before. So a pruned
  // beam's private blocks go first, and those that a surviving beam holds are not touched.
  void Release(Holder session, TimeMs now, const UseHint& hint, absl::Span<const BlockRef> blocks,
               absl::Span<Verdict> verdicts);
  void Release(Holder session, TimeMs now, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts);
  void Ref(Holder session, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts);
  // kDone: the session holds it, and it is leased or sealed in `group`; without a group, it is leased. kWrongState:
  // it is sealed, in another group.
  void CheckHeld(Holder session, std::optional<uint32_t> group, absl::Span<const BlockRef> blocks,
                 absl::Span<Verdict> verdicts);
  // Answers how many were resident and current.
  uint32_t Touch(TimeMs now, absl::Span<const BlockRef> blocks);
  // Tells the policy where a scorer put each block among them all: 0 the least, 1 the most valuable. Answers how
  // many were resident and current.
  uint32_t SetScores(TimeMs now, absl::Span<const BlockRef> blocks, absl::Span<const float> scores);
  // Pins each block and the chain in front of it.
  void Pin(TimeMs now, TimeMs until, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts);
  // Skips blocks that a pinned child keeps pinned. Tail first.
  uint32_t Unpin(absl::Span<const BlockRef> blocks);
  void SetRetention(TimeMs now, const Retention& retention, absl::Span<const BlockRef> blocks,
                    absl::Span<Verdict> verdicts);
  // Ends pins and retentions whose time is over.
  void Expire(TimeMs now);

  // Frees up to `count` of what the policy would have leave; answers how many. `log`, if given, gets each
  // block that left, the spent ones among them, which are not freed.
  uint32_t Reclaim(TimeMs now, uint32_t count, EvictReason reason, std::vector<Eviction>* log);
  // Frees these, if they are still what they were when they were judged; skips refs whose generation moved,
  // and blocks that may not leave. Parents in the list leave after their children whatever the order.
  uint32_t Reclaim(TimeMs now, absl::Span<const BlockRef> victims, EvictReason reason,
                   std::vector<Eviction>* log);

  // From now on this policy sees every event and chooses victims. It takes over what is resident and what is on
  // offer, in the order in which the old one would have had it leave. Answers the old one, to be destroyed where
  // nobody waits. O(n log n) in the resident blocks: where others wait, a HandOver does it step by step.
  std::unique_ptr<ReplacementPolicy> SetPolicy(TimeMs now, std::unique_ptr<ReplacementPolicy> policy);
  class HandOver;  // server/pool/hand_over.h

  // ---- A policy that thinks (server/replacement/thinking_policy.h); server/pool/decision.h calls these
  // Null: it does not. What is answered needs no lock, and lives on when the policy is replaced.
  std::shared_ptr<const Judge> judge() const;
  // What the next decision is about. False: nothing is on offer.
  bool ShowCandidates(TimeMs now, Candidates* out);
  // Takes a decision: the first of its order, as many as may leave, are the next victims if they are still as they were
  // shown when their turn comes. REQUIRES: judge().
  void Decide(const Candidates& candidates, const Ranking& ranking);
  // Victims that were decided on and whose turn has not come. Without any, the next are Victim()'s.
  uint32_t decided() const;

  // ---- Views
  uint32_t capacity() const;  // Blocks, the null block not included: the sum of the states.
  std::array<uint32_t, kBlockStates> counts() const;
  uint32_t available() const;  // As in the invariant above; so is promised.
  uint32_t promised() const;
  uint32_t pinned() const;
  uint32_t pin_budget() const;
  const PoolCounters& counters() const;
  // Direct evictions since the last call, for histograms. Bounded: at most 4096 are kept.
  std::vector<Eviction> TakeDirectEvictions();
  // NOT_FOUND outside the capacity.
  absl::StatusOr<BlockView> View(BlockId block, TimeMs now) const;
  // The resident block of a key, or kNullRef.
  BlockRef Find(const BlockKey& key) const;
  // Resident children of a block: O(capacity); for people.
  std::vector<BlockId> Children(BlockId block) const;
  // When a remembered key was evicted: milliseconds ago; NOT_FOUND if it is not remembered.
  absl::StatusOr<uint32_t> EvictedAgo(const BlockKey& key, TimeMs now) const;
  struct Holdings {
    uint32_t leased = 0, referenced = 0, charged = 0;
    SessionLimits limits;
  };
  Holdings holdings(Holder session) const;
  uint32_t holds(Holder session, BlockId block) const;
  uint64_t holds(Holder session) const;  // On all blocks: what FreeQuarantine would give back.
  // Most that Lease would find for an open session: as far as credit goes, and its cap. Others: 0.
  uint32_t credit_room(Holder session) const;
  uint32_t cap_room(Holder session) const;
  // Unused guarantee of a session: what it can lease whatever others do.
  uint32_t guaranteed_free(Holder session) const;
  const ReplacementPolicy& policy() const;
  // Bytes of tables once every block up to max_blocks is in use, sessions' holds not included.
  uint64_t bookkeeping_bytes() const;
  // Walks everything and aborts on the first broken invariant. O(capacity): for tests and for the operator.
  void CheckInvariants() const;

 private:
  using Rep = PoolRep;
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_BLOCK_POOL_H_
