#include <algorithm>
#include <array>
#include <atomic>

#include "absl/algorithm/container.h"
#include "proto/support/limits.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

// Entries that are prefetched together: enough to hide the latency of one behind the work on the others.
constexpr size_t kSealChunk = 32;

bool KeysFit(absl::Span<const BlockKey> keys, size_t groups) {
  if (keys.empty() || keys.size() > kMaxKeysPerBlock || keys.back().group >= groups) return false;
  return std::all_of(keys.begin(), keys.end(),
                     [&](const BlockKey& key) { return key.group == keys.back().group; });
}

}  // namespace

// Holds the block `b` that the entry's key names already.
SealVerdict PoolRep::HoldCanonical(Holder session, uint32_t b, uint32_t mapped_end) {
  if (b >= mapped_end) return {.verdict = Verdict::kUnmapped};
  if (records[b].has(BlockRecord::kDoubted)) return {.verdict = Verdict::kDoubted};
  Session& s = sessions[static_cast<size_t>(session)];
  const uint32_t holds = s.holds.count(b);
  if (holds == kMaxHolds) return {.verdict = Verdict::kTooManyHolds};
  if (holds == 0 && CapRoom(s) == 0) return {.verdict = Verdict::kOverCap};
  if (const Verdict verdict = CheckCredit(b, Headroom(s)); verdict != Verdict::kDone)
    return {.verdict = verdict};
  AddRef(b, session);
  AddHold(&s, b);
  records[b].accessed_ms = static_cast<uint32_t>(now_ms);
  policy.OnHit(BlockId{b}, now_ms);
  ++counters.deduplicated;
  return {.verdict = Verdict::kDuplicate, .canonical = RefOf(b)};
}

void PoolRep::TakeNewAliases(absl::Span<const BlockKey> keys) {
  scratch_aliases.clear();
  for (const BlockKey& alias : keys.subspan(0, keys.size() - 1)) {
    if (alias == keys.back() || Find(alias) != 0 || absl::c_linear_search(scratch_aliases, alias)) continue;
    scratch_aliases.push_back(alias);
  }
}

void PoolRep::KeepAliases(uint32_t b, absl::Span<const BlockKey> aliases) {
  if (aliases.empty()) return;
  records[b].flags |= BlockRecord::kAliased;
  if (!table.has_value() || !options.table_has_sums) return;
  PoolTable::KeptAliases& kept = table->aliases[b];
  kept.whose = uint64_t{records[b].generation} << 32 | aliases.size();
  for (size_t i = 0; i < aliases.size(); ++i) {
    kept.keys[i] = aliases[i].bytes;
    kept.raw[i] = aliases[i].raw;
  }
  kept.checksum = kept.Checksum(b, records[b]);
}

// `parent` is the block that the key in front names, or 0; `hash` is the hash of the chain's key.
SealVerdict PoolRep::SealOne(Holder session, const SealEntry& entry, uint64_t hash, uint32_t parent,
                             uint32_t mapped_end) {
  const Verdict verdict = Resolve(entry.block);
  if (verdict != Verdict::kDone) return {.verdict = verdict};
  const uint32_t b = Index(entry.block.id);
  BlockRecord& r = records[b];
  if (r.state() != BlockState::kLeased) return {.verdict = Verdict::kWrongState};
  if (Holder{r.owner} != session) return {.verdict = Verdict::kNotHeld};
  const BlockKey& key = entry.keys.back();
  if (const uint32_t canonical = index.Find(hash, key); canonical != 0) {
    if (!entry.leave_duplicate) return HoldCanonical(session, canonical, mapped_end);
    TouchOne(canonical);
    ++counters.deduplicated;
    return {.verdict = Verdict::kDuplicate};
  }

  Session& s = sessions[static_cast<size_t>(session)];
  const bool linked = parent != 0 && options.windows[key.group] == 0 &&
                      records[parent].group() == key.group &&
                      CheckCredit(parent, Headroom(s)) == Verdict::kDone;
  r.parent = linked ? parent : 0;
  if (linked) {
    AddRef(parent, session);
    ++records[parent].children;
    NoteChild(parent, b);
  }
  // The word with the state, which is stored below, and the flags.
  undo.Save(&r.accessed_ms);
  TakeNewAliases(entry.keys);
  r.sealed_ms = r.accessed_ms = static_cast<uint32_t>(now_ms);
  r.set_key(key);
  KeepAliases(b, scratch_aliases);
  if (table.has_value()) table->checksums[b] = RecordChecksum(b, r);
  // From the next store on, a process that takes over finds the block under its key.
  std::atomic_signal_fence(std::memory_order_release);
  SetState(b, BlockState::kSealed);
  // A block of another group in front of it is no parent to the policy either.
  const bool same_group = parent != 0 && records[parent].group() == key.group;
  policy.OnInsert(entry.block.id,
                  {.hash = hash, .parent = BlockId{same_group ? parent : 0}, .now_ms = now_ms});
  --s.leased;
  index.Insert(hash, b);
  reuse.Write(hash, now_ms);
  for (const BlockKey& alias : scratch_aliases) index.AddAlias(alias, b);
  ++counters.sealed;
  return {.verdict = Verdict::kDone, .canonical = RefOf(b)};
}

void BlockPool::Seal(Holder session, TimeMs now, const BlockKey* parent, absl::Span<const SealEntry> entries,
                     absl::Span<SealVerdict> outcomes, uint32_t mapped_end) {
  Rep& r = *rep_;
  r.BeginVerb(now, entries.size());
  if (r.OpenSession(session) == nullptr) {
    std::fill(outcomes.begin(), outcomes.end(), SealVerdict{.verdict = Verdict::kNotHeld});
    return;
  }
  uint32_t in_front = parent == nullptr ? 0 : r.Find(*parent);
  std::array<uint64_t, kSealChunk> hashes;
  for (size_t begin = 0; begin < entries.size(); begin += kSealChunk) {
    const size_t n = std::min(kSealChunk, entries.size() - begin);
    for (size_t i = 0; i < n; ++i) {
      const SealEntry& entry = entries[begin + i];
      if (entry.keys.empty()) continue;
      hashes[i] = HashKey(entry.keys.back());
      r.index.PrefetchBucket(hashes[i]);
      if (Index(entry.block.id) > r.extent) continue;
      r.records.Prefetch(Index(entry.block.id));
      r.policy.Prefetch(entry.block.id, hashes[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      if (!entries[begin + i].keys.empty()) r.index.PrefetchRecord(hashes[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const SealEntry& entry = entries[begin + i];
      SealVerdict& outcome = outcomes[begin + i];
      if (!KeysFit(entry.keys, r.options.windows.size())) {
        outcome = {.verdict = Verdict::kWrongState};
        in_front = 0;
        continue;
      }
      outcome = r.SealOne(session, entry, hashes[i], in_front, mapped_end);
      in_front = outcome.canonical != kNullRef ? Index(outcome.canonical.id)
                                               : r.index.Find(hashes[i], entry.keys.back());
    }
  }
}

}  // namespace kvpool
