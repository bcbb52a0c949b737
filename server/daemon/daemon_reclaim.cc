// Blocks that the last verbs used up, reclaimed ahead of the next ones: slice by slice, so that verbs
// get in between.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "proto/support/mutex.h"
#include "server/base/clock.h"
#include "server/daemon/daemon.h"
#include "server/pool/decision.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

class SteadyStopwatch final : public Stopwatch {
 public:
  uint64_t elapsed_us() const override { return static_cast<uint64_t>(seconds() * 1e6); }
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// How many to reclaim now: from below the low watermark up to the high one. None while a slab is to come.
uint32_t Wanted(const SpaceState& state, bool reclaiming) {
  const Growth& growth = state.growth;
  const uint32_t free = growth.free_blocks();
  if (growth.WantsSlab() || free >= (reclaiming ? growth.high_blocks() : growth.low_blocks())) return 0;
  return std::min(kReclaimSlice, growth.high_blocks() - free);
}

}  // namespace

void Daemon::ReclaimAhead(Space* space) {
  Decision decision;
  std::vector<Eviction> evictions;
  for (bool reclaiming = false;; reclaiming = true) {
    evictions.clear();
    bool think;
    {
      MutexLock lock(&space->mu);
      SpaceState& state = space->state;
      if (Wanted(state, reclaiming) == 0) return;
      think = decision.Prepare(&state.pool, &state.decisions, clock_->NowMs());
    }
    const SteadyStopwatch thinking;
    if (think) decision.Think(thinking, kDecisionBudgetUs);
    const double thought_seconds = thinking.seconds();

    MutexLock lock(&space->mu);
    const SteadyStopwatch reclaim;
    SpaceState& state = space->state;
    const uint64_t now = clock_->NowMs();
    uint32_t count = Wanted(state, /*reclaiming=*/true);
    if (think) {
      decision.Apply(&state.pool, &state.decisions, now);
      state.thinking.Observe(thought_seconds);
      count = std::min(count, decision.victims());
    }
    // Beyond what was decided on it is time for the next decision.
    if (const uint32_t decided = state.pool.decided()) count = std::min(count, decided);
    if (state.pool.Reclaim(now, count, EvictReason::kBackground, &evictions) == 0) return;
    state.Observe(evictions);
    state.reclaim.Observe(reclaim.seconds());
  }
}

}  // namespace kvpool
