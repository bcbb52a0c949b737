// What a keeper keeps: descriptors under the ids that a daemon gave them. It knows nothing of what they are.
#ifndef KVPOOL_SERVER_KEEPER_INVENTORY_H_
#define KVPOOL_SERVER_KEEPER_INVENTORY_H_

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "proto/support/unique_fd.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {

class Inventory {
 public:
  explicit Inventory(size_t most) : most_(most) {}

  // Reads one frame of a daemon's and answers it. UNAVAILABLE: the daemon hung up. INVALID_ARGUMENT,
  // FAILED_PRECONDITION: what it says is not understood, and it must not be served.
  absl::Status Serve(int socket);
  // Another daemon comes.
  void OnDaemon() { serving_ = false; }
  // The daemon has said that it serves.
  bool serving() const { return serving_; }
  // What is here is of no use to anybody: the next daemon starts cold.
  void Clear() { things_.clear(); }
  size_t size() const { return things_.size(); }

 private:
  struct Thing {
    KeeperFrame frame;
    UniqueFd fd;
  };
  absl::Status Show(int socket);
  absl::Status Keep(int socket, KeeperFrame frame, UniqueFd fd, const absl::Status& received);

  const size_t most_;
  std::map<uint64_t, Thing> things_;
  bool serving_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KEEPER_INVENTORY_H_
