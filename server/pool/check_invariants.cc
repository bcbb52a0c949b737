// Verifies every sentence of BlockPool's class comment from scratch.
#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {

void PrefixIndex::CheckInvariants(uint32_t extent, uint32_t capacity) const {
  uint32_t resident = 0;
  for (uint32_t b = 1; b <= extent; ++b) {
    if (!records_[b].resident()) continue;
    ++resident;
    const BlockKey key = records_[b].block_key();
    KVPOOL_CHECK(Find(HashKey(key), key) == b, "block %u is not found under its key", b);
    KVPOOL_CHECK(records_[b].has(BlockRecord::kAliased) == keys_of_.contains(b), "block %u aliases", b);
  }
  uint32_t indexed = 0;
  for (size_t bucket = 0; bucket < used_.places(); ++bucket) {
    for (uint32_t link = buckets_[bucket]; link != 0; link = records_[BlockOf(link)].next_in_bucket) {
      const uint32_t b = BlockOf(link);
      ++indexed;
      KVPOOL_CHECK(indexed <= resident, "the index has a cycle or a stranger in bucket %zu", bucket);
      KVPOOL_CHECK(b <= extent && records_[b].resident(), "block %u is indexed and not resident", b);
      KVPOOL_CHECK(used_.PlaceOf(HashKey(records_[b].block_key())) == bucket, "block %u is in bucket %zu", b,
                   bucket);
    }
  }
  KVPOOL_CHECK(indexed == resident && keys_ == resident, "%u blocks are indexed, %lu counted, %u resident",
               indexed, keys_, resident);
  KVPOOL_CHECK(used_.places() >= BucketsFor(capacity + 1), "%lu buckets for %u blocks", used_.places(),
               capacity);
  size_t aliases = 0;
  for (const auto& [block, keys] : keys_of_) {
    KVPOOL_CHECK(block <= extent && records_[block].resident() && !keys.empty(), "aliases of block %u",
                 block);
    for (const BlockKey& key : keys) {
      const auto it = aliases_.find(key);
      KVPOOL_CHECK(it != aliases_.end() && it->second == block, "an alias of block %u names another", block);
      KVPOOL_CHECK(Find(HashKey(key), key) == block, "an alias of block %u is another's chain key", block);
    }
    aliases += keys.size();
  }
  KVPOOL_CHECK(aliases == aliases_.size(), "%zu aliases of blocks, %zu in all", aliases, aliases_.size());
}

namespace {

// What the records say, counted anew.
struct Recount {
  explicit Recount(uint32_t extent)
      : holds(extent + 1),
        children(extent + 1),
        sealed_children(extent + 1),
        pinned_children(extent + 1),
        owed(extent + 1) {}
  std::vector<uint64_t> holds;
  std::vector<uint32_t> children, sealed_children, pinned_children, owed;
};

}  // namespace

void PoolRep::CheckStates() const {
  std::array<uint32_t, kBlockStates> states{};
  uint32_t last_generation = 0;
  for (uint32_t b = 1; b <= extent; ++b) {
    const BlockRecord& r = records[b];
    if (absent(b)) {
      KVPOOL_CHECK(r.state() == BlockState::kFree && r.refs == 0 && r.flags == 0 && !free.contains(b),
                   "block %u is not there, in state %d with %u refs", b, static_cast<int>(r.state()), r.refs);
      continue;
    }
    ++states[static_cast<size_t>(StateOf(b))];
    if (r.state() == BlockState::kCached && r.last_generation()) ++last_generation;
    KVPOOL_CHECK(b < next_new || r.state() == BlockState::kFree, "block %u is beyond the blocks ever leased",
                 b);
    KVPOOL_CHECK(r.state() != BlockState::kFree || (r.refs == 0 && r.flags == 0), "free block %u has %u refs",
                 b, r.refs);
    KVPOOL_CHECK(!r.has(BlockRecord::kListed), "block %u is listed outside Reclaim", b);
    KVPOOL_CHECK(!r.has(BlockRecord::kNeverReused) || r.state() == BlockState::kCached,
                 "block %u is not to be reused in state %d", b, static_cast<int>(r.state()));
  }
  for (size_t s = 0; s < states.size(); ++s) {
    KVPOOL_CHECK(states[s] == counts[s], "%u blocks are in state %zu, %u counted", states[s], s, counts[s]);
  }
  KVPOOL_CHECK(last_generation == last_generation_cached,
               "%u blocks of a last generation are cached, %u counted", last_generation,
               last_generation_cached);
  size_t offered = 0;
  for (uint32_t b = 1; b < next_new; ++b) {
    const BlockRecord& r = records[b];
    const bool may_leave = r.state() == BlockState::kCached && r.children == 0;
    KVPOOL_CHECK(r.has(BlockRecord::kOffered) == may_leave,
                 "block %u in state %d with %u children, on offer: %d", b, static_cast<int>(r.state()),
                 r.children, r.has(BlockRecord::kOffered));
    if (may_leave) ++offered;
    const bool is_retained = may_leave && priority(b) != kDefaultPriority;
    KVPOOL_CHECK(!is_retained || retained.contains(RetainedKey(b)), "block %u is not among the retained", b);
  }
  KVPOOL_CHECK(policy.asked()->offered() + retained.size() == offered,
               "the policy has %u blocks, %zu are retained, %zu may leave", policy.asked()->offered(),
               retained.size(), offered);

  uint32_t to_lease = 0, to_go = 0;
  for (uint32_t b = free.LowestFrom(0, extent + 1); b <= extent; b = free.LowestFrom(b + 1, extent + 1)) {
    KVPOOL_CHECK(b > 0 && records[b].state() == BlockState::kFree, "block %u is to be leased, not free", b);
    KVPOOL_CHECK(to_lease > 0 || free.Lowest() == b, "block %u is free, and %u said to be the lowest", b,
                 free.Lowest());
    ++to_lease;
    if (going.contains(b)) ++to_go;
  }
  KVPOOL_CHECK(to_lease == count(BlockState::kFree) && to_go == free_to_go,
               "%u blocks are to be leased, %u of them vacated; %u free, %u counted", to_lease, to_go,
               count(BlockState::kFree), free_to_go);
  KVPOOL_CHECK(free.LowestFrom(extent + 1, options.max_blocks) == options.max_blocks,
               "a block is to be leased that is not there");
  CheckLeaseOrder();
  uint32_t there = extent, end = 0;
  for (const auto& [first, hole_end] : holes) {
    KVPOOL_CHECK(end < first && first < hole_end && hole_end <= extent, "a hole from %u on, up to %u, of %u",
                 first, hole_end, extent);
    there -= hole_end - first;
    end = hole_end;
  }
  KVPOOL_CHECK(there == capacity, "%u blocks are there, %u counted", there, capacity);
  KVPOOL_CHECK(vacating() || count(BlockState::kWithheld) == 0, "%u blocks are withheld for nothing",
               count(BlockState::kWithheld));
  CheckVacating();
}

void PoolRep::CheckLeaseOrder() const {
  std::vector<uint32_t> in_use(lease_order.slabs()), to_lease(lease_order.slabs());
  for (uint32_t b = 1; b <= extent; ++b) {
    if (IsInUse(records[b].state())) ++in_use[lease_order.SlabOf(b)];
    if (free.contains(b) && !going.contains(b)) ++to_lease[lease_order.SlabOf(b)];
  }
  uint32_t most = 0;  // Digits of the blocks in use of one that is next.
  for (uint32_t slab = 0; slab < lease_order.slabs(); ++slab) {
    KVPOOL_CHECK(lease_order.in_use(slab) == in_use[slab] && lease_order.to_lease(slab) == to_lease[slab],
                 "slab %u has %u blocks in use and %u to lease; %u, %u counted", slab, in_use[slab],
                 to_lease[slab], lease_order.in_use(slab), lease_order.to_lease(slab));
    if (to_lease[slab] > 0) most = std::max<uint32_t>(most, std::bit_width(in_use[slab]));
  }
  KVPOOL_CHECK((lease_order.next().size() == 0) == (free_to_keep() == 0),
               "%u blocks are to be leased, and the slab from %u on is next", free_to_keep(),
               lease_order.next().first);
  if (lease_order.next().size() == 0) return;
  const uint32_t next = lease_order.SlabOf(lease_order.next().first);
  KVPOOL_CHECK(to_lease[next] > 0 && (next == 0 || std::bit_width(in_use[next]) == most),
               "slab %u is next, with %u blocks in use and %u to lease", next, in_use[next], to_lease[next]);
}

void PoolRep::CheckVacating() const {
  for (uint32_t b = 1; b <= extent; ++b) {
    KVPOOL_CHECK(absent(b) || StateOf(b) != BlockState::kWithheld || going.contains(b),
                 "block %u is withheld, and to be kept", b);
    const BlockRecord& r = records[b];
    if (b >= noted || !r.resident() || !noted_parents.contains(r.parent)) continue;
    const auto found = children_of.find(r.parent);
    KVPOOL_CHECK(found != children_of.end() &&
                     std::find(found->second.begin(), found->second.end(), b) != found->second.end(),
                 "child %u of block %u was not noted", b, r.parent);
  }
}

void PoolRep::CheckRefs() const {
  Recount recount(extent);
  for (const Session& s : sessions) {
    uint32_t held = 0, leased = 0;
    uint64_t all_holds = 0;
    s.holds.VisitBelow(extent + 1, UINT32_MAX, [&](uint32_t b, uint32_t holds) {
      KVPOOL_CHECK(b >= 1 && !absent(b), "block %u is held", b);
      ++held;
      all_holds += holds;
      if (records[b].state() != BlockState::kSealed) ++leased;
      recount.holds[b] += holds;
    });
    KVPOOL_CHECK(held == s.held && leased == s.leased && all_holds == s.all_holds,
                 "a session holds %u blocks %lu times, %u leased; %u, %lu, %u counted", held, all_holds,
                 leased, s.held, s.all_holds, s.leased);
    KVPOOL_CHECK(s.limits.max_blocks == 0 || held <= s.limits.max_blocks, "%u held above the cap of %u", held,
                 s.limits.max_blocks);
    KVPOOL_CHECK(
        held == 0 || s.phase == Phase::kOpen || s.phase == Phase::kEnded || s.phase == Phase::kFreeing,
        "a gone session holds %u", held);
    KVPOOL_CHECK(s.unmet == 0 || s.phase == Phase::kOpen, "an ended session is owed %u blocks", s.unmet);
  }
  for (const uint32_t b : owed) ++recount.owed[b];
  for (const uint16_t slot : ending) {
    KVPOOL_CHECK(sessions[slot].phase == Phase::kEnded || sessions[slot].phase == Phase::kFreeing,
                 "session %u is ending in phase %d", slot, static_cast<int>(sessions[slot].phase));
  }
  for (uint32_t b = 1; b <= extent; ++b) {
    const BlockRecord& r = records[b];
    if (!r.resident() || r.parent == 0) continue;
    KVPOOL_CHECK(r.parent <= extent && records[r.parent].resident(), "the parent of block %u is not resident",
                 b);
    KVPOOL_CHECK(records[r.parent].group() == r.group() && options.windows[r.group()] == 0,
                 "block %u has a parent that it must not have", b);
    ++recount.children[r.parent];
    if (r.state() == BlockState::kSealed) ++recount.sealed_children[r.parent];
    if (r.has(BlockRecord::kPinned)) ++recount.pinned_children[r.parent];
  }
  uint32_t with_doubt = 0;
  for (uint32_t b = 1; b <= extent; ++b) {
    const BlockRecord& r = records[b];
    if (r.has(BlockRecord::kDoubted)) ++with_doubt;
    KVPOOL_CHECK((r.resident() && has_sum(b)) || !r.has(BlockRecord::kDoubted),
                 "block %u is doubted, and not resident or without a sum", b);
    const uint64_t refs = recount.holds[b] + recount.sealed_children[b] + recount.owed[b] +
                          (r.has(BlockRecord::kPinned) ? 1 : 0);
    KVPOOL_CHECK(r.refs == refs || r.state() == BlockState::kFree, "block %u has %u refs, not %lu", b, r.refs,
                 refs);
    KVPOOL_CHECK((r.state() == BlockState::kLeased || r.state() == BlockState::kSealed ||
                  (r.state() == BlockState::kQuarantined && !r.has(BlockRecord::kRetired))) == (r.refs != 0),
                 "block %u has %u refs in state %d", b, r.refs, static_cast<int>(r.state()));
    if (r.resident())
      KVPOOL_CHECK(r.children == recount.children[b], "block %u has %u children", b, r.children);
    const auto p = protections.find(b);
    KVPOOL_CHECK(r.has(BlockRecord::kProtected) == (p != protections.end()), "protection of block %u", b);
    if (p == protections.end()) {
      KVPOOL_CHECK(!r.has(BlockRecord::kPinned) && recount.pinned_children[b] == 0, "pin of block %u", b);
    } else {
      KVPOOL_CHECK(p->second.pinned_children == recount.pinned_children[b], "pinned children of block %u", b);
      KVPOOL_CHECK(r.has(BlockRecord::kPinned) || recount.pinned_children[b] == 0,
                   "block %u has a pinned child", b);
    }
  }
  for (const uint32_t b : condemned) {
    KVPOOL_CHECK(records[b].resident() && !records[b].has(BlockRecord::kDoubted),
                 "block %u is condemned, and not resident or doubted", b);
  }
  KVPOOL_CHECK(with_doubt == doubted, "%u blocks are doubted, %u counted", with_doubt, doubted);
}

void PoolRep::CheckCharges() const {
  std::vector<uint32_t> charged(sessions.size());
  for (uint32_t b = 1; b < next_new; ++b) {
    const BlockRecord& r = records[b];
    const bool available =
        r.state() == BlockState::kFree || (r.state() == BlockState::kCached && !r.last_generation());
    if (available) continue;
    if (r.state() == BlockState::kLeased) {
      KVPOOL_CHECK(r.owner < sessions.size() && sessions[r.owner].holds.count(b) == r.refs,
                   "block %u is leased to %u, which does not hold it", b, r.owner);
    }
    if (Holder{r.owner} == kNobody) continue;
    KVPOOL_CHECK(r.owner < sessions.size(), "block %u is charged to %u", b, r.owner);
    ++charged[r.owner];
  }
  uint64_t promises = 0;
  for (size_t i = 0; i < sessions.size(); ++i) {
    const Session& s = sessions[i];
    KVPOOL_CHECK(charged[i] == s.charged, "session %zu is charged %u blocks, %u counted", i, charged[i],
                 s.charged);
    KVPOOL_CHECK(s.charged == 0 || s.phase != Phase::kUnused, "unused session %zu is charged", i);
    promises += Unused(s);
  }
  KVPOOL_CHECK(promises == promised, "%lu blocks are promised, %u counted", promises, promised);
  KVPOOL_CHECK(available() >= promised, "%u blocks are available, %u promised", available(), promised);
}

void PoolRep::CheckProtections() const {
  uint32_t budgeted = 0;
  size_t times = 0;
  for (const auto& [b, p] : protections) {
    const BlockRecord& r = records[b];
    KVPOOL_CHECK(b <= extent && r.resident(), "block %u is protected and not resident", b);
    if (Budgeted(r, p)) ++budgeted;
    if (p.priority != kDefaultPriority) {
      ++times;
      KVPOOL_CHECK(deadlines.contains({p.retention_due, b, Deadline::kRetention}), "retention of block %u",
                   b);
    }
    KVPOOL_CHECK(p.priority != kDefaultPriority || r.has(BlockRecord::kPinned), "protection of block %u", b);
    if (!r.has(BlockRecord::kPinned)) continue;
    if (deadlines.contains({p.pin_until, b, Deadline::kPin})) {
      ++times;
    } else {
      KVPOOL_CHECK(p.pinned_children > 0 && p.pin_until <= now_ms, "pin of block %u has no end", b);
    }
    KVPOOL_CHECK(r.state() == BlockState::kSealed, "block %u is pinned and not sealed", b);
    if (r.parent == 0) continue;
    const auto parent = protections.find(r.parent);
    KVPOOL_CHECK(parent != protections.end() && records[r.parent].has(BlockRecord::kPinned) &&
                     parent->second.pin_until >= p.pin_until,
                 "the parent of pinned block %u is pinned for less", b);
  }
  KVPOOL_CHECK(budgeted == protected_blocks, "%u blocks are protected, %u counted", budgeted,
               protected_blocks);
  KVPOOL_CHECK(times == deadlines.size(), "%zu deadlines for %zu", deadlines.size(), times);
}

void BlockPool::CheckInvariants() const {
  rep_->CheckStates();
  rep_->CheckRefs();
  rep_->CheckCharges();
  rep_->CheckProtections();
  rep_->index.CheckInvariants(rep_->extent, rep_->capacity);
}

}  // namespace kvpool
