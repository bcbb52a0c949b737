#include "server/daemon/retired_counters.h"

#include "server/base/histogram.h"

namespace kvpool {

void Accumulate(const PoolCounters& from, PoolCounters* to) {
  to->leased += from.leased;
  to->sealed += from.sealed;
  to->deduplicated += from.deduplicated;
  to->released += from.released;
  to->refused_stale += from.refused_stale;
  to->lookups += from.lookups;
  to->lookup_blocks += from.lookup_blocks;
  to->hit_blocks += from.hit_blocks;
  to->lookup_tokens += from.lookup_tokens;
  to->hit_tokens += from.hit_tokens;
  to->decided_victims += from.decided_victims;
  to->undecided_victims += from.undecided_victims;
  to->regret += from.regret;
  for (size_t i = 0; i < from.evicted.size(); ++i) to->evicted[i] += from.evicted[i];
}

void Accumulate(const SpaceCounters& from, SpaceCounters* to) {
  for (size_t i = 0; i < from.operations.size(); ++i) to->operations[i] += from.operations[i];
  for (size_t i = 0; i < from.shortfalls.size(); ++i) to->shortfalls[i] += from.shortfalls[i];
  to->batches += from.batches;
  to->growth_failures += from.growth_failures;
}

void RetiredCounters::Add(const SpaceSnapshot& space, const SpaceCounters& counters) {
  MutexLock lock(&mu_);
  for (const auto& [policy, evicted] : space.evicted_by_policy) {
    for (size_t i = 0; i < evicted.size(); ++i) space_.evicted_by_policy[policy][i] += evicted[i];
  }
  Accumulate(space.pool, &space_.pool);
  Accumulate(counters, &counters_);
  space_.shortfalls = counters_.shortfalls;
  space_.growth_failures = counters_.growth_failures;
  Accumulate(space.reclaim, &space_.reclaim);
  Accumulate(space.lifetime, &space_.lifetime);
  Accumulate(space.idle_before_evict, &space_.idle_before_evict);
  Accumulate(space.reuse_gap, &space_.reuse_gap);
  Accumulate(space.decision_time, &space_.decision_time);
  space_.decided_in_time += space.decided_in_time;
  space_.decided_late += space.decided_late;
  space_.decisions_not_asked += space.decisions_not_asked;
}

SpaceSnapshot RetiredCounters::space() {
  MutexLock lock(&mu_);
  return space_;
}

SpaceCounters RetiredCounters::counters() {
  MutexLock lock(&mu_);
  return counters_;
}

}  // namespace kvpool
