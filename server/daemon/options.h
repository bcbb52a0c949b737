// The options of a daemon. The defaults here are those of kvpoold's flags, and the limits here are the ones
// that both its command line and Daemon::Start check.
#ifndef KVPOOL_SERVER_DAEMON_OPTIONS_H_
#define KVPOOL_SERVER_DAEMON_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/support/limits.h"
#include "server/scoring/quality_guard.h"
#include "server/tiers/tier_set.h"

namespace kvpool {

class AccessControl;
class Weights;

// A pool's holders have 16 bits, and one whose session ended stays taken while blocks are charged to it.
inline constexpr uint32_t kMostSessions = 32768;
inline constexpr uint32_t kMostScoreThreads = 1024;
inline constexpr uint32_t kMostScoreQueue = 65536;

// A tier in the words of --tier, before it is opened.
struct NamedTier {
  std::string name;  // See Tier::name.
  // It may take as long as its store does, and be under way when the daemon is gone.
  std::function<absl::StatusOr<TierMember>()> open;
};

struct DaemonOptions {
  std::string version;
  uint64_t epoch = 1;                           // Grows with each start of the daemon.
  std::vector<uint64_t> device_capacity_bytes;  // Parallel to the devices.
  uint64_t began_ms = 0;                        // When its process began, by the daemon's clock.

  // ---- Memory
  // A slab holds as many whole blocks and granules as fit into this, and at least one block. 0: 64 MiB on
  // host, 256 MiB on cuda.
  uint64_t slab_bytes = 0;
  // Shares of a space: when less than the low one is free, blocks are reclaimed in the background until the
  // high one is.
  double low_watermark = 0.005, high_watermark = 0.01;
  std::string policy = "learned";
  std::shared_ptr<const Weights> policy_weights;  // Null: the policy's built-in weights.
  double pin_budget = 0.25;                       // Share of a space that may be pinned or retained.
  double tenant_share = 1;  // Share of each device that the spaces of one tenant may have.

  // ---- Sessions
  // Open sessions, and ended ones whose processes still run. 1 to kMostSessions.
  uint32_t max_sessions = 1024;
  uint32_t max_members = 64;  // Processes of one session. 1 to kMaxMembers.
  // A space without sessions is closed after this time, or earlier when others need its memory.
  uint64_t idle_space_ms = 3600 * 1000;
  // An opening waits so long for memory that other spaces are to give back for its guarantee.
  uint64_t give_back_ms = 2000;
  // With a keeper: so long after a start the members that the daemon before had may come back to their sessions.
  uint64_t reattach_ms = 60 * 1000;
  // Who may do what. Required.
  std::shared_ptr<AccessControl> access;

  // ---- What is below the pool
  std::vector<TierMember> tiers;  // Those that it starts with, TierSet::kMost at most.
  // Keys are derived from it. At least kLeastTierSecretBytes; empty: there is no tier, and none can be attached.
  std::string tier_secret;
  // What an operator may attach. INVALID_ARGUMENT names what is wrong, as at the start. Null: nothing.
  std::function<absl::StatusOr<NamedTier>(const std::string& spec)> name_tier;
  // What --tier says in the flags and config files of now, with which the next daemon starts. Null: nobody knows.
  std::function<absl::StatusOr<std::vector<std::string>>()> next_tiers;
  uint64_t tier_buffer_bytes = 128 << 20;  // Copies on their way down; and again as much on their way up.

  // ---- Integrity
  bool verify = false;                      // Blocks get a sum of their content when they are sealed.
  uint64_t verify_sample_bytes = 16 << 20;  // So much is compared with it in a second.

  // ---- The event log
  std::string event_log;                 // File that records what engines ask for; empty: none.
  uint64_t event_log_bytes = 256 << 20;  // Most that the file and the part before it take together.

  // ---- Device operations: Score, Select, Prune, Compact, PlanBudgets
  uint32_t score_threads = 1;  // Cores that a host device computes with. 1 to kMostScoreThreads.
  uint64_t score_features_bytes = 256 << 20;           // Memory of each device for features of full blocks.
  uint64_t score_workspace_bytes = uint64_t{1} << 30;  // Device memory that one operation may use besides.
  uint64_t score_time_ms = 60 * 1000;  // Time of a device that one operation may take, by a guess.
  GuardOptions guard;                  // What pruning costs, and from where on a policy is turned off.
  // Operations that may wait for a device; one session may have a quarter of them. 1 to kMostScoreQueue.
  uint32_t score_queue = 4096;

  bool measure_work = false;        // The processor time of each hold of a space's mutex.
  bool housekeeping_thread = true;  // False: tests call HousekeepOnce or ReclaimAhead.
  bool device_threads = true;       // False: tests call RunDevicePart.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_OPTIONS_H_
