// The daemon as metrics and statistics want it.
#ifndef KVPOOL_SERVER_SNAPSHOT_H_
#define KVPOOL_SERVER_SNAPSHOT_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/v1/operator.pb.h"
#include "server/pool/block_pool.h"

namespace kvpool {

class SpaceState;

// A histogram as Prometheus wants it: counts per bucket (not cumulative) and the sum, in seconds.
struct HistogramSnapshot {
  std::vector<double> bounds;
  std::vector<uint64_t> counts;  // bounds.size() + 1.
  double sum = 0;
};

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
  // Of a policy that thinks.
  uint64_t decided_in_time = 0, decided_late = 0, decisions_not_asked = 0;
  uint32_t breaker_state = 0;  // As Breaker::State.
  HistogramSnapshot thinking;
};

// What a device was asked to score, prune and compact, since the daemon started.
struct DeviceOperationsSnapshot {
  std::string device;
  using Labels = std::pair<std::string, std::string>;
  std::map<Labels, HistogramSnapshot> seconds;  // By verb and policy: time on the device, queueing aside.
  std::map<Labels, uint64_t> operations;        // By verb and code.
  std::map<std::string, uint64_t> refused;  // Before they came to the device, by the limit: queue, session.
  uint64_t feature_hits = 0, feature_misses = 0, features_evicted = 0, feature_bytes = 0;
  uint64_t pruned_blocks = 0, moved_blocks = 0;
  uint32_t queued = 0;
};

struct DaemonSnapshot {
  // Space 0 is first: what those that are gone have counted, so that sums over spaces never fall.
  std::vector<SpaceSnapshot> spaces;
  std::vector<v1::DeviceInfo> devices;
  std::vector<DeviceOperationsSnapshot> device_operations;  // Of devices that can score.
  // By reason: closed, member_died, hangup, refused_slab, unsent_slab, operator.
  std::map<std::string, uint64_t> sessions_ended;
  std::map<std::string, uint64_t> step_operations;  // By verb.
  uint64_t step_batches = 0, reconnects = 0;
  uint64_t events_logged = 0, events_lost = 0;  // Of the event log.
  uint32_t sessions_open = 0;
  bool draining = false;
  double uptime_seconds = 0;
};

SpaceSnapshot SnapshotOf(const SpaceState& state, uint64_t now);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SNAPSHOT_H_
