// A space's state at one moment, for metrics and statistics.
#ifndef KVPOOL_SERVER_SPACE_SPACE_SNAPSHOT_H_
#define KVPOOL_SERVER_SPACE_SPACE_SNAPSHOT_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/base/histogram.h"
#include "server/pool/pool_types.h"
#include "server/space/space_state.h"

namespace kvpool {

struct SessionBlocks {
  uint64_t session = 0;
  uint32_t blocks = 0;  // Charged to it: a block that several hold counts once.
};

struct SpaceSnapshot {
  uint64_t space = 0;
  std::string tenant, kind, policy;
  std::string model, architecture;  // Facts of the fingerprint; empty where the engine gave none.
  std::array<uint32_t, kBlockStates> blocks{};
  uint32_t capacity = 0, slabs = 0, sessions = 0, members_stale = 0, pinned = 0, pin_budget = 0, parked = 0;
  uint64_t slab_bytes = 0;
  uint64_t bookkeeping_bytes = 0;             // BlockPool::bookkeeping_bytes().
  std::vector<SessionBlocks> session_blocks;  // The open sessions, in any order.
  bool pressure = false;
  PoolCounters pool;
  SpaceCounters counters;
  BelowCounters below;
  GiveBackCounters give_back;
  Recovered recovered;
  CheckCounters checks;
  uint32_t doubted = 0;       // BlockPool::doubted.
  uint32_t share_blocks = 0;  // SetShare's.
  uint32_t limit_blocks = 0;  // Growth::max_blocks, without the null block.
  uint32_t weight = 0;        // GiveBack::weight.
  uint32_t priority = 0;      // GiveBack::priority.
  std::map<std::string, EvictedBlocks> evicted_by_policy;
  HistogramSnapshot hold, hold_work, reclaim, lifetime, idle_before_evict, reuse_gap;
  // An AsyncPolicy's decisions, the state of their circuit breaker, and the time they took; 0 for other policies.
  uint64_t decided_in_time = 0, decided_late = 0, decisions_not_asked = 0;
  uint32_t breaker_state = 0;  // A Breaker::State.
  HistogramSnapshot decision_time;
};

SpaceSnapshot SnapshotOf(const SpaceState& state, uint64_t now);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_SNAPSHOT_H_
