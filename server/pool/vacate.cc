// A range of a pool comes to be empty, so that the memory there can be given back.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

// A small pool keeps so many notes of children without looking whether they hold.
constexpr uint64_t kLeastNotes = 65536;
// Notes of one parent are gone through when it moves. Beyond so many times the children that may move with it all is looked at
// anew.
constexpr uint64_t kMostNotesPerChild = 4;

}  // namespace

bool BlockPool::can_move() const { return rep_->vacating() && !rep_->handing_over; }

uint32_t BlockPool::lowest_free() const {
  if (rep_->count(BlockState::kFree) == 0) return UINT32_MAX;
  const BlockRange next = rep_->NextFree();
  return rep_->free.LowestFrom(next.first, next.end);
}

BlockRange BlockPool::going() const { return rep_->going; }

void BlockPool::Vacate(BlockRange range) {
  Rep& r = *rep_;
  KVPOOL_CHECK(!r.vacating(), "blocks %u to %u are to be given back already", r.going.first, r.going.end - 1);
  KVPOOL_CHECK(range.first > 0 && range.first <= range.end && range.end <= r.extent + 1,
               "blocks from %u on, up to %u, are to be given back, of 1 to %u", range.first, range.end,
               r.extent);
  r.going = range;
  r.free_to_go = r.free.CountRange(range.first, range.end);
  r.lease_order.Remove(r.free, range);
  r.noted_parents = range;
  r.ForgetChildren();
}

bool BlockPool::PutBack(uint32_t most) {
  Rep& r = *rep_;
  if (!r.vacating()) return false;
  const uint32_t end = r.going.first + std::min(most, r.going.size());
  for (uint32_t b = r.going.first; b < end; ++b) {
    if (r.records[b].state() != BlockState::kFree) continue;
    r.lease_order.Add(b, /*was_in_use=*/false);
    if (r.free.contains(b)) {
      --r.free_to_go;
      continue;
    }
    r.free.Insert(b);
    --r.counts[static_cast<size_t>(BlockState::kWithheld)];
    ++r.counts[static_cast<size_t>(BlockState::kFree)];
  }
  r.going.first = end;
  if (r.vacating()) return true;
  r.noted_parents = {};
  r.ForgetChildren();
  return false;
}

void BlockPool::Withhold(uint32_t most) {
  Rep& r = *rep_;
  if (!r.vacating()) return;
  uint32_t b = r.going.first;
  for (; most > 0 && r.free_to_go > 0 && r.available() > r.promised; --most, ++b) {
    b = r.free.LowestFrom(b, r.going.end);
    r.free.Erase(b);
    --r.free_to_go;
    --r.counts[static_cast<size_t>(BlockState::kFree)];
    ++r.counts[static_cast<size_t>(BlockState::kWithheld)];
  }
}

bool BlockPool::Shrink() {
  Rep& r = *rep_;
  uint32_t& withheld = r.counts[static_cast<size_t>(BlockState::kWithheld)];
  if (!r.vacating() || withheld < r.going.size()) return false;
  BlockRange gone = std::exchange(r.going, {});
  r.capacity -= withheld;
  withheld = 0;
  const auto behind = r.holes.find(gone.end);
  if (behind != r.holes.end()) {
    gone.end = behind->second;
    r.holes.erase(behind);
  }
  const auto after = r.holes.lower_bound(gone.first);
  if (after != r.holes.begin() && std::prev(after)->second == gone.first) {
    gone.first = std::prev(after)->first;
    r.holes.erase(std::prev(after));
  }
  if (gone.end > r.extent) {
    r.extent = gone.first - 1;
  } else {
    r.holes.emplace(gone.first, gone.end);
  }
  r.noted_parents = {};
  r.ForgetChildren();
  r.departing_at = std::min(r.departing_at, r.extent);
  return true;
}

bool BlockPool::FreeNotes(uint32_t most) {
  std::vector<Rep::Notes>& forgotten = rep_->forgotten;
  while (!forgotten.empty()) {
    Rep::Notes& notes = forgotten.back();
    while (most > 0 && !notes.empty()) {
      notes.erase(notes.begin());
      --most;
    }
    if (!notes.empty()) return true;
    forgotten.pop_back();
  }
  return false;
}

bool BlockPool::NoteChildren(uint32_t blocks) {
  Rep& r = *rep_;
  if (!r.vacating()) return true;
  FreeNotes(blocks);
  // What is free has no children, and those that come are noted.
  if (r.free_to_go + r.count(BlockState::kWithheld) == r.going.size()) r.noted = r.extent + 1;
  const uint32_t end = std::min(r.next_new, r.extent + 1);
  // Of a parent of which many children come and go many notes are stale: then all is looked at anew.
  if (r.notes > 2 * uint64_t{r.capacity} + kLeastNotes) r.ForgetChildren();
  for (; blocks > 0 && r.noted < end; --blocks, ++r.noted) {
    const BlockRecord& record = r.records[r.noted];
    if (r.noted > 0 && record.resident()) r.NoteChild(record.parent, r.noted);
  }
  if (r.noted < end) return false;
  r.noted = r.extent + 1;
  return true;
}

std::vector<uint32_t>* PoolRep::ChildrenOf(uint32_t b) {
  std::vector<uint32_t>& children = children_of[b];
  // Some have left, and may have come back.
  std::erase_if(children,
                [&](uint32_t child) { return !records[child].resident() || records[child].parent != b; });
  std::sort(children.begin(), children.end());
  children.erase(std::unique(children.begin(), children.end()), children.end());
  return &children;
}

bool BlockPool::Move(Holder own, TimeMs now, BlockRef from, BlockRef to, uint32_t most_children) {
  Rep& r = *rep_;
  r.BeginVerb(now, 1);
  Rep::Session* const s = r.OpenSession(own);
  // A policy that takes over goes by the parents that were copied for it.
  if (s == nullptr || !r.vacating() || r.handing_over || !IsResident(from)) return false;
  const uint32_t f = Index(from.id), t = Index(to.id);
  if (t == 0 || t > r.extent || r.records[t].generation != to.generation) return false;
  BlockRecord& old = r.records[f];
  BlockRecord& record = r.records[t];
  if (old.state() != BlockState::kCached || !r.going.contains(f) || old.last_generation()) return false;
  const bool doubted = old.has(BlockRecord::kDoubted);
  const bool condemned = r.is_condemned(f);
  if (record.state() != BlockState::kLeased || Holder{record.owner} != own || record.refs != 1) return false;
  std::vector<uint32_t> children;
  if (old.children > 0) {
    if (old.children > most_children || r.noted <= r.extent) return false;
    // Many have come and gone since.
    if (r.children_of[f].size() > kMostNotesPerChild * most_children) {
      r.ForgetChildren();
      return false;
    }
    children = *r.ChildrenOf(f);
    KVPOOL_CHECK(children.size() == old.children, "block %u has %u children, %zu noted", f, old.children,
                 children.size());
  }

  const BlockKey key = old.block_key();
  const uint64_t hash = HashKey(key);
  const uint8_t never_reused = old.flags & BlockRecord::kNeverReused;
  std::optional<Rep::Protection> protection;
  if (old.has(BlockRecord::kOffered)) r.Withdraw(f);
  if (old.has(BlockRecord::kProtected)) {
    protection = r.protections.find(f)->second;
    r.SetPriority(f, {}, 0);
  }
  r.scratch_aliases.clear();
  r.index.Remove(hash, f, &r.scratch_aliases);
  r.policy.OnEvict(from.id);

  // As in Seal: whoever takes over finds the block under its key from the store of its state on.
  record.parent = old.parent;
  record.children = old.children;
  r.undo.Save(&record.accessed_ms);
  record.sealed_ms = old.sealed_ms;
  record.accessed_ms = old.accessed_ms;
  record.set_key(key);
  r.KeepAliases(t, r.scratch_aliases);
  if (r.table.has_value()) r.table->checksums[t] = RecordChecksum(t, record);
  r.DropHold(s, t);
  --s->leased;
  record.refs = 0;
  std::atomic_signal_fence(std::memory_order_release);
  r.SetState(t, BlockState::kCached);
  if (record.last_generation()) {
    ++r.last_generation_cached;
  } else {
    r.EndCharge(t);
  }
  for (const uint32_t child : children) {
    BlockRecord& c = r.records[child];
    // A word of a child's record and its checksum: torn, they would lose what a session may hold by then.
    r.undo.Save(&c.parent);
    c.parent = t;
    if (r.table.has_value()) {
      r.undo.Save(&r.table->checksums[child]);
      r.table->checksums[child] = RecordChecksum(child, c);
    }
    r.NoteChild(t, child);
  }
  r.NoteChild(record.parent, t);
  r.index.Insert(hash, t);
  for (const BlockKey& alias : r.scratch_aliases) r.index.AddAlias(alias, t);
  record.flags |= never_reused;
  // The sum is of what was sealed, whatever was copied.
  if (r.has_sum(f)) r.sums[t] = uint64_t{record.generation} << 32 | static_cast<uint32_t>(r.sums[f]);
  if (doubted) r.Doubt(t);
  r.policy.OnInsert(to.id, {.hash = hash, .parent = BlockId{record.parent}, .now_ms = now});
  r.policy.OnUsed(to.id, now);
  if (protection.has_value()) {
    r.SetPriority(t,
                  {.priority = protection->priority,
                   .until = protection->retain_until,
                   .half_life_ms = protection->half_life_ms},
                  now);
  }
  if (record.children == 0) r.Offer(t);
  old.children = 0;
  r.Free(f);
  if (condemned) r.condemned.insert(t);
  ++r.counters.moved;
  return true;
}

}  // namespace kvpool
