// Work on many blocks that no verb waits for: slice by slice, so that verbs get in between.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "proto/support/mutex.h"
#include "server/base/clock.h"
#include "server/daemon/daemon.h"
#include "server/replacement/policies/async_policy.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// How many blocks to reclaim now. Reclaiming begins below the low watermark and ends at the high one; none
// are reclaimed while a slab is to come.
uint32_t Wanted(SpaceState& state, uint64_t now, bool reclaiming) {
  Growth& growth = state.growth;
  const uint32_t free = growth.free_blocks();
  if (!growth.reclaims_ahead()) return 0;
  if (growth.WantsSlab() || free >= (reclaiming ? growth.high_blocks() : growth.low_blocks())) return 0;
  if (growth.WaitForOwn(now)) return 0;
  return std::min(kReclaimSlice, growth.high_blocks() - free);
}

}  // namespace

void Daemon::ReclaimAhead(Space* space) {
  Decision decision;
  std::vector<Eviction> evictions;
  for (bool reclaiming = false;; reclaiming = true) {
    // A verb's own thread reclaims less than a slice, and does not wait.
    if (evictions.size() == kReclaimSlice) space->GiveWay();
    evictions.clear();
    bool asked;
    {
      SpaceLock lock(*space);
      SpaceState& state = space->state;
      if (Wanted(state, clock_->NowMs(), reclaiming) == 0) return;
      asked = decision.Prepare(state.pool.async_policy(), &state.decisions, clock_->NowMs());
    }
    double decision_seconds = 0;
    if (asked) {
      const auto decision_began = std::chrono::steady_clock::now();
      decision.Rank([&] { return static_cast<uint64_t>(SecondsSince(decision_began) * 1e6); });
      decision_seconds = SecondsSince(decision_began);
    }

    SpaceLock lock(*space);
    const auto reclaim_began = std::chrono::steady_clock::now();
    SpaceState& state = space->state;
    AsyncPolicy* const policy = state.pool.async_policy();
    const uint64_t now = clock_->NowMs();
    uint32_t count = Wanted(state, now, /*reclaiming=*/true);
    if (asked) {
      decision.Apply(policy, &state.decisions, now);
      state.decision_time.Observe(decision_seconds);
      count = std::min(count, decision.victims());
    }
    // What was decided on leaves first; the rest waits for the next decision.
    if (policy != nullptr && policy->decided() > 0) count = std::min(count, policy->decided());
    evictions.reserve(count);
    if (state.pool.Reclaim(now, count, EvictReason::kBackground, &evictions) == 0) return;
    state.Observe(evictions);
    state.reclaim.Observe(SecondsSince(reclaim_began));
    if (Wanted(state, now, /*reclaiming=*/true) == 0) return;
  }
}

void Daemon::TidyUp(Space* space) {
  while (true) {
    {
      SpaceLock lock(*space);
      BlockPool& pool = space->state.pool;
      const bool expiring = pool.Expire(clock_->NowMs(), BlockPool::kTidySlice);
      if (!pool.Tidy(BlockPool::kTidySlice) && !expiring) return;
    }
    space->GiveWay();
  }
}

}  // namespace kvpool
