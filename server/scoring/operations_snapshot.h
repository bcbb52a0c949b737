// The operations of one device at one moment, for metrics.
#ifndef KVPOOL_SERVER_SCORING_OPERATIONS_SNAPSHOT_H_
#define KVPOOL_SERVER_SCORING_OPERATIONS_SNAPSHOT_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "server/base/histogram.h"

namespace kvpool {

// The cache of features: `bytes` is a gauge, the others only grow.
struct FeatureStats {
  uint64_t hits = 0, misses = 0, evicted = 0;
  uint64_t bytes = 0;  // Memory in chunks, used or not.
};

struct DeviceCounters {
  uint64_t pruned_blocks = 0, compacted_blocks = 0;
  // Operations that never came to the device: its queue was full, or the session had its share of it.
  uint64_t refused_by_queue = 0, refused_by_session = 0;
};

// Operations since the daemon started, and those that are queued now.
struct DeviceOperationsSnapshot {
  std::string device;
  using Labels = std::pair<std::string, std::string>;
  std::map<Labels, HistogramSnapshot>
      seconds;                            // Keyed by verb and policy: time on the device, queueing aside.
  std::map<Labels, uint64_t> operations;  // Keyed by verb and status code.
  DeviceCounters counters;
  FeatureStats features;
  uint32_t queued = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_OPERATIONS_SNAPSHOT_H_
