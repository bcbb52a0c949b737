#include "tests/pool/model.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "proto/support/check.h"

namespace kvpool {

BlockKey ToBlockKey(const ModelKey& key) {
  std::string bytes(32, '\0');
  std::memcpy(bytes.data(), &key.number, sizeof(key.number));
  return BlockKey::From(bytes, key.group);
}

// ------------------------------------------------------------------------------------------------ derived

uint32_t Model::Find(const ModelKey& key) const {
  for (uint32_t b = 1; b < blocks.size(); ++b) {
    if (blocks[b].resident() && std::count(blocks[b].keys.begin(), blocks[b].keys.end(), key) != 0) return b;
  }
  return 0;
}

uint32_t Model::count(BlockState state) const {
  return static_cast<uint32_t>(std::count_if(blocks.begin() + 1, blocks.end(),
                                             [&](const Block& b) { return b.there && b.state == state; }));
}

uint32_t Model::available() const {
  return static_cast<uint32_t>(std::count_if(blocks.begin() + 1, blocks.end(), [](const Block& b) {
    if (!b.there) return false;
    return b.state == BlockState::kFree || (b.state == BlockState::kCached && !b.last_generation());
  }));
}

uint32_t Model::charged(int session) const {
  return static_cast<uint32_t>(
      std::count_if(blocks.begin() + 1, blocks.end(), [&](const Block& b) { return b.owner == session; }));
}

uint32_t Model::unused(int session) const {
  if (!open(session)) return 0;
  const uint32_t guaranteed = sessions[session].promised;
  return guaranteed - std::min(guaranteed, charged(session));
}

uint32_t Model::promised() const {
  uint32_t sum = 0;
  for (int s = 0; s < static_cast<int>(sessions.size()); ++s) sum += unused(s);
  return sum;
}

uint32_t Model::held(int session) const {
  return static_cast<uint32_t>(std::count_if(blocks.begin() + 1, blocks.end(),
                                             [&](const Block& b) { return b.holds.contains(session); }));
}

uint32_t Model::holds(int session, uint32_t b) const {
  const auto it = blocks[b].holds.find(session);
  return it == blocks[b].holds.end() ? 0 : it->second;
}

uint64_t Model::all_holds(int session) const {
  uint64_t sum = 0;
  for (uint32_t b = 1; b < blocks.size(); ++b) sum += holds(session, b);
  return sum;
}

uint32_t Model::budgeted() const {
  uint32_t sum = 0;
  for (uint32_t b = 1; b < blocks.size(); ++b) sum += IsBudgeted(b) ? 1 : 0;
  return sum;
}

uint32_t Model::children(uint32_t b) const {
  return static_cast<uint32_t>(std::count_if(blocks.begin() + 1, blocks.end(), [&](const Block& child) {
    return child.resident() && child.parent == b;
  }));
}

uint32_t Model::refs(uint32_t b) const {
  uint32_t sum = blocks[b].pinned ? 1 : 0;
  for (const auto& [session, holds] : blocks[b].holds) sum += holds;
  for (const Block& child : blocks) {
    if (child.state == BlockState::kSealed && child.parent == b) ++sum;
  }
  return sum;
}

bool Model::HasPinnedChild(uint32_t b) const {
  return std::any_of(blocks.begin() + 1, blocks.end(),
                     [&](const Block& child) { return child.pinned && child.parent == b; });
}

uint32_t Model::CapRoom(int session) const {
  const uint32_t cap = sessions[session].limits.max_blocks;
  return cap == 0 ? UINT32_MAX : cap - held(session);
}

uint32_t Model::CreditNeed(const std::set<uint32_t>& taken) const {
  std::set<uint32_t> all;
  for (uint32_t b : taken) {
    for (; b != 0; b = blocks[b].parent) all.insert(b);
  }
  return static_cast<uint32_t>(std::count_if(all.begin(), all.end(), [&](uint32_t b) {
    return blocks[b].state == BlockState::kCached && !blocks[b].last_generation();
  }));
}

Verdict Model::Resolve(BlockRef ref) {
  if (Index(ref.id) == 0 || Index(ref.id) >= end_block()) return Verdict::kUnknownBlock;
  const Block& block = blocks[Index(ref.id)];
  const bool in_use = block.state != BlockState::kFree && block.state != BlockState::kWithheld;
  if (block.generation == ref.generation && in_use) return Verdict::kDone;
  ++counters.refused_stale;
  return Verdict::kStale;
}

// -------------------------------------------------------------------------------------------- transitions

void Model::SetOwner(uint32_t b, int owner) {
  const int before = blocks[b].owner;
  blocks[b].owner = owner;
  if (before < 0 || before == owner) return;
  if (sessions[before].phase == Phase::kGone && charged(before) == 0) {
    sessions[before].phase = Phase::kUnused;
    unused_slots_.push_back(before);
  }
}

void Model::Cache(uint32_t b) {
  blocks[b].state = BlockState::kCached;
  if (!blocks[b].last_generation()) SetOwner(b, -1);
  order_.push_back(b);
}

void Model::Uncache(uint32_t b) { std::erase(order_, b); }

void Model::Settle(int taker) {
  for (bool changed = true; changed;) {
    changed = false;
    std::vector<bool> sealed_child(blocks.size());
    for (const Block& block : blocks) {
      if (block.state == BlockState::kSealed) sealed_child[block.parent] = true;
    }
    for (uint32_t b = 1; b < blocks.size(); ++b) {
      Block& block = blocks[b];
      if (!block.resident()) continue;
      const bool referred = !block.holds.empty() || block.pinned || sealed_child[b];
      if (referred == (block.state == BlockState::kSealed)) continue;
      if (referred) {
        Uncache(b);
        block.never_reused = false;
        block.state = BlockState::kSealed;
        if (!block.last_generation()) SetOwner(b, taker);
      } else {
        Cache(b);
      }
      changed = true;
      break;  // the set of sealed blocks has changed
    }
  }
}

void Model::Free(uint32_t b) {
  Block& block = blocks[b];
  if (block.last_generation()) {
    const int owner = block.owner;
    block = {
        .generation = block.generation, .state = BlockState::kQuarantined, .retired = true, .owner = owner};
    return;
  }
  SetOwner(b, -1);
  block = {.generation = block.generation};
}

uint32_t Model::Victim() {
  std::vector<uint32_t> leaves = order_;
  std::erase_if(leaves, [&](uint32_t b) { return children(b) != 0; });
  // Blocks of the default priority are in the order of their use; others with one time of use by block id.
  std::stable_sort(leaves.begin(), leaves.end(), [&](uint32_t a, uint32_t b) {
    if (blocks[a].standing() != blocks[b].standing()) return blocks[a].standing() < blocks[b].standing();
    if (blocks[a].standing() == 50) return false;
    return std::pair(blocks[a].accessed, a) < std::pair(blocks[b].accessed, b);
  });
  if (leaves.empty()) return 0;
  if (!has_choices || choices.empty()) return leaves[0];
  const uint32_t choice = choices.front();
  choices.erase(choices.begin());
  const bool default_priority = blocks[leaves[0]].standing() == 50 && blocks[choice].standing() == 50;
  return default_priority && std::count(leaves.begin(), leaves.end(), choice) != 0 ? choice : leaves[0];
}

void Model::Evict(uint32_t b, EvictReason reason, std::vector<uint32_t>* log) {
  for (const ModelKey& key : blocks[b].keys) evicted[key] = {now, false};
  if (log != nullptr) log->push_back(b);
  if (reason == EvictReason::kDirect) direct_evictions.push_back(b);
  ++counters.evicted[static_cast<size_t>(reason)];
  Uncache(b);
  Free(b);
}

// ------------------------------------------------------------------------------------------------ the verbs

bool Model::Grow(uint32_t count) {
  return count <= options.max_blocks - end_block() && Enter({end_block(), end_block() + count});
}

bool Model::Enter(const BlockRange& range) {
  if (vacating() || range.first == 0 || range.first > range.end || range.end > options.max_blocks)
    return false;
  for (uint32_t b = range.first; b < std::min(range.end, end_block()); ++b) {
    if (blocks[b].there) return false;
  }
  while (range.size() > 0 && end_block() < range.end) {
    const auto gone = generations_.find(end_block());
    blocks.push_back({.generation = gone == generations_.end() ? 0 : gone->second, .there = false});
  }
  for (uint32_t b = range.first; b < range.end; ++b) blocks[b].there = true;
  return true;
}

int Model::AddSession(const SessionLimits& limits, uint32_t coming) {
  if (limits.max_blocks != 0 && limits.guaranteed > limits.max_blocks) return -1;
  const uint32_t unpromised = available() - promised();
  if (limits.guaranteed > unpromised + coming) return -1;
  int slot = static_cast<int>(sessions.size());
  if (unused_slots_.empty()) {
    sessions.emplace_back();
  } else {
    slot = unused_slots_.back();
    unused_slots_.pop_back();
  }
  sessions[slot] = {
      .phase = Phase::kOpen, .limits = limits, .promised = std::min(limits.guaranteed, unpromised)};
  return slot;
}

bool Model::Promise(int session) {
  if (!open(session)) return true;
  const uint32_t unpromised = available() - promised();
  sessions[session].promised += std::min(unmet(session), unpromised);
  return unmet(session) == 0;
}

void Model::EndSession(int session) {
  if (!open(session)) return;
  sessions[session].phase = Phase::kEnded;
  for (uint32_t b = 1; b < blocks.size(); ++b) {
    if (blocks[b].state == BlockState::kLeased && blocks[b].owner == session) {
      blocks[b].state = BlockState::kQuarantined;
    }
    if (blocks[b].last_generation() && blocks[b].owner == session) blocks[b].owner = -1;
  }
}

uint64_t Model::FreeQuarantine(int session) {
  if (sessions[session].phase != Phase::kEnded) return 0;
  uint64_t ended = 0;
  for (auto b = static_cast<uint32_t>(blocks.size()); b-- > 1;) {
    if (!blocks[b].holds.contains(session)) continue;
    ended += blocks[b].holds[session];
    blocks[b].holds.erase(session);
    if (blocks[b].state == BlockState::kQuarantined) Free(b);
    Settle(-1);
  }
  sessions[session].phase = Phase::kGone;
  if (charged(session) == 0) {
    sessions[session].phase = Phase::kUnused;
    unused_slots_.push_back(session);
  }
  return ended;
}

LeaseOutcome Model::Lease(int session, uint32_t count, uint32_t min, std::vector<BlockRef>* out) {
  if (!open(session)) return {.leased = 0, .shortfall = Shortfall::kCap};
  uint32_t n = std::min({count, CapRoom(session), Headroom(session)});
  Shortfall shortfall = Shortfall::kNone;
  if (n < count) {
    shortfall = n == CapRoom(session) ? Shortfall::kCap
                : available() > n     ? Shortfall::kCredit
                                      : Shortfall::kPressure;
    if (n < min) n = 0;
  }
  while (this->count(BlockState::kFree) < n) {
    const uint32_t victim = Victim();
    KVPOOL_CHECK(victim != 0, "the model has %u blocks available and no victim", available());
    Evict(victim, EvictReason::kDirect, nullptr);
  }
  const auto behind = [&] { return this->count(BlockState::kFree) - FreeToKeep(); };
  for (int i = 0; vacating() && behind() > 0 && FreeToKeep() < n && i < 64; ++i) {
    const uint32_t victim = Victim();
    if (victim == 0) break;
    Evict(victim, EvictReason::kDirect, nullptr);
  }
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t b = NextFree();
    const uint32_t generation =
        (blocks[b].generation == 0 ? options.first_generation : blocks[b].generation) + 1;
    blocks[b] = {
        .generation = generation, .state = BlockState::kLeased, .holds = {{session, 1}}, .owner = session};
    out->push_back({BlockId{b}, generation});
  }
  counters.leased += n;
  return {.leased = n, .shortfall = shortfall};
}

SealVerdict Model::HoldCanonical(int session, uint32_t b) {
  if (holds(session, b) == 0 && CapRoom(session) == 0) return {.verdict = Verdict::kOverCap};
  if (CreditNeed({b}) > Headroom(session)) return {.verdict = Verdict::kOverCredit};
  ++blocks[b].holds[session];
  blocks[b].accessed = now;
  Settle(session);
  ++counters.deduplicated;
  return {.verdict = Verdict::kDuplicate, .canonical = {BlockId{b}, blocks[b].generation}};
}

SealVerdict Model::SealOne(int session, BlockRef ref, const std::vector<ModelKey>& keys, bool leave_duplicate,
                           uint32_t parent) {
  if (!open(session)) return {.verdict = Verdict::kNotHeld};
  for (const ModelKey& key : keys) {
    if (key.group != keys[0].group) return {.verdict = Verdict::kWrongState};
  }
  if (keys.empty() || keys[0].group >= options.windows.size()) return {.verdict = Verdict::kWrongState};
  const Verdict verdict = Resolve(ref);
  if (verdict != Verdict::kDone) return {.verdict = verdict};
  const uint32_t b = Index(ref.id);
  if (blocks[b].state != BlockState::kLeased) return {.verdict = Verdict::kWrongState};
  if (blocks[b].owner != session) return {.verdict = Verdict::kNotHeld};
  if (const uint32_t canonical = Find(keys.back()); canonical != 0) {
    if (!leave_duplicate) return HoldCanonical(session, canonical);
    Touch({BlockId{canonical}, blocks[canonical].generation});
    ++counters.deduplicated;
    return {.verdict = Verdict::kDuplicate};
  }

  const bool linked = parent != 0 && options.windows[keys.back().group] == 0 &&
                      blocks[parent].keys[0].group == keys.back().group &&
                      CreditNeed({parent}) <= Headroom(session);
  blocks[b].state = BlockState::kSealed;
  blocks[b].parent = linked ? parent : 0;
  blocks[b].sealed = blocks[b].accessed = now;
  blocks[b].keys = {keys.back()};
  for (const ModelKey& key : keys) {
    if (Find(key) == 0) blocks[b].keys.push_back(key);
  }
  Settle(session);
  ++counters.sealed;
  return {.verdict = Verdict::kDone, .canonical = ref};
}

MissReason Model::CountMisses(const std::vector<Query>& queries, uint64_t step, uint64_t asked, uint64_t run,
                              uint64_t steps) {
  if (steps == asked) return MissReason::kNone;
  bool never_seen = false, was_evicted = false;
  for (const Query& q : queries) {
    const uint64_t per_step = step / q.tokens_per_block;
    const uint64_t window = options.windows[q.group];
    const uint64_t end = asked * per_step;
    const uint64_t begin = window == 0 ? run * per_step : end - std::min(end, window);
    bool first = true;
    for (uint64_t i = begin; i < end; ++i) {
      const ModelKey key = {q.group, q.numbers[i]};
      if (Find(key) != 0) continue;
      const auto it = evicted.find(key);
      if (window == 0 && first && steps == run && i < (run + 1) * per_step) {
        (it == evicted.end() ? never_seen : was_evicted) = true;
      }
      first = false;
      if (it == evicted.end() || it->second.second) continue;
      it->second.second = true;
      ++counters.regret;
    }
  }
  return was_evicted ? MissReason::kEvicted : never_seen ? MissReason::kNeverSeen : MissReason::kWindow;
}

MatchOutcome Model::Match(int session, const std::vector<Query>& queries) {
  MatchOutcome out;
  out.blocks.resize(queries.size());
  if (!open(session)) {
    out.miss = MissReason::kCap;
    return out;
  }
  ++counters.lookups;
  uint64_t step = 1, shortest = UINT64_MAX;
  for (const Query& q : queries) {
    step = std::lcm(step, uint64_t{q.tokens_per_block});
    shortest = std::min<uint64_t>(shortest, q.tokens_per_block * q.numbers.size());
    counters.lookup_blocks += q.numbers.size();
  }
  const uint64_t asked = shortest / step;
  counters.lookup_tokens += asked * step;
  // Which blocks a length reads, and whether all are resident, in all groups or only in those
  // with full attention.
  const auto read = [&](const Query& q, uint64_t steps) {
    const uint64_t end = steps * (step / q.tokens_per_block);
    const uint64_t window = options.windows[q.group];
    return std::pair<uint64_t, uint64_t>(window == 0 ? 0 : end - std::min(end, window), end);
  };
  const auto resident = [&](uint64_t steps, bool windowed_too) {
    for (const Query& q : queries) {
      if (options.windows[q.group] != 0 && !windowed_too) continue;
      const auto [begin, end] = read(q, steps);
      for (uint64_t i = begin; i < end; ++i) {
        if (Find({q.group, q.numbers[i]}) == 0) return false;
      }
    }
    return true;
  };
  uint64_t run = asked;
  while (!resident(run, false)) --run;
  uint64_t steps = run;
  while (!resident(steps, true)) --steps;
  out.miss = CountMisses(queries, step, asked, run, steps);

  for (; steps > 0; --steps) {
    if (!resident(steps, true)) continue;
    std::set<uint32_t> taken;
    for (const Query& q : queries) {
      const auto [begin, end] = read(q, steps);
      for (uint64_t i = begin; i < end; ++i) taken.insert(Find({q.group, q.numbers[i]}));
    }
    const auto distinct =
        std::count_if(taken.begin(), taken.end(), [&](uint32_t b) { return holds(session, b) == 0; });
    if (CreditNeed(taken) > Headroom(session)) {
      out.miss = MissReason::kCredit;
    } else if (static_cast<uint32_t>(distinct) > CapRoom(session)) {
      out.miss = MissReason::kCap;
    } else {
      break;
    }
  }
  for (size_t q = 0; q < queries.size(); ++q) {
    const auto [begin, end] = read(queries[q], steps);
    out.blocks[q].assign(begin, kNullRef);
    for (uint64_t i = begin; i < end; ++i) {
      const uint32_t b = Find({queries[q].group, queries[q].numbers[i]});
      ++blocks[b].holds[session];
      blocks[b].accessed = now;
      out.blocks[q].push_back({BlockId{b}, blocks[b].generation});
      ++counters.hit_blocks;
    }
  }
  Settle(session);
  out.tokens = steps * step;
  counters.hit_tokens += out.tokens;
  return out;
}

Verdict Model::Release(int session, BlockRef ref, bool never) {
  const Verdict verdict = Resolve(ref);
  if (verdict != Verdict::kDone) return verdict;
  const uint32_t b = Index(ref.id);
  if (!open(session) || holds(session, b) == 0) return Verdict::kNotHeld;
  if (--blocks[b].holds[session] == 0) blocks[b].holds.erase(session);
  ++counters.released;
  if (blocks[b].resident()) {
    blocks[b].accessed = now;
    if (never && refs(b) == 0) blocks[b].never_reused = true;
    Settle(-1);
  } else if (blocks[b].holds.empty()) {
    Free(b);
  }
  return Verdict::kDone;
}

Verdict Model::Ref(int session, BlockRef ref) {
  const Verdict verdict = Resolve(ref);
  if (verdict != Verdict::kDone) return verdict;
  if (!open(session) || holds(session, Index(ref.id)) == 0) return Verdict::kNotHeld;
  ++blocks[Index(ref.id)].holds[session];
  return Verdict::kDone;
}

bool Model::Touch(BlockRef ref) {
  if (Resolve(ref) != Verdict::kDone) return false;
  const uint32_t b = Index(ref.id);
  if (!blocks[b].resident()) return false;
  blocks[b].accessed = now;
  blocks[b].never_reused = false;
  if (blocks[b].state == BlockState::kCached) {
    Uncache(b);
    order_.push_back(b);
  }
  return true;
}

Verdict Model::Pin(BlockRef ref, TimeMs until) {
  const Verdict verdict = Resolve(ref);
  if (verdict != Verdict::kDone) return verdict;
  const uint32_t b = Index(ref.id);
  if (!blocks[b].resident()) return Verdict::kWrongState;
  std::set<uint32_t> chain;
  for (uint32_t p = b; p != 0; p = blocks[p].parent) chain.insert(p);
  const auto more = std::count_if(chain.begin(), chain.end(), [&](uint32_t p) { return !IsBudgeted(p); });
  if (more > 0 && budgeted() + more > pin_budget()) return Verdict::kOverPinBudget;
  if (CreditNeed(chain) > available() - promised()) return Verdict::kOverCredit;
  for (const uint32_t p : chain) {
    blocks[p].pin_until = blocks[p].pinned ? std::max(blocks[p].pin_until, until) : until;
    blocks[p].pinned = true;
  }
  Settle(-1);
  return Verdict::kDone;
}

void Model::EndPin(uint32_t b) {
  blocks[b].pinned = false;
  Settle(-1);
}

bool Model::Unpin(BlockRef ref) {
  if (Resolve(ref) != Verdict::kDone) return false;
  const uint32_t b = Index(ref.id);
  if (!blocks[b].pinned || HasPinnedChild(b)) return false;
  EndPin(b);
  return true;
}

bool Model::SetScore(BlockRef ref) {
  return Resolve(ref) == Verdict::kDone && blocks[Index(ref.id)].resident();
}

void Model::SetPriority(uint32_t b, const Retention& retention, TimeMs since) {
  Block& block = blocks[b];
  block.priority = retention.priority;
  block.retain_until = retention.until;
  block.half_life = retention.half_life_ms;
  block.retention_due =
      block.half_life == 0 ? block.retain_until : std::min(block.retain_until, since + block.half_life);
}

Verdict Model::SetRetention(BlockRef ref, const Retention& retention) {
  const Verdict verdict = Resolve(ref);
  if (verdict != Verdict::kDone) return verdict;
  const uint32_t b = Index(ref.id);
  if (!blocks[b].resident()) return Verdict::kWrongState;
  if (retention.priority > 50 && !IsBudgeted(b) && budgeted() >= pin_budget()) return Verdict::kOverPinBudget;
  SetPriority(b, retention, now);
  return Verdict::kDone;
}

// Ends them in the order of their times, then block ids, pins before priorities. A pin that a child keeps
// takes its turn again when the child's has ended.
void Model::Expire() {
  struct Due {
    TimeMs until;
    uint32_t block;
    bool retention;
    auto operator<=>(const Due&) const = default;
  };
  std::set<Due> due;
  for (uint32_t b = 1; b < blocks.size(); ++b) {
    if (blocks[b].pinned && blocks[b].pin_until <= now) due.insert({blocks[b].pin_until, b, false});
    if (blocks[b].priority != 50 && blocks[b].retention_due <= now)
      due.insert({blocks[b].retention_due, b, true});
  }
  while (!due.empty()) {
    const Due d = *due.begin();
    due.erase(due.begin());
    if (d.retention) {
      const Block block = blocks[d.block];
      const int distance = d.until < block.retain_until ? (block.priority - 50) / 2 : 0;
      SetPriority(d.block,
                  {.priority = static_cast<uint8_t>(50 + distance),
                   .until = block.retain_until,
                   .half_life_ms = block.half_life},
                  d.until);
      if (distance != 0 && blocks[d.block].retention_due <= now) {
        due.insert({blocks[d.block].retention_due, d.block, true});
      }
      continue;
    }
    if (HasPinnedChild(d.block)) continue;
    EndPin(d.block);
    const uint32_t parent = blocks[d.block].parent;
    if (blocks[parent].pinned && blocks[parent].pin_until <= now && !HasPinnedChild(parent)) {
      due.insert({blocks[parent].pin_until, parent, false});
    }
  }
}

uint32_t Model::FreeToKeep() const {
  uint32_t sum = 0;
  for (uint32_t b = 1; b < end_block(); ++b) sum += free(b) && !going_.contains(b) ? 1 : 0;
  return sum;
}

uint32_t Model::NextFree() const {
  const bool keeps = FreeToKeep() > 0;
  const uint32_t slab_blocks = options.slab_blocks == 0 ? options.max_blocks : options.slab_blocks;
  std::map<uint32_t, int> in_use;
  for (uint32_t b = 1; b < end_block(); ++b) {
    const BlockState state = blocks[b].state;
    in_use[b / slab_blocks] += blocks[b].there && state != BlockState::kFree &&
                               state != BlockState::kCached && state != BlockState::kWithheld;
  }
  // The first slab is before all, and then as many in use as have most binary digits.
  const auto rank = [&](uint32_t b) {
    if (b < slab_blocks || !keeps) return 0;
    int digits = 0;
    for (int blocks_in_use = in_use[b / slab_blocks]; blocks_in_use > 0; blocks_in_use /= 2) ++digits;
    return 100 - digits;
  };
  uint32_t next = 0;
  for (uint32_t b = 1; b < end_block(); ++b) {
    if (!free(b) || (keeps && going_.contains(b))) continue;
    if (next == 0 || rank(b) < rank(next)) next = b;
  }
  return next;
}

void Model::Vacate(const BlockRange& range) { going_ = range; }

bool Model::PutBack(uint32_t most) {
  for (; vacating() && most > 0; --most, ++going_.first) {
    if (blocks[going_.first].state == BlockState::kWithheld) blocks[going_.first].state = BlockState::kFree;
  }
  return vacating();
}

void Model::Withhold(uint32_t most) {
  for (uint32_t b = going_.first; b < going_.end; ++b) {
    if (!free(b) || most == 0 || available() <= promised()) continue;
    blocks[b].state = BlockState::kWithheld;
    --most;
  }
}

bool Model::Shrink() {
  if (!vacating() || count(BlockState::kWithheld) < going_.size()) return false;
  for (uint32_t b = going_.first; b < going_.end; ++b)
    blocks[b] = {.generation = blocks[b].generation, .there = false};
  while (blocks.size() > 1 && !blocks.back().there) {
    generations_[end_block() - 1] = blocks.back().generation;
    blocks.pop_back();
  }
  going_ = {};
  return true;
}

bool Model::Move(int session, BlockRef from, BlockRef to) {
  const uint32_t f = Index(from.id), t = Index(to.id);
  if (!open(session) || !vacating() || !going_.contains(f)) return false;
  if (blocks[f].state != BlockState::kCached || blocks[f].generation != from.generation) return false;
  if (t == 0 || t >= end_block() || blocks[t].generation != to.generation || blocks[f].last_generation())
    return false;
  if (blocks[t].state != BlockState::kLeased || blocks[t].owner != session || holds(session, t) != 1)
    return false;
  const Block old = blocks[f];
  Block& block = blocks[t];
  block.keys = old.keys;
  block.parent = old.parent;
  block.sealed = old.sealed;
  block.accessed = old.accessed;
  block.never_reused = old.never_reused;
  block.holds.clear();
  if (old.priority != 50)
    SetPriority(t, {.priority = old.priority, .until = old.retain_until, .half_life_ms = old.half_life}, now);
  for (Block& child : blocks) {
    if (child.resident() && child.parent == f) child.parent = t;
  }
  Uncache(f);
  Free(f);
  Cache(t);
  ++counters.moved;
  return true;
}

uint32_t Model::Reclaim(uint32_t count, EvictReason reason, std::vector<uint32_t>* log) {
  const uint32_t before = this->count(BlockState::kFree);
  while (this->count(BlockState::kFree) - before < count) {
    const uint32_t b = Victim();
    if (b == 0) break;
    Evict(b, reason, log);
  }
  return this->count(BlockState::kFree) - before;
}

uint32_t Model::Reclaim(const std::vector<BlockRef>& victims, EvictReason reason,
                        std::vector<uint32_t>* log) {
  const uint32_t before = count(BlockState::kFree);
  std::set<uint32_t> listed;
  for (const BlockRef& ref : victims) {
    if (Resolve(ref) == Verdict::kDone && blocks[Index(ref.id)].state == BlockState::kCached) {
      listed.insert(Index(ref.id));
    }
  }
  for (const BlockRef& ref : victims) {
    for (uint32_t b = Index(ref.id); listed.contains(b) && children(b) == 0;) {
      const uint32_t parent = blocks[b].parent;
      listed.erase(b);
      Evict(b, reason, log);
      b = parent;
    }
  }
  return count(BlockState::kFree) - before;
}

}  // namespace kvpool
