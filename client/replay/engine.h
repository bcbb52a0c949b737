// One engine process of a replay: it serves requests through the client library and verifies the memory.
//
// For each request: keys of its blocks, Match, Lease of what is missing, a stamp into each new block, Seal,
// Release. A stamp depends on key, block and generation (cuda/base/stamp.h). It is verified in each block
// that was hit, before the request uses it, and once more in all of them before they are released: a block
// that two owners have, or that was handed out too early, shows as wrong words. With a tier below the pool content moves between
// blocks: then a stamp depends on the key alone.
#ifndef KVPOOL_CLIENT_REPLAY_ENGINE_H_
#define KVPOOL_CLIENT_REPLAY_ENGINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/replay/board.h"
#include "kvpool/v1/layout.pb.h"
#include "proto/formats/trace.h"

namespace kvpool::replay {

struct EngineOptions {
  uint32_t engine = 0;  // Slot on the board.
  std::string socket;   // kvpoold's.
  std::string device;   // "host" or a GPU's UUID: where the space lies.
  std::string run;      // Names the space: engines of one run share it, runs don't.
  v1::Layout layout;
  uint32_t magazine_blocks = 0;
  uint32_t wait_ms = 0;        // How long a match waits for what is below the pool.
  bool awaits_daemon = false;  // One that is killed and started again may not be there yet.
  bool decode = false;         // Hold blocks for the answer too.
  double time_scale = 0;       // Seconds that a second of the trace takes; 0: as fast as it goes.
  int64_t start_ns = 0;        // When the trace's time 0 was, on the steady clock.
};

// Serves until the board has no open request and all are done, or it is stopped.
absl::Status RunEngine(const EngineOptions& options, const std::vector<Request>& requests, Board* board);

// The steady clock's time, which is the same in all processes.
int64_t SteadyNs();

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_ENGINE_H_
