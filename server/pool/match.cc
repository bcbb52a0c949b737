// Match finds how long a prefix is resident in every group, then how much of it the session's credit and cap
// cover, and only then takes holds.
#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

constexpr uint32_t kUnknown = UINT32_MAX;
constexpr size_t kChunk = 32;

}  // namespace

// Lengths are counted in steps. A step is the least number of tokens that is a whole number of blocks in
// every group.
class PoolRep::Matching {
 public:
  Matching(PoolRep* rep, Holder session, absl::Span<const GroupQuery> queries)
      : r_(*rep), holder_(session), session_(*rep->OpenSession(session)), queries_(queries) {
    if (r_.scratch_match.size() < queries.size()) r_.scratch_match.resize(queries.size());
    if (r_.scratch_steps.size() < queries.size()) r_.scratch_steps.resize(queries.size());
    if (r_.scratch_runs.size() < queries.size()) r_.scratch_runs.resize(queries.size());
  }

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

  bool MeasureSteps();
  uint64_t BlocksPerStep(size_t q) const { return r_.scratch_steps[q]; }
  uint32_t window(size_t q) const { return r_.options.windows[queries_[q].group]; }
  std::vector<uint32_t>& found(size_t q) { return r_.scratch_match[q]; }
  // Blocks of the query that LongestWindowed has found resident, last: it need not look at them again.
  std::pair<uint64_t, uint64_t>& run(size_t q) { return r_.scratch_runs[q]; }
  // The first block of query q that a prefix of this many steps reads.
  uint64_t First(size_t q, uint64_t steps) const;
  void Resolve(size_t q, uint64_t begin, uint64_t end);
  uint64_t LeadingRun(size_t q, uint64_t limit);
  uint64_t LongestWindowed(uint64_t steps);
  MissReason CountMisses(uint64_t run_steps, uint64_t steps);
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
  uint64_t step_tokens_ = 1;
  uint64_t asked_steps_ = 0;
};

// False: there is no query, or one that can't be answered.
bool PoolRep::Matching::MeasureSteps() {
  if (queries_.empty()) return false;
  for (const GroupQuery& q : queries_) {
    if (q.group >= r_.options.windows.size() || q.tokens_per_block == 0) return false;
  }
  // Nearly always there is one query, and divisions are most of what a short match would cost.
  if (queries_.size() == 1) {
    r_.scratch_steps[0] = 1;
    step_tokens_ = queries_[0].tokens_per_block;
    asked_steps_ = queries_[0].keys.size();
    return true;
  }
  uint64_t shortest = UINT64_MAX;
  for (const GroupQuery& q : queries_) {
    shortest = std::min<uint64_t>(shortest, uint64_t{q.tokens_per_block} * q.keys.size());
  }
  for (const GroupQuery& q : queries_) {
    const auto step =
        static_cast<unsigned __int128>(step_tokens_ / std::gcd(step_tokens_, q.tokens_per_block)) *
        q.tokens_per_block;
    // Less than one step was asked for.
    if (step > shortest) {
      std::fill_n(r_.scratch_steps.begin(), queries_.size(), 1);
      return true;
    }
    step_tokens_ = static_cast<uint64_t>(step);
  }
  asked_steps_ = shortest / step_tokens_;
  for (size_t q = 0; q < queries_.size(); ++q) {
    r_.scratch_steps[q] = step_tokens_ / queries_[q].tokens_per_block;
  }
  return true;
}

uint64_t PoolRep::Matching::First(size_t q, uint64_t steps) const {
  const uint64_t blocks = steps * BlocksPerStep(q);
  return window(q) == 0 || blocks <= window(q) ? 0 : blocks - window(q);
}

// Looks up the keys [begin, end) of query q that were not looked up yet.
void PoolRep::Matching::Resolve(size_t q, uint64_t begin, uint64_t end) {
  std::vector<uint32_t>& ids = found(q);
  const absl::Span<const BlockKey> keys = queries_[q].keys;
  std::array<uint64_t, kChunk> hashes;
  for (uint64_t at = begin; at < end; at += kChunk) {
    const uint64_t n = std::min<uint64_t>(kChunk, end - at);
    for (uint64_t i = 0; i < n; ++i) {
      hashes[i] = HashKey(keys[at + i]);
      r_.index.PrefetchBucket(hashes[i]);
    }
    for (uint64_t i = 0; i < n; ++i) r_.index.PrefetchRecord(hashes[i]);
    for (uint64_t i = 0; i < n; ++i) {
      if (ids[at + i] == kUnknown) ids[at + i] = r_.index.Find(hashes[i], keys[at + i]);
    }
  }
}

// The number of leading steps, at most `limit`, whose blocks are all resident.
uint64_t PoolRep::Matching::LeadingRun(size_t q, uint64_t limit) {
  const uint64_t blocks = limit * BlocksPerStep(q);
  for (uint64_t at = 0; at < blocks; at += kChunk) {
    const uint64_t end = std::min<uint64_t>(at + kChunk, blocks);
    Resolve(q, at, end);
    for (uint64_t i = at; i < end; ++i) {
      if (found(q)[i] == 0) return BlocksPerStep(q) == 1 ? i : i / BlocksPerStep(q);
    }
  }
  return limit;
}

// The most steps, at most `steps`, at whose end every windowed group has its last window.
uint64_t PoolRep::Matching::LongestWindowed(uint64_t steps) {
  for (size_t q = 0; q < queries_.size() && steps > 0;) {
    const uint64_t before = steps;
    if (window(q) != 0) {
      const uint64_t first = First(q, steps);
      auto& [run_begin, run_end] = run(q);
      uint64_t end = steps * BlocksPerStep(q);
      if (end <= run_begin || end > run_end) run_begin = run_end = end;
      end = std::max(first, run_begin);
      while (end > first) {
        const uint64_t begin = end - first > kChunk ? end - kChunk : first;
        Resolve(q, begin, end);
        while (end > begin && found(q)[end - 1] != 0) --end;
        if (end > begin) break;
      }
      run_begin = std::min(run_begin, end);
      // Block end - 1 is missing, and every length that reaches beyond it, up to `steps`, needs it.
      if (end > first) steps = (end - 1) / BlocksPerStep(q);
    }
    // A shorter length must suit the earlier queries again.
    q = steps == before ? q + 1 : 0;
  }
  return steps;
}

void PoolRep::Matching::Regret(PoolRep* rep, uint64_t hash, const BlockKey& key) {
  GhostTable::Ghost* const ghost = rep->ghosts.Find(hash);
  if (ghost == nullptr || ghost->regretted || rep->index.Find(hash, key) != 0) return;
  ghost->regretted = true;
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
    for (size_t i = 0; i < n; ++i) Regret(rep, hashes[i], keys[i]);
  }
}

// Answers why no more than `steps` are resident, and counts the evicted keys that the asked prefix would have
// needed. `run_steps` is where the leading runs end.
MissReason PoolRep::Matching::CountMisses(uint64_t run_steps, uint64_t steps) {
  if (steps == asked_steps_) return MissReason::kNone;
  MissReason reason = MissReason::kWindow;
  for (size_t q = 0; q < queries_.size(); ++q) {
    const absl::Span<const BlockKey> keys = queries_[q].keys;
    const uint64_t begin = window(q) == 0 ? run_steps * BlocksPerStep(q) : First(q, asked_steps_);
    const uint64_t end = asked_steps_ * BlocksPerStep(q);
    if (window(q) == 0 && steps == run_steps) {
      Resolve(q, begin, begin + BlocksPerStep(q));
      for (uint64_t i = begin; i < begin + BlocksPerStep(q); ++i) {
        if (found(q)[i] != 0) continue;
        // Several groups may end here, for different reasons. An eviction is reported first: one can
        // act on it.
        if (r_.ghosts.Find(HashKey(keys[i])) != nullptr) reason = MissReason::kEvicted;
        if (reason != MissReason::kEvicted) reason = MissReason::kNeverSeen;
        break;
      }
    }
    CountMissed(&r_, keys.subspan(begin, end - begin));
  }
  return reason;
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
    steps = LongestWindowed(steps - 1);
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
      r_.AddRef(ids[i], holder_);
      r_.AddHold(&s, ids[i]);
      r_.records[ids[i]].accessed_ms = now32;
      r_.policy.OnHit(BlockId{ids[i]}, r_.now_ms);
      refs.push_back(r_.RefOf(ids[i]));
    }
    r_.counters.hit_blocks += end - first;
  }
  out->tokens = steps * step_tokens_;
}

void PoolRep::Matching::Run(MatchOutcome* out) {
  if (!MeasureSteps()) {
    out->miss = queries_.empty() ? MissReason::kNone : MissReason::kNeverSeen;
    return;
  }
  for (size_t q = 0; q < queries_.size(); ++q) {
    found(q).assign(asked_steps_ * BlocksPerStep(q), kUnknown);
    run(q) = {0, 0};
    r_.counters.lookup_blocks += queries_[q].keys.size();
  }
  r_.counters.lookup_tokens += asked_steps_ * step_tokens_;
  uint64_t run_steps = asked_steps_;
  for (size_t q = 0; q < queries_.size(); ++q) {
    if (window(q) == 0) run_steps = LeadingRun(q, run_steps);
  }
  uint64_t steps = LongestWindowed(run_steps);
  out->miss = CountMisses(run_steps, steps);
  if (!SurelyCovered(steps)) steps = Affordable(steps, &out->miss);
  Take(steps, out);
  r_.counters.hit_tokens += out->tokens;
}

void BlockPool::Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out) {
  if (rep_->OpenSession(session) != nullptr) ++rep_->counters.lookups;
  rep_->Match(session, now, queries, out);
}

void BlockPool::MatchOn(Holder session, TimeMs now, const GroupQuery& query, MatchOutcome* out) {
  rep_->Match(session, now, {&query, 1}, out);
}

void BlockPool::CountMissed(TimeMs now, const GroupQuery& query) {
  rep_->BeginVerb(now, query.keys.size());
  rep_->counters.lookup_blocks += query.keys.size();
  rep_->counters.lookup_tokens += query.keys.size() * query.tokens_per_block;
  Rep::Matching::CountMissed(rep_.get(), query.keys);
}

void PoolRep::Match(Holder session, TimeMs now, absl::Span<const GroupQuery> queries, MatchOutcome* out) {
  size_t names = 0;
  for (const GroupQuery& query : queries) names += query.keys.size();
  BeginVerb(now, names);
  out->tokens = 0;
  out->miss = MissReason::kNone;
  out->blocks.resize(queries.size());
  for (std::vector<BlockRef>& refs : out->blocks) refs.clear();
  if (OpenSession(session) == nullptr) {
    out->miss = MissReason::kCap;
    return;
  }
  Matching(this, session, queries).Run(out);
}

}  // namespace kvpool
