// Sessions, leases, holds and views. Seal, Match, Reclaim, pins and the invariants have files of their own.
#include "server/pool/block_pool.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/pool/pool_rep.h"

namespace kvpool {

namespace {

// How many blocks ahead of its use a record is prefetched: about the latency of memory over the time
// of one block.
constexpr size_t kPrefetchBlocks = 8;
constexpr size_t kMaxSessions = 65534;
// Events that the policy is told of by a call of its own.
constexpr size_t kWorthTelling = PolicyFeed::kMostUntold / 4;
// So many blocks are evicted for one lease: some 1.5 ms. Background reclaim keeps more than that free for
// those who lease what they need next.
constexpr uint32_t kMostDirectEvictions = 2048;
// So many more are evicted for one that is to keep out of what is to be vacated.
constexpr uint32_t kMostForKeep = 64;

}  // namespace

BlockPool::BlockPool(const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy)
    : rep_(std::make_unique<Rep>(options, std::move(policy))) {}
BlockPool::~BlockPool() = default;

absl::Status BlockPool::Grow(uint32_t blocks) {
  const uint32_t most = rep_->options.max_blocks - 1;
  if (blocks > most - rep_->extent) {
    return absl::ResourceExhaustedError(
        absl::StrCat(blocks, " blocks more asked, ", rep_->extent, " there are, ", most, " at most"));
  }
  return Enter({rep_->extent + 1, rep_->extent + 1 + blocks});
}

absl::Status BlockPool::Enter(BlockRange range) {
  Rep& r = *rep_;
  if (r.vacating()) {
    return absl::FailedPreconditionError(
        absl::StrCat("blocks ", r.going.first, " to ", r.going.end - 1, " of the pool are to be given back"));
  }
  if (range.first == 0 || range.first > range.end || range.end > r.options.max_blocks) {
    return absl::InvalidArgumentError(absl::StrCat("blocks from ", range.first, " on, up to ", range.end,
                                                   ", are to come, of 1 to ", r.options.max_blocks - 1));
  }
  if (range.size() == 0) return absl::OkStatus();
  if (range.first > r.extent) {
    if (range.first > r.extent + 1) r.holes.emplace(r.extent + 1, range.first);
    r.extent = range.end - 1;
  } else {
    const auto after = r.holes.upper_bound(range.first);
    const bool in_hole = after != r.holes.begin() && std::prev(after)->second >= range.end;
    if (!in_hole) {
      return absl::FailedPreconditionError(
          absl::StrCat("of blocks ", range.first, " to ", range.end - 1, " some are there already"));
    }
    const BlockRange hole = {std::prev(after)->first, std::prev(after)->second};
    r.holes.erase(hole.first);
    if (hole.first < range.first) r.holes.emplace(hole.first, range.first);
    if (range.end < hole.end) r.holes.emplace(range.end, hole.end);
  }
  r.Prepare(r.capacity + 1 + range.size(), UINT32_MAX);
  r.free.InsertRange(range.first, range.end);
  r.lease_order.Add(r.free, range);
  r.capacity += range.size();
  r.counts[static_cast<size_t>(BlockState::kFree)] += range.size();
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------------------- sessions

absl::StatusOr<Holder> BlockPool::AddSession(const SessionLimits& limits, uint32_t coming, uint64_t id) {
  Rep& r = *rep_;
  KVPOOL_CHECK(!r.table.has_value() || id != 0, "a session of a pool in a table has no id");
  if (limits.max_blocks != 0 && limits.guaranteed > limits.max_blocks) {
    return absl::InvalidArgumentError(absl::StrCat(
        limits.guaranteed, " blocks guaranteed asked, above the cap of ", limits.max_blocks, " held"));
  }
  const uint32_t unpromised = r.available() - r.promised;
  const uint32_t unmet = limits.guaranteed - std::min(limits.guaranteed, unpromised);
  if (unmet > coming) {
    return absl::ResourceExhaustedError(
        absl::StrCat(limits.guaranteed, " blocks guaranteed asked, ", unpromised, " unpromised of ",
                     r.capacity, coming == 0 ? "" : absl::StrCat(", ", coming, " unpromised to come")));
  }
  size_t slot = r.sessions.size();
  if (!r.unused_slots.empty()) {
    slot = r.unused_slots.back();
    r.unused_slots.pop_back();
  } else if (!has_session_slot()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        slot,
        " sessions are in the pool, all there can be: one that is gone stays as long as a block that it "
        "leased or was the first to hold is held by others"));
  } else {
    r.sessions.push_back({.holds = HoldTable(&r.hold_pages)});
  }
  Rep::Session& s = r.sessions[slot];
  s.phase = Rep::Phase::kOpen;
  s.limits = limits;
  s.limits.guaranteed -= unmet;
  s.unmet = unmet;
  s.many_holds = false;
  s.holds.Begin(id);
  r.promised += s.limits.guaranteed;
  return Holder{static_cast<uint16_t>(slot)};
}

bool BlockPool::has_session_slot() const {
  const size_t most =
      rep_->table.has_value() ? std::min<size_t>(kMaxSessions, rep_->options.table_sessions) : kMaxSessions;
  return !rep_->unused_slots.empty() || rep_->sessions.size() < most;
}

bool BlockPool::Promise(Holder session) {
  Rep& r = *rep_;
  Rep::Session* const s = r.OpenSession(session);
  if (s == nullptr) return true;
  const uint32_t more = std::min(s->unmet, r.available() - r.promised);
  r.promised -= Rep::Unused(*s);
  s->limits.guaranteed += more;
  s->unmet -= more;
  r.promised += Rep::Unused(*s);
  return s->unmet == 0;
}

void BlockPool::EndSession(Holder session) {
  Rep& r = *rep_;
  Rep::Session* const s = r.OpenSession(session);
  if (s == nullptr) return;
  r.promised -= Rep::Unused(*s);
  s->phase = Rep::Phase::kEnded;
  s->unmet = 0;
  // Blocks in their last generation stay charged in place of this session's guarantee, which is over.
  for (const uint32_t b : r.last_generation_blocks) {
    if (Holder{r.records[b].owner} == session) r.EndCharge(b);
  }
  s->tidied_from = r.extent + 1;
  r.ending.push_back(static_cast<uint16_t>(session));
  Tidy(kTidySlice);
}

uint64_t BlockPool::FreeQuarantine(Holder session) {
  Rep& r = *rep_;
  const auto slot = static_cast<size_t>(session);
  if (slot >= r.sessions.size()) return 0;
  Rep::Session& s = r.sessions[slot];
  KVPOOL_CHECK(s.phase != Rep::Phase::kOpen, "session %zu is open: its processes may write its blocks", slot);
  if (s.phase != Rep::Phase::kEnded) return 0;
  const uint64_t ended = s.all_holds;
  s.phase = Rep::Phase::kFreeing;
  if (s.tidied_from == 0) r.ending.push_back(static_cast<uint16_t>(slot));
  s.tidied_from = r.extent + 1;
  Tidy(kTidySlice);
  return ended;
}

bool BlockPool::Tidy(uint32_t blocks) {
  Rep& r = *rep_;
  r.BeginVerb(r.now_ms, 0);
  while (blocks > 0 && !r.ending.empty()) r.GoOnEnding(&blocks);
  r.GiveSteps(blocks);
  while (r.steps_left > 0 && !r.owed.empty()) {
    const uint32_t b = r.owed.back();
    r.owed.pop_back();
    --r.steps_left;
    r.DropRefs(b, 1);
  }
  return untidy();
}

void BlockPool::Expect(uint32_t blocks) {
  rep_->index.Expect(blocks);
  // As long as the pool grows, little is evicted.
  if (blocks >= rep_->options.max_blocks) rep_->ghosts.Expect(Rep::GhostsFor(blocks));
}

bool BlockPool::Prepare(uint32_t blocks, uint32_t most) { return rep_->Prepare(blocks, most); }

void BlockPool::Commit() { rep_->undo.Commit(); }
const UndoLog& BlockPool::undo_log() const { return rep_->undo; }

bool BlockPool::untidy() const { return !rep_->ending.empty() || !rep_->owed.empty(); }

// ------------------------------------------------------------------------------------- leases and holds

void BlockPool::Prefetch(Holder session, absl::Span<const BlockRef> blocks, absl::Span<const BlockKey> keys) {
  Rep& r = *rep_;
  const Rep::Session* const s = r.OpenSession(session);
  if (s == nullptr) return;
  r.scratch_hashes.clear();
  for (const BlockKey& key : keys) {
    r.scratch_hashes.push_back(HashKey(key));
    r.index.PrefetchBucket(r.scratch_hashes.back());
  }
  for (const BlockRef block : blocks) {
    if (Index(block.id) > r.extent) continue;
    r.records.Prefetch(Index(block.id));
    s->holds.Prefetch(Index(block.id));
  }
  for (const uint64_t hash : r.scratch_hashes) r.index.PrefetchRecord(hash);
}

LeaseOutcome BlockPool::Lease(Holder session, TimeMs now, uint32_t count, uint32_t min,
                              std::vector<BlockRef>* out, uint32_t most) {
  Rep& r = *rep_;
  r.BeginVerb(now, 0);
  Rep::Session* const s = r.OpenSession(session);
  if (s == nullptr) return {.leased = 0, .shortfall = Shortfall::kCap};
  const uint32_t cap_room = Rep::CapRoom(*s);
  const uint32_t headroom = r.Headroom(*s);
  uint32_t n = std::min({count, cap_room, headroom});
  LeaseOutcome outcome;
  if (n < count) {
    if (n == cap_room) {
      outcome.shortfall = Shortfall::kCap;
    } else {
      outcome.shortfall = r.available() > n ? Shortfall::kCredit : Shortfall::kPressure;
    }
    if (n < min) n = 0;
  }
  if (n > most) {
    n = most;
    min = std::min(min, most);
    outcome.more = true;
  }
  if (const uint32_t at_once = r.count(BlockState::kFree) + kMostDirectEvictions; n > at_once) {
    // What is evicted is free for the next try, even if it is less than the least that would do now.
    r.EvictUntilFree(at_once, EvictReason::kDirect, nullptr);
    n = at_once < min ? 0 : at_once;
    outcome.shortfall = Shortfall::kReclaiming;
  }
  r.EvictUntilFree(n, EvictReason::kDirect, nullptr);
  KVPOOL_CHECK(r.count(BlockState::kFree) >= n, "%u blocks are free where %u are available",
               r.count(BlockState::kFree), r.available());
  // Those that are to be vacated come last, and a few more are evicted for it.
  for (uint32_t i = 0; r.free_to_go > 0 && r.free_to_keep() < n && i < kMostForKeep; ++i) {
    if (r.EvictUntilFree(r.count(BlockState::kFree) + 1, EvictReason::kDirect, nullptr) == 0) break;
  }
  out->reserve(out->size() + n);
  std::array<uint32_t, kPrefetchBlocks> next;
  // Whoever held a block when the turn began knows it by its generation. One that nobody held may skip a generation.
  const bool may_have_been_held = r.drops_turn == r.undo.turn();
  for (uint32_t i = 0; i < n; ++i) {
    if (i % next.size() == 0) {
      const uint32_t some = std::min<uint32_t>(next.size(), n - i);
      for (uint32_t j = 0; j < some;) j += r.PopFree(some - j, &next[j]);
      for (uint32_t j = 0; j < some; ++j) {
        r.records.Prefetch(next[j]);
        s->holds.Prefetch(next[j]);
      }
    }
    const uint32_t b = next[i % next.size()];
    BlockRecord& record = r.records[b];
    if (may_have_been_held) r.undo.Save(&record.generation);
    record.generation = (record.generation == 0 ? r.options.first_generation : record.generation) + 1;
    if (record.last_generation()) r.last_generation_blocks.push_back(b);
    record.parent = 0;
    record.refs = 1;
    r.CountState(b, BlockState::kLeased);
    r.Charge(b, session);
    r.AddHold(s, b);
    out->push_back(r.RefOf(b));
  }
  s->leased += n;
  r.counters.leased += n;
  outcome.leased = n;
  return outcome;
}

void BlockPool::Release(Holder session, TimeMs now, absl::Span<const BlockRef> blocks,
                        absl::Span<Verdict> verdicts) {
  Release(session, now, {}, blocks, verdicts);
}

void BlockPool::Release(Holder session, TimeMs now, const UseHint& hint, absl::Span<const BlockRef> blocks,
                        absl::Span<Verdict> verdicts) {
  Rep& r = *rep_;
  r.BeginVerb(now, blocks.size());
  Rep::Session* const s = r.OpenSession(session);
  const auto prefetch = [&](size_t i) {
    if (Index(blocks[i].id) > r.extent) return;
    r.records.Prefetch(Index(blocks[i].id));
    if (s != nullptr) s->holds.Prefetch(Index(blocks[i].id));
  };
  for (size_t i = blocks.size(); i-- > 0 && blocks.size() - i <= kPrefetchBlocks;) prefetch(i);
  for (size_t i = blocks.size(); i-- > 0;) {
    if (i >= kPrefetchBlocks) prefetch(i - kPrefetchBlocks);
    verdicts[i] = r.Resolve(blocks[i]);
    if (verdicts[i] != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    if (s == nullptr || s->holds.count(b) == 0) {
      verdicts[i] = Verdict::kNotHeld;
      continue;
    }
    r.DropHold(s, b);
    ++r.counters.released;
    BlockRecord& record = r.records[b];
    if (record.state() == BlockState::kLeased) {
      if (--record.refs != 0) continue;
      --s->leased;
      r.Free(b);
    } else {
      record.accessed_ms = static_cast<uint32_t>(now);
      if (hint.says_something()) r.Hint(b, hint);
      r.DropRefs(b, 1);
    }
  }
}

void BlockPool::Ref(Holder session, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts) {
  Rep& r = *rep_;
  r.BeginVerb(r.now_ms, blocks.size());
  Rep::Session* const s = r.OpenSession(session);
  for (size_t i = 0; i < blocks.size(); ++i) {
    verdicts[i] = r.Resolve(blocks[i]);
    if (verdicts[i] != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    const uint32_t holds = s == nullptr ? 0 : s->holds.count(b);
    if (holds == 0) {
      verdicts[i] = Verdict::kNotHeld;
    } else if (holds == kMaxHolds) {
      verdicts[i] = Verdict::kTooManyHolds;
    } else {
      r.AddHold(s, b);
      ++r.records[b].refs;
    }
  }
}

void BlockPool::CheckHeld(Holder session, std::optional<uint32_t> group, absl::Span<const BlockRef> blocks,
                          absl::Span<Verdict> verdicts) {
  Rep& r = *rep_;
  const Rep::Session* const s = r.OpenSession(session);
  for (size_t i = 0; i < blocks.size(); ++i) {
    verdicts[i] = r.Resolve(blocks[i]);
    if (verdicts[i] != Verdict::kDone) continue;
    const BlockRecord& record = r.records[Index(blocks[i].id)];
    if (s == nullptr || s->holds.count(Index(blocks[i].id)) == 0) {
      verdicts[i] = Verdict::kNotHeld;
    } else if (record.resident() && record.group() != group) {
      verdicts[i] = Verdict::kWrongState;
    }
  }
}

uint32_t BlockPool::Touch(TimeMs now, absl::Span<const BlockRef> blocks) {
  Rep& r = *rep_;
  r.BeginVerb(now, blocks.size());
  uint32_t touched = 0;
  for (size_t i = blocks.size(); i-- > 0;) {
    if (r.Resolve(blocks[i]) != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    if (!r.records[b].resident()) continue;
    ++touched;
    r.TouchOne(b);
  }
  return touched;
}

void PoolRep::TouchOne(uint32_t b) {
  const bool offered = records[b].has(BlockRecord::kOffered);
  if (offered) Withdraw(b);
  records[b].flags &= static_cast<uint8_t>(~BlockRecord::kNeverReused);
  records[b].accessed_ms = static_cast<uint32_t>(now_ms);
  policy.OnHit(BlockId{b}, now_ms);
  if (records[b].state() == BlockState::kCached) policy.OnUsed(BlockId{b}, now_ms);
  if (offered) Offer(b);
}

uint32_t BlockPool::SetScores(TimeMs now, absl::Span<const BlockRef> blocks, absl::Span<const float> scores) {
  Rep& r = *rep_;
  r.BeginVerb(now, blocks.size());
  uint32_t told = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (r.Resolve(blocks[i]) != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    if (!r.records[b].resident()) continue;
    ++told;
    const bool offered = r.records[b].has(BlockRecord::kOffered);
    if (offered) r.Withdraw(b);
    r.policy.OnScore(blocks[i].id, scores[i]);
    if (offered) r.Offer(b);
  }
  return told;
}

// ----------------------------------------------------------------------------------------------- views

uint32_t BlockPool::capacity() const { return rep_->capacity; }
uint32_t BlockPool::end_block() const { return rep_->extent + 1; }
std::array<uint32_t, kBlockStates> BlockPool::counts() const { return rep_->counts; }
std::array<uint32_t, kBlockStates> BlockPool::CountIn(BlockRange range) const {
  std::array<uint32_t, kBlockStates> counts{};
  for (uint32_t b = range.first; b < range.end; ++b) ++counts[static_cast<size_t>(rep_->StateOf(b))];
  return counts;
}
uint32_t BlockPool::available() const { return rep_->available(); }
uint32_t BlockPool::promised() const { return rep_->promised; }
uint32_t BlockPool::pinned() const { return rep_->protected_blocks; }
uint32_t BlockPool::pin_budget() const { return rep_->pin_budget(); }
uint32_t BlockPool::steps() const { return rep_->steps_given - rep_->steps_left; }
const PoolCounters& BlockPool::counters() const { return rep_->counters; }
bool BlockPool::decides_outside() const { return rep_->policy.decides_outside(); }
void BlockPool::TellPolicy() { rep_->policy.TellAll(); }
bool BlockPool::policy_waits() const { return rep_->policy.untold() >= kWorthTelling; }
const ReplacementPolicy& BlockPool::policy() const { return *rep_->policy.asked(); }

uint64_t BlockPool::bookkeeping_bytes() const {
  const Rep& r = *rep_;
  return r.records.bytes() + r.index.bytes() + r.ghosts.bytes() + r.reuse.bytes() +
         static_cast<uint64_t>(r.policy.asked()->bytes_per_block() * r.options.max_blocks);
}

std::vector<Eviction> BlockPool::TakeDirectEvictions() { return std::exchange(rep_->direct_evictions, {}); }

absl::StatusOr<BlockView> BlockPool::View(BlockId block, TimeMs now) const {
  const Rep& r = *rep_;
  const uint32_t b = Index(block);
  if (b == 0 || b > r.extent) {
    return absl::NotFoundError(absl::StrCat("block ", b, " is not one of 1 to ", r.extent));
  }
  if (r.absent(b)) return absl::NotFoundError(absl::StrCat("block ", b, " was given back"));
  const BlockRecord& record = r.records[b];
  BlockView view = {.ref = r.RefOf(b),
                    .state = r.StateOf(b),
                    .key = {},
                    .refs = record.refs,
                    .parent = kNullBlock,
                    .children = record.children,
                    .pinned = record.has(BlockRecord::kPinned),
                    .priority = r.priority(b),
                    .owner = kNobody,
                    .age_ms = 0,
                    .idle_ms = 0};
  if (record.resident()) {
    const auto now32 = static_cast<uint32_t>(now);
    view.key = record.block_key();
    view.parent = BlockId{record.parent};
    view.age_ms = now32 - record.sealed_ms;
    view.idle_ms = now32 - record.accessed_ms;
  }
  if (view.state != BlockState::kFree && view.state != BlockState::kWithheld)
    view.owner = Holder{record.owner};
  return view;
}

ReuseCurve::Slopes BlockPool::reuse(uint32_t step, uint32_t most, TimeMs now) const {
  // What is kept free finds nothing.
  return rep_->reuse.At(capacity() - rep_->count(BlockState::kFree), step, most, now);
}

BlockRef BlockPool::Find(const BlockKey& key) const {
  const uint32_t b = rep_->Find(key);
  return b == 0 ? kNullRef : rep_->RefOf(b);
}

absl::StatusOr<uint32_t> BlockPool::EvictedAgo(const BlockKey& key, TimeMs now) const {
  if (rep_->Find(key) != 0) return absl::NotFoundError("the key is resident");
  const PastContents::Past* const ghost = std::as_const(rep_->ghosts).Find(HashKey(key));
  if (ghost == nullptr) return absl::NotFoundError("no eviction of the key is remembered");
  return static_cast<uint32_t>(ghost->AgeAt(now));
}

BlockPool::Holdings BlockPool::holdings(Holder session) const {
  const auto slot = static_cast<size_t>(session);
  if (slot >= rep_->sessions.size()) return {};
  const Rep::Session& s = rep_->sessions[slot];
  Holdings holdings = {
      .leased = s.leased, .referenced = s.held - s.leased, .charged = s.charged, .limits = s.limits};
  holdings.limits.guaranteed += s.unmet;
  return holdings;
}

uint32_t BlockPool::holds(Holder session, BlockId block) const {
  const auto slot = static_cast<size_t>(session);
  return slot < rep_->sessions.size() ? rep_->sessions[slot].holds.count(Index(block)) : 0;
}

uint32_t BlockPool::held_in(Holder session, uint32_t first, uint32_t end) const {
  const auto slot = static_cast<size_t>(session);
  return slot < rep_->sessions.size() ? rep_->sessions[slot].holds.CountIn(first, end) : 0;
}

uint64_t BlockPool::holds(Holder session) const {
  const auto slot = static_cast<size_t>(session);
  return slot < rep_->sessions.size() ? rep_->sessions[slot].all_holds : 0;
}

uint32_t BlockPool::credit_room(Holder session) const {
  const Rep::Session* const s = rep_->OpenSession(session);
  return s == nullptr ? 0 : rep_->Headroom(*s);
}

uint32_t BlockPool::cap_room(Holder session) const {
  const Rep::Session* const s = rep_->OpenSession(session);
  return s == nullptr ? 0 : Rep::CapRoom(*s);
}

uint32_t BlockPool::unmet(Holder session) const {
  const auto slot = static_cast<size_t>(session);
  return slot < rep_->sessions.size() ? rep_->sessions[slot].unmet : 0;
}

uint32_t BlockPool::guaranteed_free(Holder session) const {
  const auto slot = static_cast<size_t>(session);
  return slot < rep_->sessions.size() ? Rep::Unused(rep_->sessions[slot]) : 0;
}

}  // namespace kvpool
