// The daemon as metrics and statistics want it.
#ifndef KVPOOL_SERVER_DAEMON_SNAPSHOT_H_
#define KVPOOL_SERVER_DAEMON_SNAPSHOT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kvpool/v1/operator.pb.h"
#include "server/scoring/operations_snapshot.h"
#include "server/space/space_snapshot.h"

namespace kvpool {

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

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_SNAPSHOT_H_
