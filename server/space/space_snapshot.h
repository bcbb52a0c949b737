// A space as metrics and statistics want it.
#ifndef KVPOOL_SERVER_SPACE_SPACE_SNAPSHOT_H_
#define KVPOOL_SERVER_SPACE_SPACE_SNAPSHOT_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "server/base/histogram.h"
#include "server/pool/pool_types.h"
#include "server/space/space_state.h"

namespace kvpool {

struct SpaceSnapshot {
  uint64_t space = 0;
  std::string tenant, kind, policy;
  std::array<uint32_t, kBlockStates> blocks{};
  uint32_t capacity = 0, slabs = 0, sessions = 0, members_stale = 0, pinned = 0, pin_budget = 0, parked = 0;
  uint64_t slab_bytes = 0;
  uint64_t growth_failures = 0;  // Slabs that a device refused although the budget had room.
  bool pressure = false;
  PoolCounters pool;
  std::map<std::string, EvictedBlocks> evicted_by_policy;
  std::array<uint64_t, 8> shortfalls{};  // By v1::Shortfall.
  HistogramSnapshot reclaim, lifetime, idle_before_evict, reuse_gap;
  // Of an AsyncPolicy: its decisions, the state of their circuit breaker, and the time they took.
  uint64_t decided_in_time = 0, decided_late = 0, decisions_not_asked = 0;
  uint32_t breaker_state = 0;  // Breaker::State
  HistogramSnapshot decision_time;
};

SpaceSnapshot SnapshotOf(const SpaceState& state, uint64_t now);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_SNAPSHOT_H_
