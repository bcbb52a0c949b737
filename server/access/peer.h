// Who is at the other end of a connection, as the kernel or the TLS handshake says. Nothing of it is from a field that
// the peer fills in.
#ifndef KVPOOL_SERVER_ACCESS_PEER_H_
#define KVPOOL_SERVER_ACCESS_PEER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/base/peer_process.h"

namespace kvpool {

struct Peer {
  // The process that connected the Unix socket. Null: the peer is on the network.
  std::shared_ptr<const PeerCredentials> process;
  std::string address;             // gRPC's name of a network peer; else empty.
  std::vector<std::string> names;  // The subject alternative names in a network peer's certificate.
  std::string certificate;         // Its SHA-256: 64 digits, in lower case. Empty: not known.
};

// "uid 1000 (gid 1000, pid 17, cgroup /system.slice/vllm.service)", or address and names.
std::string Describe(const Peer& peer);

// PERMISSION_DENIED: the peer is not root, nor the user that this process runs as, or is on the network. `what` it may not do:
// "name a program".
absl::Status CheckIsDaemonsUser(const Peer& peer, std::string_view what);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ACCESS_PEER_H_
