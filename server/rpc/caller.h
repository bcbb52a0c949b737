// Who made a call, and whether anybody still waits for its answer.
#ifndef KVPOOL_SERVER_RPC_CALLER_H_
#define KVPOOL_SERVER_RPC_CALLER_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "server/access/peer.h"
#include "server/rpc/connections.h"

namespace kvpool {

class Member;

// The peer of a call's connection.
Peer PeerOf(const grpc::ServerContextBase& context, const Connections& connections);

// "uid 1000", or the names in its certificate: one user, where users take turns.
std::string UserOf(const Peer& peer);

// Whoever shows a member's token must be of the uid that opened its session. PERMISSION_DENIED: it is not, or it is on
// the network.
absl::Status CheckOwner(const Peer& peer, const Member& member);

// It lives as long as its call, which a handler's `done` keeps alive.
struct Caller {
  Peer peer;
  // Set once the call is cancelled, its deadline has passed or its connection is gone.
  std::atomic<bool> gone{false};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_CALLER_H_
