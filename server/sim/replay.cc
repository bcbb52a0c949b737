#include "server/sim/replay.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policies/async_policy.h"
#include "server/replacement/policy.h"
#include "server/sim/timed_policy.h"

namespace kvpool::sim {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

BlockKey KeyOf(uint32_t content) {
  BlockKey key{.bytes = {}};
  std::memcpy(key.bytes.data(), &content, sizeof(content));
  return key;
}

// An engine that serves one request at a time. A policy that decides outside the lock is asked ahead of the
// lease, as the daemon does it; others are asked as the lease goes.
class Engine {
 public:
  // The time that decisions take is added to *decision_ns.
  Engine(BlockPool* pool, double* decision_ns)
      : pool_(*pool), decision_ns_(*decision_ns), session_(*pool->AddSession({})) {}

  // Serves a request for the first `asked` blocks of the chain and answers how many leading ones were
  // resident. `hints` is empty or parallel to the chain.
  uint64_t Serve(uint64_t now_ms, absl::Span<const uint32_t> chain, uint32_t asked,
                 absl::Span<const UseHint> hints) {
    keys_.clear();
    for (const uint32_t content : chain) keys_.push_back(KeyOf(content));
    const GroupQuery query = {.group = 0, .keys = absl::MakeConstSpan(keys_).subspan(0, asked)};
    pool_.Match(session_, now_ms, {&query, 1}, &match_);
    std::vector<BlockRef>& held = match_.blocks[0];
    const size_t hits = held.size();
    const auto missing = static_cast<uint32_t>(keys_.size() - hits);
    ReclaimFor(missing, now_ms);
    const LeaseOutcome lease = pool_.Lease(session_, now_ms, missing, missing, &held);
    KVPOOL_CHECK(lease.leased == missing, "%u blocks leased of %u", lease.leased, missing);
    entries_.clear();
    for (size_t i = hits; i < keys_.size(); ++i) entries_.push_back({held[i], {&keys_[i], 1}});
    outcomes_.resize(entries_.size());
    pool_.Seal(session_, now_ms, hits == 0 ? nullptr : &keys_[hits - 1], entries_, absl::MakeSpan(outcomes_));
    // The blocks of an answer that were resident are now held as well.
    hints_.assign(hints.begin(), hints.end());
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      if (outcomes_[i].verdict != Verdict::kDuplicate) continue;
      held.push_back(outcomes_[i].canonical);
      if (!hints.empty()) hints_.push_back(hints[hits + i]);
    }
    Release(now_ms, held);
    return hits;
  }

 private:
  // Releases the tail first, and blocks with one hint together.
  void Release(uint64_t now_ms, absl::Span<const BlockRef> held) {
    verdicts_.resize(held.size());
    hints_.resize(held.size());
    for (size_t end = held.size(); end > 0;) {
      size_t begin = end - 1;
      while (begin > 0 && hints_[begin - 1] == hints_[end - 1]) --begin;
      pool_.Release(session_, now_ms, hints_[begin], held.subspan(begin, end - begin),
                    absl::MakeSpan(verdicts_).subspan(begin, end - begin));
      end = begin;
    }
  }
  void ReclaimFor(uint32_t blocks, uint64_t now_ms) {
    AsyncPolicy* const policy = pool_.async_policy();
    if (policy == nullptr) return;
    const Clock::time_point begin = Clock::now();
    while (true) {
      const uint32_t free = pool_.counts()[static_cast<size_t>(BlockState::kFree)];
      if (free >= blocks) break;
      if (decision_.Prepare(policy, &breaker_, now_ms)) {
        // Virtual time stands still meanwhile.
        decision_.Rank([] { return uint64_t{0}; });
        decision_.Apply(policy, &breaker_, now_ms);
      }
      const uint32_t decided = std::max(policy->decided(), 1u);
      if (pool_.Reclaim(now_ms, std::min(blocks - free, decided), EvictReason::kDirect, nullptr) == 0) break;
    }
    decision_ns_ += SecondsSince(begin) * 1e9;
  }

  BlockPool& pool_;
  double& decision_ns_;
  const Holder session_;
  Decision decision_;
  Breaker breaker_;
  std::vector<BlockKey> keys_;
  MatchOutcome match_;
  std::vector<SealEntry> entries_;
  std::vector<SealVerdict> outcomes_;
  // Parallel to the blocks that are held.
  std::vector<UseHint> hints_;
  std::vector<Verdict> verdicts_;
};

constexpr uint64_t kNever = UINT64_MAX;

// For each entry of Workload::contents, the next request that asks for that content.
std::vector<uint64_t> NextUses(const Workload& w) {
  std::vector<uint64_t> next(w.contents.size(), kNever), last(w.distinct, kNever);
  for (size_t r = w.requests.size(); r-- > 0;) {
    const Request& request = w.requests[r];
    for (uint32_t i = 0; i < w.chain(request).size(); ++i) {
      uint64_t& seen = last[w.contents[request.first + i]];
      next[request.first + i] = seen;
      if (i < request.blocks) seen = r;
    }
  }
  return next;
}

}  // namespace

void Result::Count(const Workload& workload, const Request& request, uint64_t hits, const PrefillCost& cost) {
  if (&request < &workload.requests[0] + workload.warm_up) return;
  ++requests;
  if (workload.one_in == 1) {
    const uint64_t hit = workload.tokens_in(request, hits);
    blocks += request.blocks;
    hit_blocks += hits;
    tokens += request.tokens;
    hit_tokens += hit;
    prefill_us += cost.us(0, request.tokens);
    prefill_saved_us += cost.us(0, hit);
    return;
  }
  for (uint32_t i = 0; i < request.blocks; ++i) {
    const uint64_t stands_for = i < request.common_blocks ? 1 : workload.one_in;
    const uint64_t front = uint64_t{workload.fronts[request.first + i]} * workload.tokens_per_block;
    const uint64_t own = std::min<uint64_t>(workload.tokens_per_block, request.tokens - front);
    const double us = cost.us(front, own) * static_cast<double>(stands_for);
    blocks += stands_for;
    tokens += own * stands_for;
    prefill_us += us;
    if (i >= hits) continue;
    hit_blocks += stands_for;
    hit_tokens += own * stands_for;
    prefill_saved_us += us;
  }
}

absl::Status CheckFits(const Workload& workload, uint32_t capacity_blocks) {
  const uint32_t largest = workload.largest_request(), room = workload.ScaledCapacity(capacity_blocks);
  if (largest <= room) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the largest request has ", largest, " blocks, the pool ", room,
                   room == capacity_blocks ? "" : absl::StrCat(", a sample of ", capacity_blocks)));
}

absl::StatusOr<Result> Replay(const Workload& workload, const ReplayOptions& options) {
  if (options.policy == "infinite") return ReplayInfinite(workload, options.cost);
  const uint32_t room = workload.ScaledCapacity(options.capacity_blocks);
  if (options.policy == "opt") return ReplayOptimal(workload, options.capacity_blocks, options.cost);
  RETURN_IF_ERROR(CheckFits(workload, options.capacity_blocks));
  ASSIGN_OR_RETURN(
      std::unique_ptr<ReplacementPolicy> policy,
      MakeReplacementPolicy(options.policy, PolicyOptions{.max_blocks = room + 1,
                                                          .seed = options.seed,
                                                          .tokens_per_block = workload.tokens_per_block,
                                                          .cost_per_depth = options.cost_per_depth(workload),
                                                          .weights = options.weights}));
  return ReplayWith(workload, options, std::move(policy));
}

Result ReplayWith(const Workload& workload, const ReplayOptions& options,
                  std::unique_ptr<ReplacementPolicy> policy) {
  Result result{.policy = options.policy, .capacity_blocks = options.capacity_blocks};
  result.bytes_per_block = policy->bytes_per_block();
  double policy_ns = 0;
  const uint32_t room = workload.ScaledCapacity(options.capacity_blocks);
  // There is a ghost for every content, so regret counts each eviction that cost a miss, however late.
  BlockPool pool({.max_blocks = room + 1, .windows = {0}, .ghosts = std::max(4 * workload.distinct, 64u)},
                 std::make_unique<TimedPolicy>(std::move(policy), &policy_ns));
  KVPOOL_CHECK(pool.Grow(room).ok(), "%u blocks", room);
  Engine engine(&pool, &policy_ns);
  const Clock::time_point begin = Clock::now();
  for (const Request& request : workload.requests) {
    result.Count(
        workload, request,
        engine.Serve(request.now_ms, workload.chain(request), request.blocks, workload.hints_of(request)),
        options.cost);
  }
  result.seconds = SecondsSince(begin);
  const uint64_t evictions = pool.counters().evicted[static_cast<size_t>(EvictReason::kDirect)];
  result.evictions = evictions * workload.one_in;
  result.regret = pool.counters().regret * workload.one_in;
  result.decision_ns = evictions == 0 ? 0 : policy_ns / static_cast<double>(evictions);
  return result;
}

Result ReplayOptimal(const Workload& workload, uint32_t capacity_blocks, const PrefillCost& cost) {
  Result result{.policy = "opt", .capacity_blocks = capacity_blocks};
  const Clock::time_point begin = Clock::now();
  const std::vector<uint64_t> next_uses = NextUses(workload);
  const uint32_t room = workload.ScaledCapacity(capacity_blocks);
  // Resident contents by (next use, place in the chain). The last is evicted first, so leaves go
  // before their parents.
  using Entry = std::tuple<uint64_t, uint32_t, uint32_t>;
  absl::btree_set<Entry> resident;
  std::vector<Entry> entries(workload.distinct, Entry{0, 0, 0});
  std::vector<bool> is_resident(workload.distinct), left(workload.distinct);
  for (const Request& request : workload.requests) {
    const absl::Span<const uint32_t> chain = workload.chain(request);
    uint64_t hits = 0;
    while (hits < request.blocks && is_resident[chain[hits]]) ++hits;
    result.Count(workload, request, hits, cost);
    for (uint32_t i = 0; i < chain.size(); ++i) {
      const uint32_t content = chain[i];
      if (is_resident[content]) resident.erase(entries[content]);
      if (left[content]) result.regret += workload.one_in;
      left[content] = false;
      is_resident[content] = next_uses[request.first + i] != kNever;
      entries[content] = {next_uses[request.first + i], i, content};
      if (is_resident[content]) resident.insert(entries[content]);
    }
    while (resident.size() > room) {
      const uint32_t content = std::get<2>(*std::prev(resident.end()));
      resident.erase(std::prev(resident.end()));
      is_resident[content] = false;
      left[content] = true;
      result.evictions += workload.one_in;
    }
  }
  result.seconds = SecondsSince(begin);
  return result;
}

Result ReplayInfinite(const Workload& workload, const PrefillCost& cost) {
  Result result{.policy = "infinite", .capacity_blocks = workload.distinct};
  std::vector<bool> seen(workload.distinct);
  for (const Request& request : workload.requests) {
    const absl::Span<const uint32_t> chain = workload.chain(request);
    uint64_t hits = 0;
    while (hits < request.blocks && seen[chain[hits]]) ++hits;
    result.Count(workload, request, hits, cost);
    for (const uint32_t content : chain) seen[content] = true;
  }
  return result;
}

}  // namespace kvpool::sim
