#include "server/rpc/caller.h"

#include <grpcpp/security/auth_context.h>

#include <memory>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace kvpool {
namespace {

// Connections of the Unix socket are handed to gRPC as descriptors, and their peers are named "fd:…".
constexpr absl::string_view kDescriptor = "fd:";

}  // namespace

bool FromNetwork(const grpc::ServerContextBase& context) {
  return !absl::StartsWith(context.peer(), kDescriptor);
}

Peer PeerOf(const grpc::ServerContextBase& context) {
  Peer peer;
  const std::string name = context.peer();
  absl::string_view descriptor = name;
  if (absl::ConsumePrefix(&descriptor, kDescriptor)) {
    int fd = -1;
    if (!absl::SimpleAtoi(descriptor, &fd)) return peer;
    const absl::StatusOr<PeerCredentials> credentials = CredentialsOf(fd);
    if (credentials.ok()) peer.process = *credentials;
    return peer;
  }
  peer.address = name;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr) return peer;
  peer.certificate = absl::StrJoin(
      auth->GetPeerIdentity(), ",",
      [](std::string* out, grpc::string_ref value) { out->append(value.data(), value.size()); });
  return peer;
}

}  // namespace kvpool
