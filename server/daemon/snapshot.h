// The daemon's state at one moment, for metrics and statistics.
#ifndef KVPOOL_SERVER_DAEMON_SNAPSHOT_H_
#define KVPOOL_SERVER_DAEMON_SNAPSHOT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/v1/operator.pb.h"
#include "server/base/counters.h"
#include "server/daemon/start_report.h"
#include "server/scoring/operations_snapshot.h"
#include "server/scoring/quality_guard.h"
#include "server/space/space_snapshot.h"

namespace kvpool {

// Counters added up over spaces.
struct CounterTotals {
  PoolCounters pool;
  SpaceCounters space;
  BelowCounters below;

  void Add(const SpaceSnapshot& snapshot) {
    AddCounters(snapshot.pool, &pool);
    AddCounters(snapshot.counters, &space);
    AddCounters(snapshot.below, &below);
  }
};

struct TierSnapshot {
  std::string name, path;
  std::string spec;  // What --tier says of it.
  TierSet::State state = TierSet::State::kAttached;
  bool by_operator = false;
  TierRule rule;
  TierUsage usage;
  LoadCost::Measured load;
};

// What became of the blocks that were not below when the daemon was to end.
struct TierFlush {
  uint64_t written = 0, left = 0;
};

struct DaemonSnapshot {
  std::vector<SpaceSnapshot> spaces;  // The open ones.
  CounterTotals totals;               // Counts of all spaces since the daemon started, closed ones included.
  std::vector<v1::DeviceInfo> devices;
  std::vector<DeviceOperationsSnapshot> device_operations;  // One entry for each device that can score.
  std::map<std::string, GuardTotals> guard;                 // Keyed by pruning policy.
  // Keyed by reason: closed, member_died, hangup, refused_slab, unsent_slab, operator.
  std::map<std::string, uint64_t> sessions_ended;
  // Each is keyed by verb; sums over all spaces, as `totals`.
  std::map<std::string, uint64_t> step_operations, step_errors, refused_blocks;
  std::vector<TierSnapshot> tiers;  // Ordered as they were attached.
  bool may_have_tiers = false;
  StartReport start;
  uint64_t reconnects = 0;
  uint64_t events_logged = 0, events_lost = 0;  // Both are 0 without an event log.
  uint32_t sessions_open = 0;
  bool draining = false;
  HistogramSnapshot guarantee_wait;  // Seconds, of openings that waited for the memory of other spaces.
  double uptime_seconds = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_SNAPSHOT_H_
