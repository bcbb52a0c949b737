#include "server/sim/replay.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policy.h"
#include "server/sim/engine.h"
#include "server/sim/timed_policy.h"

namespace kvpool::sim {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

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
