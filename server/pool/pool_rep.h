// The parts of BlockPool. Only server/pool/*.cc include it.
#ifndef KVPOOL_SERVER_POOL_POOL_REP_H_
#define KVPOOL_SERVER_POOL_POOL_REP_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "server/base/virtual_array.h"
#include "server/pool/block_record.h"
#include "server/pool/free_set.h"
#include "server/pool/hold_table.h"
#include "server/pool/lease_order.h"
#include "server/pool/policy_feed.h"
#include "server/pool/pool_table.h"
#include "server/pool/pool_types.h"
#include "server/pool/prefix_index.h"
#include "server/pool/reuse_curve.h"
#include "server/replacement/parts/past_contents.h"
#include "server/replacement/policy.h"

namespace kvpool {

// What a lookup of several queries has found so far: see match_lookup.h.
struct MatchScratch {
  std::vector<std::vector<uint32_t>> found;
  std::vector<uint64_t> steps;  // A query's blocks per step.
  std::vector<std::pair<uint64_t, uint64_t>> runs;
};

// The steps that verbs are composed of. Each keeps counts, charges and the policy consistent with the states.
// None checks credit: a verb does that before its first step.
class PoolRep final {
 public:
  PoolRep(const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy);

  // A session that is kFreeing gives back what it holds; one that is kGone holds nothing, and blocks are
  // still charged to it.
  enum class Phase : uint8_t { kUnused, kOpen, kEnded, kFreeing, kGone };
  struct Session {
    Phase phase = Phase::kUnused;
    SessionLimits limits;  // Its guarantee as far as it is promised.
    uint32_t unmet = 0;    // The rest of its guarantee.
    uint32_t charged = 0;
    uint32_t leased = 0;      // Blocks that are leased to it, or quarantined since it ended.
    uint32_t held = 0;        // Distinct blocks.
    uint64_t all_holds = 0;   // Each block as often as it is held.
    bool many_holds = false;  // True once a block was held more than kManyHolds times.
    // It is in `ending`, and Tidy has yet to visit the blocks below this one; 0: it is not.
    uint32_t tidied_from = 0;
    HoldTable holds;
  };
  static constexpr uint32_t kManyHolds = kMaxHolds / 2;
  static constexpr uint32_t kBlocksPerGhost = 4;

  struct Protection {
    TimeMs pin_until = 0;
    // A priority other than the default ends at retain_until, changes next at retention_due, and comes half
    // the way to the default in half_life_ms; 0: it stays until its end.
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
  // kDone if the ref's generation is current and the block is not free.
  Verdict Resolve(BlockRef ref);
  uint32_t Find(const BlockKey& key) const { return index.Find(HashKey(key), key); }
  uint32_t count(BlockState state) const { return counts[static_cast<size_t>(state)]; }
  uint32_t available() const {
    return count(BlockState::kFree) + count(BlockState::kCached) - last_generation_cached;
  }
  static uint32_t Unused(const Session& s) {
    return s.phase == Phase::kOpen && s.limits.guaranteed > s.charged ? s.limits.guaranteed - s.charged : 0;
  }
  // Available blocks that the session may take: those promised to it, and those promised to nobody.
  uint32_t Headroom(const Session& s) const { return available() - promised + Unused(s); }
  // How many more distinct blocks the session may hold.
  static uint32_t CapRoom(const Session& s) {
    return s.limits.max_blocks == 0 ? UINT32_MAX : s.limits.max_blocks - s.held;
  }
  // kDone if a ref on `b` takes no more than `room` available blocks: `b` and the chain in front of it, as
  // far as they are cached. A verb calls it with a room that never rises. Else kOverCredit or kTooFar.
  Verdict CheckCredit(uint32_t b, uint32_t room);
  // The priority that was set, else 0 for a block that is never reused, else the default.
  uint8_t priority(uint32_t b) const {
    const BlockRecord& r = records[b];
    if (!r.has(BlockRecord::kProtected | BlockRecord::kNeverReused)) return kDefaultPriority;
    const uint8_t set =
        r.has(BlockRecord::kProtected) ? protections.find(b)->second.priority : kDefaultPriority;
    return set == kDefaultPriority && r.has(BlockRecord::kNeverReused) ? 0 : set;
  }
  uint32_t pin_budget() const { return static_cast<uint32_t>(options.pin_budget * capacity); }

  // ---- Growing
  static uint32_t GhostsFor(uint32_t blocks) {
    return static_cast<uint32_t>(LinearHash::PlacesFor(blocks) / kBlocksPerGhost);
  }
  bool Prepare(uint32_t blocks, uint32_t most) {
    return index.Grow(blocks, most) && ghosts.Reserve(GhostsFor(blocks), most);
  }

  // ---- Steps
  // Every verb that visits chains begins so. It may visit two blocks in front for each that it names, as Pin
  // walks a chain twice, and some thousand more: what it takes is linear in the names, whatever the chains
  // are like.
  void BeginVerb(TimeMs now, size_t names) {
    now_ms = now;
    GiveSteps(kMostSteps + static_cast<uint32_t>(2 * names));
    denied = 0;
  }
  void GiveSteps(uint32_t steps) { steps_given = steps_left = steps; }
  void SetState(uint32_t b, BlockState state) {
    const bool was_in_use = IsInUse(records[b].state());
    CountState(b, state);
    if (was_in_use == IsInUse(state)) return;
    was_in_use ? lease_order.EndUse(b) : lease_order.Use(b);
  }
  // The same for one whose slab is told of it by another step.
  void CountState(uint32_t b, BlockState state) {
    --counts[static_cast<size_t>(records[b].state())];
    ++counts[static_cast<size_t>(state)];
    records[b].set_state(state);
  }
  void Charge(uint32_t b, Holder to);
  void EndCharge(uint32_t b);
  void AddHold(Session* s, uint32_t b);
  void DropHold(Session* s, uint32_t b);
  // Adds a ref to a resident block. The blocks that this takes out of the cache are charged to `taker`.
  void AddRef(uint32_t b, Holder taker);
  // Takes refs off a sealed block. Blocks without refs become cached, leaf before parent. Where the verb has
  // no steps left, the next parent's ref is owed.
  void DropRefs(uint32_t b, uint32_t refs);
  // Goes on with the last of `ending`: at most `blocks` blocks, which it counts down.
  void GoOnEnding(uint32_t* blocks);
  // REQUIRES: a ref of the sealed block is dropped next.
  void Hint(uint32_t b, const UseHint& hint);
  // A block is on offer if and only if it is cached and childless. It is offered to the policy if
  // its priority is the default one, else it is in `retained`. Its priority changes only while it is
  // not on offer.
  void Offer(uint32_t b);
  void Withdraw(uint32_t b);
  // The next block to leave, or 0: those below the default priority, then the policy's choice,
  // then those above.
  uint32_t NextVictim();
  // Makes a block free, or retires it. REQUIRES: leased, quarantined or cached, and not in the index.
  void Free(uint32_t b);
  // Takes up to `most` blocks to be leased, and answers how many, one at least: their slabs know them as leased already.
  // REQUIRES: most > 0, and one is free that was not taken.
  uint32_t PopFree(uint32_t most, uint32_t* out);
  // Those that are free and not to be vacated.
  uint32_t free_to_keep() const { return count(BlockState::kFree) - free_to_go; }
  bool vacating() const { return going.first < going.end; }
  // The block that is leased next is the lowest of these: of what is to be kept, in one slab (lease_order.h), or of what is to be
  // vacated, where nothing else is free. REQUIRES: one is free.
  BlockRange NextFree() const {
    const BlockRange slab = lease_order.next();
    if (slab.size() == 0) return going;
    if (going.first >= slab.end || going.end <= slab.first) return slab;
    const BlockRange front = {slab.first, std::max(slab.first, going.first)};
    if (free.LowestFrom(front.first, front.end) < front.end) return front;
    return {going.end, slab.end};
  }
  // Its id may be that of a block, and none is there.
  bool absent(uint32_t b) const {
    if (b > extent) return true;
    const auto after = holes.upper_bound(b);
    return after != holes.begin() && b < std::prev(after)->second;
  }
  // kFree or kWithheld for a record that says kFree. REQUIRES: the block is there.
  BlockState StateOf(uint32_t b) const {
    const BlockState state = records[b].state();
    return state == BlockState::kFree && !free.contains(b) ? BlockState::kWithheld : state;
  }
  // Prefetches what evicting `b` will read, and the record of the block in front of it.
  void PrefetchEviction(uint32_t b) const;
  // Prefetches up to `most` blocks that the policy is likely to name next; answers how many.
  size_t PrefetchVictims(size_t most) const;
  // REQUIRES: cached and childless.
  void Evict(uint32_t b, EvictReason reason, std::vector<Eviction>* log);
  // Evicts until `free` blocks are free or nothing may leave; answers how many were freed.
  uint32_t EvictUntilFree(uint32_t free, EvictReason reason, std::vector<Eviction>* log);
  void ReuseIfIdle(size_t slot);
  // A use without a new holder. REQUIRES: resident.
  void TouchOne(uint32_t b);
  // Steps of Seal (seal.cc).
  SealVerdict HoldCanonical(Holder session, uint32_t b, uint32_t mapped_end);
  // Those of a block's keys that name none, each once, into scratch_aliases.
  void TakeNewAliases(absl::Span<const BlockKey> keys);
  // For the next process. The block is not to be found by them yet: neither here nor, before its state says that it is resident,
  // there. REQUIRES: the word with its flags is saved, and the record has its key.
  void KeepAliases(uint32_t b, absl::Span<const BlockKey> aliases);
  SealVerdict SealOne(Holder session, const SealEntry& entry, uint64_t hash, uint32_t parent,
                      uint32_t mapped_end);

  // ---- Protection (retention.cc)
  static bool Budgeted(const BlockRecord& r, const Protection& p) {
    return r.has(BlockRecord::kPinned) || p.priority > kDefaultPriority;
  }
  Verdict PinChain(uint32_t b, TimeMs until, uint32_t budget);
  void StartPin(uint32_t b, TimeMs until);
  // REQUIRES: the block is pinned and none of its children is.
  void EndPin(uint32_t b);
  // REQUIRES: resident.
  void SetPriority(uint32_t b, const Retention& retention, TimeMs since);
  void DropProtectionIfIdle(uint32_t b);
  // Tells the table. REQUIRES: the block has a Protection.
  void KeepProtection(uint32_t b);

  class Matching;  // match.cc
  void Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out);

  // ---- vacate.cc
  std::vector<uint32_t>* ChildrenOf(uint32_t b);

  // ---- recover.cc
  RecoveredPool Recover(TimeMs now, absl::Span<const BlockRange> there);
  // Makes these the blocks that are there.
  void SetThere(absl::Span<const BlockRange> there);
  bool Resume(Holder session, const SessionLimits& limits);
  struct Remains;
  // Answers the highest block that is held.
  // Blocks that the turn that was torn had sealed, others that it had changed among them. REQUIRES: it is not undone yet.
  std::vector<uint32_t> SealedInTornTurn() const;
  uint32_t RecoverHolds(RecoveredPool* found);
  void RecoverIndex(RecoveredPool* found, VirtualArray<Remains>* remains);
  void RecoverAliases(uint32_t b, RecoveredPool* found);
  void RecoverChains(RecoveredPool* found, VirtualArray<Remains>* remains);
  void RecoverStates(absl::Span<const BlockRange> there, RecoveredPool* found,
                     VirtualArray<Remains>* remains);
  // What the table says of the block's protection; nothing where that is of another life of it, or over.
  std::optional<Protection> KeptProtectionOf(uint32_t b) const;
  void RecoverPin(uint32_t b, TimeMs until);

  // ---- check_invariants.cc
  void CheckStates() const;
  void CheckLeaseOrder() const;
  void CheckVacating() const;
  void CheckRefs() const;
  void CheckCharges() const;
  void CheckProtections() const;

  // ---- The blocks
  const PoolOptions options;
  uint32_t capacity = 0;  // So many are there.
  // Ids of blocks are up to this one, which is there. Those of the holes, whose ends are the values, are not: their records say
  // that they are free, and keep their generations.
  uint32_t extent = 0;
  absl::btree_map<uint32_t, uint32_t> holes;
  const std::optional<PoolTable> table;  // None: the tables below are the pool's own.
  PoolTable::Begun own_begun{};
  UndoLog undo;
  uint64_t drops_turn = 0;  // The last turn in which a hold was dropped.
  uint32_t& next_new;       // The first block that was never leased.
  VirtualArray<BlockRecord> records;
  PrefixIndex index;
  // The keys that were evicted lately, and when: for miss reasons, regret and Explain, never whether a block may be used, since
  // two keys may, very rarely, have one hash. Their number is 1 once the eviction was regretted.
  PastContents ghosts;
  ReuseCurve reuse;
  PolicyFeed policy;
  bool stand_in = false;      // True from Recover until a policy has taken over.
  bool handing_over = false;  // A HandOver copies what it will tell its policy.
  std::array<uint32_t, kBlockStates> counts{};
  uint32_t last_generation_cached = 0;

  FreeSet free;
  LeaseOrder lease_order;  // It ranks slabs by blocks in use, of those that have free ones to keep.

  // ---- Giving back (vacate.cc)
  BlockRange going;         // These are to be vacated; empty: none are.
  uint32_t free_to_go = 0;  // So many of those are free.
  // The children of resident blocks among `noted_parents`, and perhaps some that are so no more. All of them are in it once
  // `noted` is behind the last block.
  BlockRange noted_parents;
  using Notes = absl::btree_map<uint32_t, std::vector<uint32_t>>;
  Notes children_of;
  std::vector<Notes> forgotten;  // Their memory is freed part by part.
  uint64_t notes = 0;
  uint32_t noted = 0;
  void NoteChild(uint32_t parent, uint32_t child) {
    if (!noted_parents.contains(parent)) return;
    children_of[parent].push_back(child);
    ++notes;
  }
  void ForgetChildren() {
    if (!children_of.empty()) forgotten.push_back(std::exchange(children_of, {}));
    notes = noted = 0;
  }

  // ---- The sessions
  HoldPageStock hold_pages;
  std::vector<Session> sessions;
  std::vector<uint16_t> unused_slots;
  uint32_t promised = 0;
  // What BlockPool::Tidy has left to do. Sessions whose blocks are to be quarantined or given back, and
  // blocks of which a child has become cached and still counts as sealed in their refs.
  std::vector<uint16_t> ending;
  std::vector<uint32_t> owed;
  static constexpr size_t kMostOwed = 65536;  // Nothing is put off while there are so many.
  // Blocks that were leased in their last generation: there are hardly ever any.
  std::vector<uint32_t> last_generation_blocks;

  // ---- Protection
  absl::flat_hash_map<uint32_t, Protection> protections;
  absl::btree_set<std::tuple<TimeMs, uint32_t, Deadline>> deadlines;
  uint32_t protected_blocks = 0;  // Those that are Budgeted.
  // The blocks on offer whose priority is not the default, as (priority, accessed_ms, block).
  using Retained = std::tuple<uint8_t, uint32_t, uint32_t>;
  Retained RetainedKey(uint32_t b) const { return {priority(b), records[b].accessed_ms, b}; }
  absl::btree_set<Retained> retained;

  // ---- Sums of content (content_sums.cc)
  VirtualArray<uint64_t> sums;  // The same as in PoolTable; none where none are kept.
  uint32_t doubted = 0;         // Blocks with kDoubted.
  // Resident blocks whose content is not what was sealed.
  absl::btree_set<uint32_t> condemned;
  std::string secrets;  // Bytes that nobody knows, for the keys of those that will be.
  bool is_condemned(uint32_t b) const { return !condemned.empty() && condemned.contains(b); }
  bool has_sum(uint32_t b) const {
    return b < sums.size() && static_cast<uint32_t>(sums[b] >> 32) == records[b].generation;
  }
  void Doubt(uint32_t b);
  void Believe(uint32_t b);
  // Takes the block out of the index, and remembers its keys as evicted. REQUIRES: it is resident.
  void TakeKeys(uint32_t b);
  // Puts the block into the index again, under a key of its group that nobody can ask for. REQUIRES: TakeKeys.
  void GiveSecretKey(uint32_t b);

  // ---- The verb that runs
  static constexpr uint32_t kMostSteps = 8192;
  TimeMs now_ms = 0;
  uint32_t steps_left = 0;  // So many blocks in front of those named it may visit, of
  uint32_t steps_given = 0;
  // The block that it refused last, or 0. Room only shrinks during a verb, so all blocks behind it are
  // refused too: a chain that is named block by block is not walked anew for each.
  uint32_t denied = 0;
  PoolCounters counters;
  std::vector<Eviction> direct_evictions;

  // Kept so that verbs need not allocate at each call.
  std::vector<BlockKey> scratch_aliases;
  std::vector<uint64_t> scratch_hashes;
  MatchScratch scratch_match;
  std::vector<uint32_t> scratch_chain;
  uint32_t departing_at = 0;  // NextToLeave goes on there, where it has to visit all.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_POOL_REP_H_
