// Who made a call, and whether anybody still waits for its answer.
#ifndef KVPOOL_SERVER_RPC_CALLER_H_
#define KVPOOL_SERVER_RPC_CALLER_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <optional>
#include <string>

#include "server/base/peer_process.h"

namespace kvpool {

// The peer of a connection: a process on the Unix socket, or the owner of a certificate on the network.
struct Peer {
  std::optional<PeerCredentials>
      process;              // The one that connected the socket; empty: the connection is gone.
  std::string address;      // gRPC's name of a network peer; else empty.
  std::string certificate;  // The names in a network peer's certificate.
};
Peer PeerOf(const grpc::ServerContextBase& context);

// Did the call come over TCP, with mutual TLS, instead of the Unix socket? The Engine service refuses such calls.
bool FromNetwork(const grpc::ServerContextBase& context);

// It lives as long as its call, which a handler's `done` keeps alive.
struct Caller {
  Peer peer;
  // Set once the call is cancelled, its deadline has passed or its connection is gone.
  std::atomic<bool> gone{false};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_CALLER_H_
