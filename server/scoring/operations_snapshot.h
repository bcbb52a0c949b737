// The operations of one device as metrics want them.
#ifndef KVPOOL_SERVER_SCORING_OPERATIONS_SNAPSHOT_H_
#define KVPOOL_SERVER_SCORING_OPERATIONS_SNAPSHOT_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "server/base/histogram.h"

namespace kvpool {

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

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_OPERATIONS_SNAPSHOT_H_
