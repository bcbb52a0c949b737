// A kvpoold of the replay's own, on host memory, in a folder that is removed with it.
#ifndef KVPOOL_CLIENT_REPLAY_LOCAL_DAEMON_H_
#define KVPOOL_CLIENT_REPLAY_LOCAL_DAEMON_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/replay/child_process.h"

namespace kvpool::replay {

struct LocalDaemonOptions {
  uint64_t blocks = 0;  // The pool's capacity, rounded up to whole pages of 2 MiB.
  uint64_t block_bytes = 0;
  bool keeper = false;             // It outlives its own kills: a keeper has what must not end with it.
  std::vector<std::string> flags;  // More flags, as they are.
};

class LocalDaemon {
 public:
  // Starts `program`, which is kvpoold, and returns when it serves.
  static absl::StatusOr<std::unique_ptr<LocalDaemon>> Start(const std::string& program,
                                                            const LocalDaemonOptions& options);
  ~LocalDaemon();

  const std::string& socket() const { return socket_; }
  // SIGKILL, and another one on the same socket and with the same flags, which serves. With a keeper it is that one
  // which starts it.
  absl::Status KillAndRestart();

 private:
  LocalDaemon(std::string folder, std::string program, std::vector<std::string> arguments, bool keeper,
              ChildProcess process);
  absl::Status KillUnderKeeper();

  const std::string folder_;
  const std::string socket_;
  const std::string program_;
  const std::vector<std::string> arguments_;
  const bool keeper_;
  ChildProcess process_;
};

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_LOCAL_DAEMON_H_
