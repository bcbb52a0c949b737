// Who is at the other end of each connection that the gRPC socket has handed over, and how many there are. Thread-safe.
//
// gRPC names such a connection by its descriptor. A call keeps its connection's descriptor open, so that the number is
// another's only when no call of the first is left: what Of answers is true for as long as the call exists.
#ifndef KVPOOL_SERVER_RPC_CONNECTIONS_H_
#define KVPOOL_SERVER_RPC_CONNECTIONS_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/base/peer_process.h"

namespace kvpool {

class Connections {
 public:
  struct Limits {
    uint32_t all = 2048;
    uint32_t of_uid = 1024;
  };
  explicit Connections(Limits limits) : limits_(limits) {}

  // Counts a connection that is to be handed over. RESOURCE_EXHAUSTED: there are too many already.
  absl::Status Add(int fd, std::shared_ptr<const PeerCredentials> peer) ABSL_LOCKS_EXCLUDED(mu_);
  // The peer of the connection with this descriptor; null: none was handed over.
  std::shared_ptr<const PeerCredentials> Of(int fd) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A descriptor's number names a connection only together with the socket's inode.
  struct Connection {
    uint64_t inode;
    std::shared_ptr<const PeerCredentials> peer;
  };
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Limits limits_;
  mutable Mutex mu_;
  std::map<int, Connection> connections_ ABSL_GUARDED_BY(mu_);  // Keyed by descriptor.
  std::map<uint32_t, uint32_t> of_uid_ ABSL_GUARDED_BY(mu_);    // uid -> its connections.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_CONNECTIONS_H_
