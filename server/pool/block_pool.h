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

namespace kvpool {

struct Candidates;
class Judge;
class ReplacementPolicy;
struct Ranking;
struct UseHint;

enum class BlockState : uint8_t { kFree, kLeased, kSealed, kCached, kQuarantined };
inline constexpr int kBlockStates = 5;

// Index of a session in the pool; reused once FreeQuarantine was called and no block is charged to it.
enum class Holder : uint16_t {};
inline constexpr Holder kNobody{0xffff};

// Milliseconds on the caller's clock; only differences are used. Ages are kept in 32 bits: beyond 49 days
// they alias. Verbs without a time happen at the latest that was given.
using TimeMs = uint64_t;

// A key in the form the index holds: 32 bytes as they came, or the SHA-256 of keys of other lengths, which
// `raw` tells apart. Groups have separate key spaces.
struct BlockKey {
  std::array<uint8_t, 32> bytes;
  uint8_t group = 0;
  bool raw = true;

  // REQUIRES: key.size() in [1, 64], group < 16.
  static BlockKey From(std::string_view key, uint32_t group);
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
};

enum class Shortfall : uint8_t { kNone, kPressure, kCredit, kCap };
enum class MissReason : uint8_t { kNone, kNeverSeen, kEvicted, kCredit, kCap, kWindow };
enum class EvictReason : uint8_t { kBackground, kDirect, kOperator };
inline constexpr int kEvictReasons = 3;

using EvictedBlocks = std::array<uint64_t, kEvictReasons>;

// What a verb answers for one block.
enum class Verdict : uint8_t {
  kDone,
  kDuplicate,     // Seal: the key exists; the canonical block is held instead, unless duplicates are left.
  kUnknownBlock,  // Id outside the capacity, or the null block.
  kStale,         // The generation moved, or the block is free.
  kNotHeld,       // The session has no hold on it.
  kWrongState,  // Seal of a block that is not leased, Pin of one that is not resident. Seal without a key, or
                // with keys of several groups or of one that the pool lacks.
  kTooManyHolds,  // 65535 holds by one session.
  kOverPinBudget,
  kOverCredit,  // Pin of a cached block that is promised to sessions, or Seal of a key whose block is.
  kOverCap,     // Seal: the key exists, and one block more held is beyond SessionLimits::max_blocks.
};

struct SessionLimits {
  uint32_t guaranteed = 0;  // Blocks.
  uint32_t max_blocks = 0;  // Distinct blocks held at once; 0: no cap.
};

struct PoolOptions {
  uint32_t max_blocks = 0;  // Most the pool can grow to, the null block included. At least 1.
  // Per layer group: window in blocks, 0 for full attention. Its size is the number of groups, 1 to 16.
  std::vector<uint32_t> windows;
  double pin_budget = 0.25;  // Of the capacity: blocks pinned or retained above the default priority.
  uint32_t ghosts = 0;       // Evicted keys remembered; 0: a quarter of max_blocks, at most 4 Mi.
  // The first lease of a block makes the next generation. A pool that takes over memory whose old refs may
  // still be around begins behind theirs.
  uint32_t first_generation = 0;
};

// How dear blocks are, in place of the default priority.
struct Retention {
  uint8_t priority = 50;    // 0 to 100.
  TimeMs until = 0;         // Then it is the default again.
  TimeMs half_life_ms = 0;  // Each time it comes half the way to the default, in whole numbers; 0: it stays.
};

struct SealEntry {
  BlockRef block;
  absl::Span<const BlockKey> keys;  // At least one, of one group; the last is the chain's.
  bool leave_duplicate = false;     // The block that the key names already is touched, and not held.
};

struct SealOutcome {
  Verdict verdict = Verdict::kDone;
  BlockRef canonical;  // kNullRef unless kDone, or kDuplicate and held.
};

struct GroupQuery {
  uint32_t group = 0;
  absl::Span<const BlockKey> keys;
  uint32_t tokens_per_block = 1;
};

struct MatchOutcome {
  uint64_t tokens = 0;
  // Parallel to the queries: blocks in sequence order; kNullRef before a window.
  std::vector<std::vector<BlockRef>> blocks;
  MissReason miss = MissReason::kNone;
};

struct LeaseOutcome {
  uint32_t leased = 0;
  Shortfall shortfall = Shortfall::kNone;
};

struct BlockView {
  BlockRef ref;
  BlockState state;
  BlockKey key;
  uint32_t refs;
  BlockId parent;
  uint32_t children;
  bool pinned;
  uint8_t priority;
  Holder owner;
  uint32_t age_ms;   // Since it was sealed.
  uint32_t idle_ms;  // Since it was last used.
};

// A reclaimed block, as histograms and logs want it.
struct Eviction {
  BlockId block;
  BlockKey key;
  uint32_t lifetime_ms;
  uint32_t idle_ms;
};

// Counters since the pool was made; only grow.
struct PoolCounters {
  uint64_t leased = 0, sealed = 0, deduplicated = 0, released = 0, refused_stale = 0;
  uint64_t lookups = 0, lookup_blocks = 0, hit_blocks = 0, lookup_tokens = 0, hit_tokens = 0;
  uint64_t decided_victims = 0;    // Of a policy that thinks: chosen by a decision …
  uint64_t undecided_victims = 0;  // … and by LRU, as there was none.
  uint64_t regret = 0;             // Looked up after they were evicted, while remembered.
  EvictedBlocks evicted{};
};

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
  class Rep;
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_BLOCK_POOL_H_
