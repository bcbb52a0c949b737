// Match finds how long a prefix is resident in every group, then how much of it the session's credit and cap
// cover, and only then takes holds.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "server/pool/block_pool.h"
#include "server/pool/match_lookup.h"
#include "server/pool/match_search.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

constexpr size_t kChunk = 32;

}  // namespace

class PoolRep::Matching {
 public:
  Matching(PoolRep* rep, Holder session, absl::Span<const GroupQuery> queries)
      : r_(*rep),
        holder_(session),
        session_(*rep->OpenSession(session)),
        queries_(queries),
        lookup_(*rep, queries, &rep->scratch_match) {}

  void Run(MatchOutcome* out);
  // Counts keys that were asked for behind the end of a prefix.
  static void CountMissed(PoolRep* rep, absl::Span<const BlockKey> keys);

 private:
  // The cost of holding a selection of blocks.
  struct Cost {
    // Available blocks that it takes.
    uint32_t credit = 0;
    // Blocks that the session does not hold yet.
    uint32_t distinct = 0;
    // Blocks that the session would hold more than kMaxHolds times.
    uint32_t overflows = 0;
  };
  class Window;

  uint64_t BlocksPerStep(size_t q) const { return lookup_.BlocksPerStep(q); }
  uint32_t window(size_t q) const { return lookup_.window(q); }
  const std::vector<uint32_t>& found(size_t q) const { return lookup_.found(q); }
  uint64_t First(size_t q, uint64_t steps) const { return lookup_.First(q, steps); }
  void CountMisses();
  bool SurelyCovered(uint64_t steps);
  uint64_t Affordable(uint64_t steps, MissReason* miss);
  std::vector<Cost> FullCosts(uint64_t steps);
  // Counts the key's eviction as regretted, once, unless the key is resident again.
  static void Regret(PoolRep* rep, uint64_t hash, const BlockKey& key);
  void Take(uint64_t steps, MatchOutcome* out);

  PoolRep& r_;
  const Holder holder_;
  const Session& session_;
  const absl::Span<const GroupQuery> queries_;
  MatchLookup lookup_;
};

void PoolRep::Matching::Regret(PoolRep* rep, uint64_t hash, const BlockKey& key) {
  PastContents::Past* const ghost = rep->ghosts.Find(hash);
  if (ghost == nullptr || ghost->number() != 0 || rep->index.Find(hash, key) != 0) return;
  ghost->set_number(1);
  ++rep->counters.regret;
}

void PoolRep::Matching::CountMissed(PoolRep* rep, absl::Span<const BlockKey> keys) {
  std::array<uint64_t, kChunk> hashes;
  for (; !keys.empty(); keys.remove_prefix(std::min(kChunk, keys.size()))) {
    const size_t n = std::min(kChunk, keys.size());
    for (size_t i = 0; i < n; ++i) {
      hashes[i] = HashKey(keys[i]);
      rep->ghosts.Prefetch(hashes[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      rep->reuse.Ask(hashes[i], rep->now_ms);
      Regret(rep, hashes[i], keys[i]);
    }
  }
}

// Counts the evicted keys that the asked prefix would have needed.
void PoolRep::Matching::CountMisses() {
  for (size_t q = 0; q < queries_.size(); ++q) {
    const uint64_t begin =
        window(q) == 0 ? lookup_.run_steps() * BlocksPerStep(q) : First(q, lookup_.asked_steps());
    const uint64_t end = lookup_.asked_steps() * BlocksPerStep(q);
    CountMissed(&r_, queries_[q].keys.subspan(begin, end - begin));
  }
}

// A quick test that credit and cap cover all of it; false: they may still.
bool PoolRep::Matching::SurelyCovered(uint64_t steps) {
  uint64_t blocks = 0;
  uint64_t cached = 0;
  for (size_t q = 0; q < queries_.size(); ++q) {
    const std::vector<uint32_t>& ids = found(q);
    const uint64_t first = First(q, steps);
    const uint64_t end = steps * BlocksPerStep(q);
    blocks += end - first;
    for (uint64_t i = first; i < end; ++i) {
      const BlockRecord& record = r_.records[ids[i]];
      if (record.state() != BlockState::kCached) continue;
      ++cached;
      const bool parent_is_asked = record.parent == 0 || (i > first && record.parent == ids[i - 1]);
      if (!parent_is_asked && r_.records[record.parent].state() == BlockState::kCached) return false;
    }
  }
  return cached <= r_.Headroom(session_) && blocks <= CapRoom(session_) &&
         (blocks + kManyHolds <= kMaxHolds && !session_.many_holds);
}

// The cost of holding the leading runs, indexed by their number of steps. Those that credit does not cover by
// far, or that are too far behind what is held, cost as much as nobody has.
std::vector<PoolRep::Matching::Cost> PoolRep::Matching::FullCosts(uint64_t steps) {
  const uint32_t headroom = r_.Headroom(session_);
  std::vector<Cost> costs(steps + 1, Cost{.credit = UINT32_MAX});
  costs[0] = {};
  absl::flat_hash_set<uint32_t> taken;
  absl::flat_hash_map<uint32_t, uint32_t> named;
  Cost cost;
  for (uint64_t step = 1; step <= steps; ++step) {
    for (size_t q = 0; q < queries_.size(); ++q) {
      if (window(q) != 0) continue;
      for (uint64_t i = (step - 1) * BlocksPerStep(q); i < step * BlocksPerStep(q); ++i) {
        const uint32_t b = found(q)[i];
        const uint32_t times = ++named[b];
        const uint32_t holds = session_.holds.count(b);
        if (times == 1 && holds == 0) ++cost.distinct;
        if (holds + times > kMaxHolds) ++cost.overflows;
        for (uint32_t p = b; p != 0 && r_.records[p].state() == BlockState::kCached;
             p = r_.records[p].parent) {
          if (!taken.insert(p).second) break;
          if (!r_.records[p].last_generation()) ++cost.credit;
          if (p == b) continue;
          if (cost.credit > headroom || r_.steps_left == 0) return costs;
          --r_.steps_left;
        }
      }
    }
    if (cost.credit > headroom) break;
    costs[step] = cost;
  }
  return costs;
}

// The cost of holding the windows, for fewer and fewer steps: each block enters and leaves the sum once.
class PoolRep::Matching::Window {
 public:
  explicit Window(Matching* matching) : m_(*matching), spans_(matching->queries_.size()) {}

  // REQUIRES: never more steps than before; every window is resident at this length.
  Cost MoveTo(uint64_t steps) {
    for (size_t q = 0; q < spans_.size(); ++q) {
      if (m_.window(q) == 0) continue;
      const Span next = {m_.First(q, steps), steps * m_.BlocksPerStep(q)};
      Span& now = spans_[q];
      if (now.begin == now.end) now = {next.end, next.end};
      for (uint64_t i = next.begin; i < std::min(now.begin, next.end); ++i) Name(m_.found(q)[i]);
      for (uint64_t i = std::max(next.end, now.begin); i < now.end; ++i) Unname(m_.found(q)[i]);
      now = next;
    }
    return cost_;
  }

 private:
  struct Span {
    uint64_t begin = 0, end = 0;
  };
  bool Takes(uint32_t b) const {
    const BlockRecord& record = m_.r_.records[b];
    return record.state() == BlockState::kCached && !record.last_generation();
  }
  void Name(uint32_t b) {
    const uint32_t times = ++named_[b];
    const uint32_t holds = m_.session_.holds.count(b);
    if (times == 1 && holds == 0) ++cost_.distinct;
    if (times == 1 && Takes(b)) ++cost_.credit;
    if (holds + times > kMaxHolds) ++cost_.overflows;
  }
  void Unname(uint32_t b) {
    const uint32_t times = named_[b]--;
    const uint32_t holds = m_.session_.holds.count(b);
    if (holds + times > kMaxHolds) --cost_.overflows;
    if (times == 1 && holds == 0) --cost_.distinct;
    if (times == 1 && Takes(b)) --cost_.credit;
  }

  Matching& m_;
  std::vector<Span> spans_;
  absl::flat_hash_map<uint32_t, uint32_t> named_;
  Cost cost_;
};

// The most steps, at most `steps`, that are resident and that credit and cap cover.
uint64_t PoolRep::Matching::Affordable(uint64_t steps, MissReason* miss) {
  const std::vector<Cost> full = FullCosts(steps);
  const uint32_t headroom = r_.Headroom(session_);
  const uint32_t cap_room = CapRoom(session_);
  Window window(this);
  while (steps > 0) {
    const Cost windowed = window.MoveTo(steps);
    const bool credit = uint64_t{full[steps].credit} + windowed.credit <= headroom;
    const bool cap = uint64_t{full[steps].distinct} + windowed.distinct <= cap_room &&
                     full[steps].overflows + windowed.overflows == 0;
    if (credit && cap) return steps;
    *miss = credit ? MissReason::kCap : MissReason::kCredit;
    lookup_.Shorten(steps - 1);
    lookup_.Advance(UINT64_MAX);
    steps = lookup_.steps();
  }
  return 0;
}

void PoolRep::Matching::Take(uint64_t steps, MatchOutcome* out) {
  Session& s = *r_.OpenSession(holder_);
  const auto now32 = static_cast<uint32_t>(r_.now_ms);
  for (size_t q = 0; q < queries_.size(); ++q) {
    std::vector<BlockRef>& refs = out->blocks[q];
    const std::vector<uint32_t>& ids = found(q);
    const uint64_t first = First(q, steps);
    const uint64_t end = steps * BlocksPerStep(q);
    refs.assign(first, kNullRef);
    refs.reserve(end);
    for (uint64_t i = first; i < end; ++i) {
      s.holds.Prefetch(ids[i]);
    }
    for (uint64_t i = first; i < end; ++i) {
      BlockRecord& record = r_.records[ids[i]];
      r_.reuse.Ask(HashKey(queries_[q].keys[i]), r_.now_ms);
      r_.AddRef(ids[i], holder_);
      r_.AddHold(&s, ids[i]);
      record.accessed_ms = now32;
      r_.policy.OnHit(BlockId{ids[i]}, r_.now_ms);
      refs.push_back(r_.RefOf(ids[i]));
    }
    r_.counters.hit_blocks += end - first;
  }
  out->tokens = steps * lookup_.step_tokens();
}

void PoolRep::Matching::Run(MatchOutcome* out) {
  if (!lookup_.Measure()) {
    out->miss = queries_.empty() ? MissReason::kNone : MissReason::kNeverSeen;
    return;
  }
  out->asked_tokens = lookup_.asked_steps() * lookup_.step_tokens();
  lookup_.Advance(UINT64_MAX);
  uint64_t steps = lookup_.steps();
  out->miss = lookup_.WhyNotLonger();
  if (out->miss != MissReason::kNone) CountMisses();
  if (!SurelyCovered(steps)) steps = Affordable(steps, &out->miss);
  Take(steps, out);
}

void BlockPool::Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out) {
  MatchOn(session, now, queries, out);
  if (rep_->OpenSession(session) == nullptr) return;
  LookupCounts counts{.tokens = out->asked_tokens, .hit_tokens = out->tokens};
  for (const GroupQuery& query : queries) counts.blocks += query.keys.size();
  CountLookup(counts);
}

void BlockPool::MatchOn(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out) {
  rep_->Match(session, now, queries, out);
}

void BlockPool::CountMissed(TimeMs now, absl::Span<const BlockKey> keys) {
  rep_->BeginVerb(now, keys.size());
  Rep::Matching::CountMissed(rep_.get(), keys);
}

void BlockPool::CountLookup(const LookupCounts& counts) {
  PoolCounters& all = rep_->counters;
  ++all.lookups;
  all.lookup_blocks += counts.blocks;
  all.lookup_tokens += counts.tokens;
  all.hit_tokens += counts.hit_tokens;
}

void PoolRep::Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out) {
  size_t names = 0;
  for (const GroupQuery& query : queries) names += query.keys.size();
  BeginVerb(now, names);
  out->tokens = out->asked_tokens = 0;
  out->miss = MissReason::kNone;
  out->blocks.resize(queries.size());
  for (std::vector<BlockRef>& refs : out->blocks) refs.clear();
  if (OpenSession(session) == nullptr) {
    out->miss = MissReason::kCap;
    return;
  }
  Matching(this, session, queries).Run(out);
}

struct MatchSearch::Rep {
  Rep(const PoolRep& pool, absl::Span<const GroupQuery> queries) : lookup(pool, queries, &scratch) {
    lookup.Measure();
  }
  MatchScratch scratch;
  MatchLookup lookup;
};

MatchSearch::MatchSearch(const BlockPool& pool, absl::Span<const GroupQuery> queries)
    : rep_(std::make_unique<Rep>(*pool.rep_, queries)) {}
MatchSearch::~MatchSearch() = default;

bool MatchSearch::Look(uint64_t keys) { return rep_->lookup.Advance(keys); }
void MatchSearch::Shorten(uint64_t steps) { rep_->lookup.Shorten(steps); }
uint64_t MatchSearch::steps() const { return rep_->lookup.steps(); }
uint64_t MatchSearch::asked_steps() const { return rep_->lookup.asked_steps(); }
uint64_t MatchSearch::step_tokens() const { return rep_->lookup.step_tokens(); }
uint64_t MatchSearch::BlocksPerStep(size_t q) const { return rep_->lookup.BlocksPerStep(q); }
uint32_t MatchSearch::window(size_t q) const { return rep_->lookup.window(q); }
uint64_t MatchSearch::First(size_t q, uint64_t steps) const { return rep_->lookup.First(q, steps); }
MissReason MatchSearch::WhyNotLonger() { return rep_->lookup.WhyNotLonger(); }

}  // namespace kvpool
