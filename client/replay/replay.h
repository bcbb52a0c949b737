// A replay: engine processes against one daemon, with kills, and its results.
#ifndef KVPOOL_CLIENT_REPLAY_REPLAY_H_
#define KVPOOL_CLIENT_REPLAY_REPLAY_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/replay/board.h"
#include "client/replay/exact_lru.h"
#include "kvpool/v1/operator.pb.h"
#include "proto/formats/trace.h"

namespace kvpool::replay {

struct ReplayOptions {
  std::string socket;
  std::string run;  // Digest of the space's fingerprint.
  uint32_t engines = 2;
  // The size of each engine's magazine; 0: chosen so that all magazines are a small part of the pool.
  uint64_t magazine_blocks = 0;
  uint64_t block_bytes = 0;
  bool decode = false;
  double time_scale = 0;
  double kill_one_at = 0;   // Kill one engine when this share of the requests is done; 0: none.
  uint64_t kill_every = 0;  // Kill one engine each time that so many are done; 0: none.
  uint64_t kill_daemon_every =
      0;  // Kill the daemon, and all engines, each time that so many are done; 0: never.
  bool engines_outlive_daemon = false;           // They are left alone then.
  std::function<absl::Status()> restart_daemon;  // Kills it and starts another.
  uint64_t seed = 1;                             // Chooses who is killed.
  bool progress = false;  // Show how far it is, on stderr, when it takes longer than 2 s.
  // Starts engine `slot` as a process: flags that the command line does not have.
  std::vector<std::string> engine_arguments;
};

// What a daemon counted of blocks below its pool.
struct BelowCounts {
  uint64_t demoted_blocks = 0, promoted_blocks = 0;
  uint64_t late_blocks = 0;     // Their match was answered before they had come.
  uint64_t dropped_blocks = 0;  // They left before they were copied, or their copy was not taken.
  uint64_t lost_blocks = 0;     // They were missing or damaged.
  uint64_t no_room_blocks = 0;  // The pool had no block for them.
  uint64_t corrupt_values = 0;
};

struct ReplayResult {
  uint32_t engines = 0;
  double seconds = 0;
  HitCounts hits;                    // Counted by the engines; evictions by the daemon.
  HitCounts exact;                   // Counted by the exact simulation.
  HitCounts infinite;                // The same, of a pool that nothing leaves.
  std::optional<BelowCounts> below;  // Nothing: the daemon has no tier.
  uint64_t late_tokens = 0;          // Tokens that matches left below after their wait.
  uint64_t capacity_blocks = 0;
  uint64_t deduplicated_blocks = 0;
  uint64_t checked_blocks = 0, corrupt_blocks = 0;
  uint64_t double_owners = 0;  // Blocks that two engines held, one of them as its own.
  uint64_t sealed_again = 0;   // Blocks whose key had been sealed before and was known no more.
  uint64_t retries = 0;        // Requests begun again because the pool was short.
  uint64_t refused = 0;        // Blocks, leases and fences that a daemon refused.
  bool engines_outlived_daemon = false;
  uint64_t kills = 0, daemon_kills = 0, reopened = 0, sessions = 0;
  std::array<Durations, kVerbs> verbs;
  v1::StateCounts states;  // The space's, after the last engine left.
};

// Runs it. Errors: no daemon, an engine that failed, blocks that did not come back.
absl::StatusOr<std::unique_ptr<ReplayResult>> Replay(const ReplayOptions& options,
                                                     const std::vector<Request>& requests);

// The result for people, and for programs.
std::string RenderTable(const ReplayResult& result);
std::string RenderJson(const ReplayResult& result, const std::string& workload);

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_REPLAY_H_
