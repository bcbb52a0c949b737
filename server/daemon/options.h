// What a daemon is told when it starts.
#ifndef KVPOOL_SERVER_DAEMON_OPTIONS_H_
#define KVPOOL_SERVER_DAEMON_OPTIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvpool {

class Weights;

struct DaemonOptions {
  std::string version;
  uint64_t epoch = 1;  // Of this start of the daemon.
  uint64_t slab_bytes =
      0;  // 0: 64 MiB on host, 256 MiB on cuda. As many whole blocks and granules as fit, at least one.
  std::vector<uint64_t> device_capacity_bytes;  // Parallel to the devices.
  double low_watermark = 0.005;  // Free blocks below this share of the capacity: reclaim in the background …
  double high_watermark = 0.01;  // … until this share is free.
  std::string policy = "learned";
  std::shared_ptr<const Weights> policy_weights;  // Of one policy. Null: those built in.
  double pin_budget = 0.25;
  double tenant_share = 1;               // Most of each device that the spaces of one tenant may have.
  std::string event_log;                 // File to record what engines ask for in; empty: none.
  uint64_t event_log_bytes = 256 << 20;  // Most that it takes, the part before the last among them.
  uint32_t max_sessions = 1024;          // Open, or ended and not yet gone.
  uint32_t max_members = 64;             // Of one session.
  uint64_t idle_space_ms =
      3600 * 1000;  // A space without sessions is closed after this, or when others need its memory.
  // Tenant name -> uids that may use it and then share it. Tenants not listed are scoped by uid.
  std::map<std::string, std::vector<uint32_t>> tenant_uids;
  // Device operations: Score, Prune, Compact, PlanBudgets.
  uint32_t score_threads = 1;                          // Cores that a host device computes with.
  uint64_t score_features_bytes = 256 << 20;           // Features of full blocks that each device keeps.
  uint64_t score_workspace_bytes = uint64_t{1} << 30;  // Most that one operation may use of a device besides.
  uint32_t score_queue = 4096;      // Operations that wait for a device; of one session a quarter.
  bool housekeeping_thread = true;  // False: tests call HousekeepOnce or ReclaimAhead.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_OPTIONS_H_
