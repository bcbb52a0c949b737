// What the daemon keeps on disk between starts, and what it tells tools while it runs.
//
//   kvpoold.lock   while it runs: locked by it; its pid
//   epoch          of the last start
//   kvpoold.json   while it serves: pid, epoch, version, sockets, ports
#ifndef KVPOOL_SERVER_STATE_DIR_H_
#define KVPOOL_SERVER_STATE_DIR_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/sockets.h"

namespace kvpool {

struct ServingFacts {
  std::string version, socket, attach_socket, metrics_host, devices;
  int metrics_port = 0, operator_port = 0;  // 0: none.
};

class StateDir {
 public:
  // Makes the directory if it is missing, locks it, and moves the epoch. ALREADY_EXISTS: another daemon uses it.
  // INVALID_ARGUMENT: it can't be made.
  static absl::StatusOr<StateDir> Open(const std::string& path);

  // Greater than at every earlier start: one more, or the time in seconds if that is more, so that a directory that was
  // lost does not bring old epochs back.
  uint64_t epoch() const { return epoch_; }
  // Writes kvpoold.json: the daemon serves.
  absl::Status Announce(const ServingFacts& facts) const;
  // Removes it.
  void Withdraw() const;

 private:
  StateDir(std::string path, FileLock lock, uint64_t epoch)
      : path_(std::move(path)), lock_(std::move(lock)), epoch_(epoch) {}

  std::string path_;
  FileLock lock_;
  uint64_t epoch_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_STATE_DIR_H_
