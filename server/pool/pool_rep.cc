#include "server/pool/pool_rep.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "server/replacement/policies/async_policy.h"

namespace kvpool {
namespace {

constexpr size_t kMaxDirectEvictions = 4096;
// Victims that are prefetched together.
constexpr size_t kPrefetchVictims = 16;
constexpr uint32_t kMaxDefaultGhosts = 4u << 20;
constexpr uint32_t kFirstGhosts = 256;  // They take a page.

std::optional<PoolTable> TableOf(const PoolOptions& options) {
  if (options.table == nullptr) return std::nullopt;
  return PoolTable(options.table, options.max_blocks, options.table_sessions);
}

UndoLog UndoOf(const std::optional<PoolTable>& table, uint32_t max_blocks) {
  if (!table.has_value()) return UndoLog();
  return UndoLog(table->data, &table->begun.turn, table->undo, UndoLog::Entries(max_blocks));
}

PastContents GhostsOf(const PoolOptions& options) {
  if (options.ghosts != 0) return PastContents(options.ghosts, options.ghosts);
  const uint32_t most =
      std::bit_ceil(std::min(options.max_blocks / PoolRep::kBlocksPerGhost, kMaxDefaultGhosts));
  return PastContents(most, std::min(most, kFirstGhosts));
}

VirtualArray<BlockRecord> RecordsOf(const std::optional<PoolTable>& table, uint32_t max_blocks) {
  if (table.has_value()) return VirtualArray<BlockRecord>(table->records, max_blocks);
  return VirtualArray<BlockRecord>(max_blocks);
}

VirtualArray<uint64_t> SumsOf(const std::optional<PoolTable>& table, const PoolOptions& options) {
  if (table.has_value() && options.table_has_sums)
    return VirtualArray<uint64_t>(table->sums, options.max_blocks);
  return VirtualArray<uint64_t>(options.keeps_sums ? options.max_blocks : 0);
}

}  // namespace

PoolRep::PoolRep(const PoolOptions& pool_options, std::unique_ptr<ReplacementPolicy> replacement)
    : options(pool_options),
      table(TableOf(pool_options)),
      undo(UndoOf(table, pool_options.max_blocks)),
      next_new(table.has_value() ? table->begun.blocks : own_begun.blocks),
      records(RecordsOf(table, pool_options.max_blocks)),
      index(pool_options.max_blocks, &records),
      ghosts(GhostsOf(pool_options)),
      reuse(pool_options.max_blocks),
      policy(std::move(replacement)),
      free(pool_options.max_blocks),
      lease_order(pool_options.max_blocks, pool_options.slab_blocks),
      hold_pages(table.has_value() ? table->pages : nullptr, table.has_value() ? table->page_count : 0,
                 table.has_value() ? &table->begun.hold_pages : nullptr, &undo),
      sums(SumsOf(table, pool_options)) {
  next_new = std::max(next_new, 1u);
  KVPOOL_CHECK(options.max_blocks >= 1, "a pool of no blocks");
  KVPOOL_CHECK(!options.windows.empty() && options.windows.size() <= kMaxGroups, "%zu groups, not 1 to %u",
               options.windows.size(), kMaxGroups);
  KVPOOL_CHECK(options.pin_budget >= 0 && options.pin_budget <= 1, "pin budget %g, not 0 to 1",
               options.pin_budget);
  KVPOOL_CHECK(options.first_generation < UINT32_MAX, "no generation is left");
}

Verdict PoolRep::Resolve(BlockRef ref) {
  if (ref.id == kNullBlock || Index(ref.id) > extent) return Verdict::kUnknownBlock;
  const BlockRecord& r = records[Index(ref.id)];
  if (r.generation != ref.generation || r.state() == BlockState::kFree) {
    ++counters.refused_stale;
    return Verdict::kStale;
  }
  return Verdict::kDone;
}

Verdict PoolRep::CheckCredit(uint32_t b, uint32_t room) {
  const auto deny = [&] {
    denied = b;
    return Verdict::kOverCredit;
  };
  uint32_t need = 0;
  for (uint32_t p = b; p != 0 && records[p].state() == BlockState::kCached; p = records[p].parent) {
    if (p == denied) return deny();
    if (!records[p].last_generation() && ++need > room) return deny();
    if (steps_left == 0) return Verdict::kTooFar;
    --steps_left;
  }
  return Verdict::kDone;
}

void PoolRep::Charge(uint32_t b, Holder to) {
  records[b].owner = static_cast<uint16_t>(to);
  if (to == kNobody) return;
  Session& s = sessions[static_cast<size_t>(to)];
  if (Unused(s) > 0) --promised;
  ++s.charged;
}

void PoolRep::EndCharge(uint32_t b) {
  const Holder owner{records[b].owner};
  if (owner == kNobody) return;
  records[b].owner = static_cast<uint16_t>(kNobody);
  Session& s = sessions[static_cast<size_t>(owner)];
  --s.charged;
  if (Unused(s) > 0) ++promised;
  if (s.charged == 0) ReuseIfIdle(static_cast<size_t>(owner));
}

void PoolRep::ReuseIfIdle(size_t slot) {
  Session& s = sessions[slot];
  if (s.phase != Phase::kGone || s.charged != 0) return;
  s.phase = Phase::kUnused;
  unused_slots.push_back(static_cast<uint16_t>(slot));
}

void PoolRep::AddHold(Session* s, uint32_t b) {
  const uint32_t holds = s->holds.Add(b);
  ++s->all_holds;
  if (holds == 1) ++s->held;
  if (holds > kManyHolds) s->many_holds = true;
}

void PoolRep::DropHold(Session* s, uint32_t b) {
  --s->all_holds;
  drops_turn = undo.turn();
  if (s->holds.Subtract(b, 1) == 0) --s->held;
}

void PoolRep::AddRef(uint32_t b, Holder taker) {
  for (; b != 0; b = records[b].parent) {
    BlockRecord& r = records[b];
    if (r.refs++ != 0) return;
    if (r.has(BlockRecord::kOffered)) Withdraw(b);
    r.flags &= static_cast<uint8_t>(~BlockRecord::kNeverReused);
    SetState(b, BlockState::kSealed);
    if (r.last_generation()) {
      --last_generation_cached;
    } else {
      Charge(b, taker);
    }
  }
}

void PoolRep::DropRefs(uint32_t b, uint32_t refs) {
  for (;; b = records[b].parent, refs = 1) {
    BlockRecord& r = records[b];
    KVPOOL_CHECK(r.state() == BlockState::kSealed && r.refs >= refs, "block %u has %u refs, not %u", b,
                 r.refs, refs);
    r.refs -= refs;
    if (r.refs != 0) return;
    SetState(b, BlockState::kCached);
    if (r.last_generation()) {
      ++last_generation_cached;
    } else {
      EndCharge(b);
    }
    policy.OnUsed(BlockId{b}, now_ms);
    if (r.children == 0) Offer(b);
    if (r.parent == 0) return;
    // A release is never refused, and one hold may be all that keeps a chain of any length.
    if (steps_left == 0 && owed.size() < kMostOwed) return owed.push_back(r.parent);
    if (steps_left > 0) --steps_left;
  }
}

void PoolRep::GoOnEnding(uint32_t* blocks) {
  const uint16_t slot = ending.back();
  Session& s = sessions[slot];
  s.tidied_from = s.holds.VisitBelow(s.tidied_from, *blocks, [&](uint32_t b, uint32_t holds) {
    --*blocks;
    const bool sealed = records[b].state() == BlockState::kSealed;
    if (s.phase == Phase::kEnded) {
      if (!sealed) SetState(b, BlockState::kQuarantined);
      return;
    }
    drops_turn = undo.turn();
    s.holds.Subtract(b, holds);
    s.all_holds -= holds;
    --s.held;
    if (sealed) return DropRefs(b, holds);
    --s.leased;
    // A damaged block that was recovered may have several holders.
    if ((records[b].refs -= holds) == 0) Free(b);
  });
  if (s.tidied_from != 0) return;
  ending.pop_back();
  if (s.phase != Phase::kFreeing) return;
  s.phase = Phase::kGone;
  ReuseIfIdle(slot);
}

void PoolRep::Hint(uint32_t b, const UseHint& hint) {
  BlockRecord& r = records[b];
  policy.OnHint(BlockId{b}, hint);
  if (hint.reuse == Reuse::kNever && r.refs == 1) r.flags |= BlockRecord::kNeverReused;
}

void PoolRep::Offer(uint32_t b) {
  BlockRecord& r = records[b];
  r.flags |= BlockRecord::kOffered;
  if (priority(b) == kDefaultPriority) {
    policy.OnOffer(BlockId{b});
  } else {
    retained.insert(RetainedKey(b));
  }
}

void PoolRep::Withdraw(uint32_t b) {
  records[b].flags &= static_cast<uint8_t>(~BlockRecord::kOffered);
  if (priority(b) == kDefaultPriority) {
    policy.OnWithdraw(BlockId{b});
  } else {
    retained.erase(RetainedKey(b));
  }
}

uint32_t PoolRep::NextVictim() {
  const uint32_t first = retained.empty() ? 0 : std::get<2>(*retained.begin());
  if (first != 0 && std::get<0>(*retained.begin()) < kDefaultPriority) return first;
  if (AsyncPolicy* const async = policy.asked()->async()) {
    if (const BlockId decided = async->NextDecided(); decided != kNullBlock) {
      ++counters.decided_victims;
      return Index(decided);
    }
    if (async->offered() > 0) ++counters.undecided_victims;
  }
  const BlockId chosen = policy.asked()->Victim(now_ms);
  return chosen != kNullBlock ? Index(chosen) : first;
}

void PoolRep::Free(uint32_t b) {
  BlockRecord& r = records[b];
  r.refs = 0;
  Believe(b);
  if (!condemned.empty()) condemned.erase(b);
  if (r.last_generation()) {
    SetState(b, BlockState::kQuarantined);
    r.flags = BlockRecord::kRetired;
    return;
  }
  const bool was_in_use = IsInUse(r.state());
  CountState(b, BlockState::kFree);
  EndCharge(b);
  r.flags = 0;
  free.Insert(b);
  if (!going.contains(b)) {
    lease_order.Add(b, was_in_use);
  } else {
    ++free_to_go;
    if (was_in_use) lease_order.EndUse(b);
  }
}

uint32_t PoolRep::PopFree(uint32_t most, uint32_t* out) {
  const bool keeps = lease_order.next().size() > 0;
  const BlockRange next = NextFree();
  const uint32_t count = free.Pop(next.first, next.end, most, out);
  KVPOOL_CHECK(count > 0, "no block is free among %u to %u", next.first, next.end);
  if (keeps) {
    lease_order.Lease(out[0], count);
  } else {
    free_to_go -= count;
    for (uint32_t i = 0; i < count; ++i) lease_order.Use(out[i]);
  }
  next_new = std::max(next_new, out[count - 1] + 1);
  return count;
}

void PoolRep::PrefetchEviction(uint32_t b) const {
  const BlockRecord& r = records[b];
  const uint64_t hash = HashKey(r.block_key());
  index.PrefetchBucket(hash);
  ghosts.Prefetch(hash);
  policy.Prefetch(BlockId{b}, hash);
  records.Prefetch(r.parent);
}

void PoolRep::TakeKeys(uint32_t b) {
  const uint64_t hash = HashKey(records[b].block_key());
  scratch_aliases.clear();
  index.Remove(hash, b, &scratch_aliases);
  ghosts.Remember(hash, now_ms, 0, now_ms);
  for (const BlockKey& alias : scratch_aliases) ghosts.Remember(HashKey(alias), now_ms, 0, now_ms);
}

void PoolRep::Evict(uint32_t b, EvictReason reason, std::vector<Eviction>* log) {
  BlockRecord& r = records[b];
  KVPOOL_CHECK(r.has(BlockRecord::kOffered), "block %u is to leave in state %d with %u children", b,
               static_cast<int>(r.state()), r.children);
  // Chains leave from the tail: the parent is likely next.
  if (r.parent != 0) PrefetchEviction(r.parent);
  const auto now32 = static_cast<uint32_t>(now_ms);
  TakeKeys(b);

  const Eviction eviction = {.block = BlockId{b},
                             .key = r.block_key(),
                             .lifetime_ms = now32 - r.sealed_ms,
                             .idle_ms = now32 - r.accessed_ms};
  if (log != nullptr) log->push_back(eviction);
  if (reason == EvictReason::kDirect && direct_evictions.size() < kMaxDirectEvictions) {
    direct_evictions.push_back(eviction);
  }
  ++counters.evicted[static_cast<size_t>(reason)];

  Withdraw(b);
  policy.OnEvict(BlockId{b});
  if (r.has(BlockRecord::kProtected)) SetPriority(b, {}, 0);
  const uint32_t parent = r.parent;
  if (r.last_generation()) --last_generation_cached;
  Free(b);
  if (parent != 0 && --records[parent].children == 0 && records[parent].state() == BlockState::kCached) {
    Offer(parent);
  }
}

size_t PoolRep::PrefetchVictims(size_t most) const {
  std::array<BlockId, kPrefetchVictims> upcoming;
  std::array<uint64_t, kPrefetchVictims> hashes;
  const size_t n = policy.asked()->Upcoming({upcoming.data(), std::min(most, upcoming.size())});
  for (size_t i = 0; i < n; ++i) records.Prefetch(Index(upcoming[i]));
  for (size_t i = 0; i < n; ++i) {
    hashes[i] = HashKey(records[Index(upcoming[i])].block_key());
    index.PrefetchBucket(hashes[i]);
    ghosts.Prefetch(hashes[i]);
    policy.Prefetch(upcoming[i], hashes[i]);
  }
  for (size_t i = 0; i < n; ++i) index.PrefetchRecord(hashes[i]);
  return n;
}

uint32_t PoolRep::EvictUntilFree(uint32_t free, EvictReason reason, std::vector<Eviction>* log) {
  const uint32_t before = count(BlockState::kFree);
  size_t prefetched = 0;  // How many ends of chains are prefetched.
  while (count(BlockState::kFree) < free) {
    const uint32_t victim = NextVictim();
    if (victim == 0) break;
    // The next victim is the end of another chain; within a chain Evict prefetches.
    if (records[victim].parent == 0) {
      prefetched = prefetched > 1 ? prefetched - 1 : PrefetchVictims(free - count(BlockState::kFree));
    }
    Evict(victim, reason, log);
  }
  return count(BlockState::kFree) - before;
}

}  // namespace kvpool
