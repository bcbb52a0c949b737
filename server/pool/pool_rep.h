// What BlockPool is made of. For server/pool/*.cc only.
#ifndef KVPOOL_SERVER_POOL_POOL_REP_H_
#define KVPOOL_SERVER_POOL_POOL_REP_H_

#include <array>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "server/base/virtual_array.h"
#include "server/pool/block_record.h"
#include "server/pool/ghost_table.h"
#include "server/pool/hold_table.h"
#include "server/pool/pool_types.h"
#include "server/pool/prefix_index.h"
#include "server/replacement/policy.h"
#include "server/replacement/thinking_policy.h"

namespace kvpool {

// The steps that verbs are composed of. Each keeps the counts, charges and the policy in line with the
// states; none checks credit: that is done before the first step is taken.
class PoolRep final {
 public:
  PoolRep(const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy);

  enum class Phase : uint8_t { kUnused, kOpen, kEnded, kGone };  // kGone: nothing left but charges.
  struct Session {
    Phase phase = Phase::kUnused;
    SessionLimits limits;
    uint32_t charged = 0;
    uint32_t leased = 0;
    uint32_t held = 0;        // Distinct blocks.
    bool many_holds = false;  // Some block was held more than kManyHolds times.
    HoldTable holds;
  };
  static constexpr uint32_t kManyHolds = kMaxHolds / 2;

  struct Protection {
    TimeMs pin_until = 0;
    // Of a priority that is not the default: when it ends, when it changes next, and how long it takes to come
    // half the way to the default; 0: it doesn't before its end.
    TimeMs retain_until = 0;
    TimeMs retention_due = 0;
    TimeMs half_life_ms = 0;
    uint32_t pinned_children = 0;
    uint8_t priority = kDefaultPriority;
  };
  enum class Deadline : uint8_t { kPin, kRetention };

  // ---- Looking
  BlockRef RefOf(uint32_t b) const { return {BlockId{b}, records[b].generation}; }
  Session* OpenSession(Holder session) {
    const auto i = static_cast<size_t>(session);
    return i < sessions.size() && sessions[i].phase == Phase::kOpen ? &sessions[i] : nullptr;
  }
  // kDone if the ref names a life that is not over.
  Verdict Resolve(BlockRef ref);
  uint32_t Find(const BlockKey& key) const { return index.Find(HashKey(key), key); }
  uint32_t count(BlockState state) const { return counts[static_cast<size_t>(state)]; }
  uint32_t available() const { return count(BlockState::kFree) + count(BlockState::kCached) - spent_cached; }
  static uint32_t Unused(const Session& s) {
    return s.phase == Phase::kOpen && s.limits.guaranteed > s.charged ? s.limits.guaranteed - s.charged : 0;
  }
  // Available blocks that the session may take: what it was promised, and what nobody was.
  uint32_t Headroom(const Session& s) const { return available() - promised + Unused(s); }
  // Distinct blocks more that the session may hold.
  static uint32_t CapRoom(const Session& s) {
    return s.limits.max_blocks == 0 ? UINT32_MAX : s.limits.max_blocks - s.held;
  }
  // Available blocks that a ref on `b` takes: itself and the chain in front of it, as far as it is cached.
  uint32_t CreditNeed(uint32_t b) const;
  // As it was set, if it was; what is forsaken is of the least.
  uint8_t priority(uint32_t b) const {
    const BlockRecord& r = records[b];
    if (!r.has(BlockRecord::kProtected | BlockRecord::kForsaken)) return kDefaultPriority;
    const uint8_t set =
        r.has(BlockRecord::kProtected) ? protections.find(b)->second.priority : kDefaultPriority;
    return set == kDefaultPriority && r.has(BlockRecord::kForsaken) ? 0 : set;
  }
  uint32_t pin_budget() const { return static_cast<uint32_t>(options.pin_budget * capacity); }

  // ---- Steps
  void SeeTime(TimeMs now) { now_ms = now; }
  void SetState(uint32_t b, BlockState state) {
    --counts[static_cast<size_t>(records[b].state())];
    ++counts[static_cast<size_t>(state)];
    records[b].set_state(state);
  }
  void Charge(uint32_t b, Holder to);
  void EndCharge(uint32_t b);
  void AddHold(Session* s, uint32_t b);
  void DropHold(Session* s, uint32_t b);
  // One ref more on a resident block; what this takes out of the cache is charged to `taker`.
  void AddRef(uint32_t b, Holder taker);
  // Fewer refs on a sealed block; what nobody refers to any more is cached, leaf before parent.
  void DropRefs(uint32_t b, uint32_t refs);
  // Before a ref of a sealed block is dropped.
  void Hint(uint32_t b, const UseHint& hint);
  // The guards of all policies: a block is on offer if and only if it is cached and childless; by the policy if
  // its priority is the default one, else by `retained`. What decides that changes only while it is not.
  void Offer(uint32_t b);
  void Withdraw(uint32_t b);
  // The next to leave, or 0: cheap ones, the policy's choice, dear ones.
  uint32_t NextVictim();
  // A leased, quarantined or cached block, out of the index, becomes free, or retired.
  void Free(uint32_t b);
  uint32_t PopFree();
  // Asks for what evicting `b` will read, and for the record of the block in front of it.
  void PrefetchEviction(uint32_t b) const;
  // The memory of up to so many that the policy is likely to name next; answers how many.
  size_t PrefetchVictims(size_t most) const;
  // REQUIRES: cached and childless.
  void Evict(uint32_t b, EvictReason reason, std::vector<Eviction>* log);
  // Evicts one by one until so many blocks are free or nothing may leave; answers how many were freed.
  uint32_t EvictUntilFree(uint32_t free, EvictReason reason, std::vector<Eviction>* log);
  void ReuseIfIdle(size_t slot);
  // Used, and by nobody new. REQUIRES: resident.
  void TouchOne(uint32_t b);
  // Seal (seal.cc): holds the block that the key names already; seals one block.
  SealOutcome HoldCanonical(Holder session, uint32_t b);
  SealOutcome SealOne(Holder session, const SealEntry& entry, uint64_t hash, uint32_t parent);

  // ---- Protection (retention.cc)
  static bool Budgeted(const BlockRecord& r, const Protection& p) {
    return r.has(BlockRecord::kPinned) || p.priority > kDefaultPriority;
  }
  Verdict PinChain(uint32_t b, TimeMs until);
  void StartPin(uint32_t b, TimeMs until);
  // REQUIRES: pinned, and no child is.
  void EndPin(uint32_t b);
  // REQUIRES: resident.
  void SetPriority(uint32_t b, const Retention& retention, TimeMs since);
  void DropProtectionIfIdle(uint32_t b);

  class Matching;  // match.cc

  // ---- hand_over.cc
  std::vector<uint32_t> ResidentByStanding() const;
  void Introduce(const std::vector<uint32_t>& in_order, TimeMs at, ReplacementPolicy* successor) const;

  // ---- check_invariants.cc
  void CheckStates() const;
  void CheckRefs() const;
  void CheckCharges() const;
  void CheckProtections() const;

  // ---- The blocks
  const PoolOptions options;
  uint32_t capacity = 0;
  uint32_t next_new = 1;  // First block that was never leased.
  VirtualArray<BlockRecord> records;
  PrefixIndex index;
  GhostTable ghosts;
  std::unique_ptr<ReplacementPolicy> policy;
  std::array<uint32_t, kBlockStates> counts{};
  uint32_t spent_cached = 0;

  // Freed blocks: a stack through the records' `parent`. Each also knows the block kFreeJump below it, so
  // that popping many finds them in the CPU's cache; the jumps of the topmost blocks are in a ring, by depth.
  static constexpr uint32_t kFreeJump = 16;
  uint32_t free_top = 0;
  uint32_t free_depth = 0;
  std::array<uint32_t, kFreeJump> free_ring{};

  // ---- The sessions
  HoldPageStock hold_pages;
  std::vector<Session> sessions;
  std::vector<uint16_t> unused_slots;
  uint32_t promised = 0;
  std::vector<uint32_t> spent_blocks;  // Leased in their last generation: a few, ever.

  // ---- Protection
  absl::flat_hash_map<uint32_t, Protection> protections;
  absl::btree_set<std::tuple<TimeMs, uint32_t, Deadline>> deadlines;
  uint32_t protected_blocks = 0;  // Budgeted ones.
  // On offer, of another priority than the default: by priority, then last use.
  using Retained = std::tuple<uint8_t, uint32_t, uint32_t>;  // Priority, accessed_ms, block.
  Retained RetainedKey(uint32_t b) const { return {priority(b), records[b].accessed_ms, b}; }
  absl::btree_set<Retained> retained;

  // ---- Decisions: the next victims, in order from `next_decided` on.
  struct Decided {
    BlockRef block;
    uint64_t last_use = 0;  // As it was shown.
  };
  std::vector<Decided> decided;
  size_t next_decided = 0;
  bool AsShown(const ThinkingPolicy& thinking, const Decided& d) const;
  // Takes the first that is as it was shown; 0: there is none.
  uint32_t PopDecided(const ThinkingPolicy& thinking);

  TimeMs now_ms = 0;
  PoolCounters counters;
  std::vector<Eviction> direct_evictions;

  // Memory that verbs would otherwise allocate at each call.
  std::vector<BlockKey> scratch_aliases;
  std::vector<std::vector<uint32_t>> scratch_match;
  std::vector<uint64_t> scratch_steps;  // Blocks of a query per step.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_POOL_REP_H_
