// The daemon's state directory: the epoch, kept between starts, and facts for tools while it runs.
//
// Nothing in it is worth a refusal to serve: where it can't be written, for the disk is full or read-only, the daemon
// warns and goes on, with an epoch from the clock.
//
//   file           exists            holds
//   kvpoold.lock   while it runs     its pid; the daemon holds a lock on the file
//   epoch          always            the epoch of the last start
//   kvpoold.json   while it serves   pid, epoch, version, sockets, devices, ports
#ifndef KVPOOL_SERVER_STATE_DIR_H_
#define KVPOOL_SERVER_STATE_DIR_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/place.h"

namespace kvpool {

struct ServingFacts {
  std::string version, socket, attach_socket, metrics_host, devices;
  int metrics_port = 0, operator_port = 0;  // 0: none.
};

class StateDir {
 public:
  // Makes the directory if it is missing, locks it for `place`, and advances the epoch. ALREADY_EXISTS: another daemon
  // uses it. INVALID_ARGUMENT: it can't be made.
  static absl::StatusOr<StateDir> Open(const std::string& path, Place* place);

  // max(last epoch in the file + 1, Unix time in milliseconds), and greater than those that the place has had. It grows
  // with each start, even if the directory was lost or can't be written, as long as there is a keeper, or the clock is right and no
  // two starts are in one millisecond.
  uint64_t epoch() const { return epoch_; }
  // Writes kvpoold.json, once the daemon serves.
  void Announce(const ServingFacts& facts) const;
  // Removes kvpoold.json.
  void Withdraw() const;

 private:
  StateDir(std::string path, uint64_t epoch) : path_(std::move(path)), epoch_(epoch) {}

  std::string path_;
  uint64_t epoch_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_STATE_DIR_H_
