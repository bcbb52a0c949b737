#include "server/pool/match_lookup.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace kvpool {
namespace {

constexpr size_t kLookupChunk = 32;

}  // namespace

MatchLookup::MatchLookup(const PoolRep& rep, absl::Span<const GroupQuery> queries, MatchScratch* scratch)
    : r_(rep), queries_(queries), scratch_(*scratch) {
  if (scratch_.found.size() < queries.size()) scratch_.found.resize(queries.size());
  if (scratch_.steps.size() < queries.size()) scratch_.steps.resize(queries.size());
  if (scratch_.runs.size() < queries.size()) scratch_.runs.resize(queries.size());
}

bool MatchLookup::Measure() {
  if (queries_.empty()) return false;
  for (const GroupQuery& q : queries_) {
    if (q.group >= r_.options.windows.size() || q.tokens_per_block == 0) return false;
  }
  // Nearly always there is one query, and divisions are most of what a short match would cost.
  if (queries_.size() == 1) {
    scratch_.steps[0] = 1;
    step_tokens_ = queries_[0].tokens_per_block;
    asked_steps_ = queries_[0].keys.size();
  } else {
    uint64_t shortest = UINT64_MAX;
    for (const GroupQuery& q : queries_) {
      shortest = std::min<uint64_t>(shortest, uint64_t{q.tokens_per_block} * q.keys.size());
    }
    std::fill_n(scratch_.steps.begin(), queries_.size(), 1);
    unsigned __int128 step = 1;
    for (const GroupQuery& q : queries_) {
      step = step / std::gcd(static_cast<uint64_t>(step), uint64_t{q.tokens_per_block}) * q.tokens_per_block;
      if (step > shortest) break;  // Less than one step was asked for.
    }
    if (step <= shortest) {
      step_tokens_ = static_cast<uint64_t>(step);
      asked_steps_ = shortest / step_tokens_;
      for (size_t q = 0; q < queries_.size(); ++q) {
        scratch_.steps[q] = step_tokens_ / queries_[q].tokens_per_block;
      }
    }
  }
  steps_ = run_steps_ = asked_steps_;
  for (size_t q = 0; q < queries_.size(); ++q) {
    scratch_.found[q].assign(asked_steps_ * BlocksPerStep(q), kUnknown);
    run(q) = {0, 0};
  }
  return true;
}

uint64_t MatchLookup::First(size_t q, uint64_t steps) const {
  const uint64_t blocks = steps * BlocksPerStep(q);
  return window(q) == 0 || blocks <= window(q) ? 0 : blocks - window(q);
}

bool MatchLookup::Advance(uint64_t keys) {
  budget_ = keys;
  for (; leading_ < queries_.size(); ++leading_, leading_at_ = 0) {
    if (window(leading_) == 0 && !LeadingRun(leading_)) return false;
  }
  return LongestWindowed();
}

// Looks up the keys [begin, end) of query q that were not looked up yet.
void MatchLookup::Resolve(size_t q, uint64_t begin, uint64_t end) {
  std::vector<uint32_t>& ids = scratch_.found[q];
  const absl::Span<const BlockKey> keys = queries_[q].keys;
  std::array<uint64_t, kLookupChunk> hashes;
  for (uint64_t at = begin; at < end; at += kLookupChunk) {
    std::array<uint64_t, kLookupChunk> unknown;
    uint64_t n = 0;
    for (uint64_t i = at; i < std::min(at + kLookupChunk, end); ++i) {
      if (ids[i] != kUnknown) continue;
      unknown[n] = i;
      hashes[n] = HashKey(keys[i]);
      r_.index.PrefetchBucket(hashes[n++]);
    }
    for (uint64_t i = 0; i < n; ++i) r_.index.PrefetchRecord(hashes[i]);
    for (uint64_t i = 0; i < n; ++i) ids[unknown[i]] = r_.index.Find(hashes[i], keys[unknown[i]]);
    for (uint64_t i = 0; i < n && r_.doubted > 0; ++i) {
      uint32_t& b = ids[unknown[i]];
      if (r_.records[b].has(BlockRecord::kDoubted)) b = 0;
    }
    budget_ -= std::min(budget_, n);
  }
}

// Shortens steps_ and run_steps_ to the leading steps whose blocks of query q are all resident. False: the budget
// is spent.
bool MatchLookup::LeadingRun(size_t q) {
  const uint64_t blocks = run_steps_ * BlocksPerStep(q);
  while (leading_at_ < blocks) {
    if (budget_ == 0) return false;
    const uint64_t end = std::min<uint64_t>(leading_at_ + kLookupChunk, blocks);
    Resolve(q, leading_at_, end);
    for (; leading_at_ < end; ++leading_at_) {
      if (scratch_.found[q][leading_at_] != 0) continue;
      steps_ = run_steps_ = BlocksPerStep(q) == 1 ? leading_at_ : leading_at_ / BlocksPerStep(q);
      return true;
    }
  }
  return true;
}

// Shortens steps_ to the most steps at whose end every windowed group has its last window. False: the budget is
// spent, and what was found is remembered.
bool MatchLookup::LongestWindowed() {
  for (size_t q = 0; q < queries_.size() && steps_ > 0;) {
    const uint64_t before = steps_;
    if (window(q) != 0) {
      const uint64_t first = First(q, steps_);
      auto& [run_begin, run_end] = run(q);
      uint64_t end = steps_ * BlocksPerStep(q);
      if (end <= run_begin || end > run_end) run_begin = run_end = end;
      end = std::max(first, run_begin);
      while (end > first) {
        if (budget_ == 0) {
          run_begin = std::min(run_begin, end);
          return false;
        }
        const uint64_t begin = end - first > kLookupChunk ? end - kLookupChunk : first;
        Resolve(q, begin, end);
        while (end > begin && scratch_.found[q][end - 1] != 0) --end;
        if (end > begin) break;
      }
      run_begin = std::min(run_begin, end);
      // Block end - 1 is missing, and every length that reaches beyond it, up to steps_, needs it.
      if (end > first) steps_ = (end - 1) / BlocksPerStep(q);
    }
    // A shorter length must suit the earlier queries again.
    q = steps_ == before ? q + 1 : 0;
  }
  return true;
}

MissReason MatchLookup::WhyNotLonger() {
  if (steps_ == asked_steps_) return MissReason::kNone;
  if (steps_ != run_steps_) return MissReason::kWindow;
  // Several groups may end here, for different reasons. An eviction is reported first: one can act on it.
  MissReason reason = MissReason::kWindow;
  for (size_t q = 0; q < queries_.size(); ++q) {
    if (window(q) != 0) continue;
    const uint64_t begin = run_steps_ * BlocksPerStep(q), end = begin + BlocksPerStep(q);
    Resolve(q, begin, end);
    for (uint64_t i = begin; i < end; ++i) {
      if (scratch_.found[q][i] != 0) continue;
      if (r_.ghosts.Find(HashKey(queries_[q].keys[i])) != nullptr) return MissReason::kEvicted;
      reason = MissReason::kNeverSeen;
      break;
    }
  }
  return reason;
}

}  // namespace kvpool
