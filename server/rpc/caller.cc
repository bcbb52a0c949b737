#include "server/rpc/caller.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <memory>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/space/session.h"

namespace kvpool {
namespace {

// Connections of the Unix socket are handed to gRPC as descriptors, and their peers are named "fd:…".
constexpr absl::string_view kDescriptor = "fd:";

}  // namespace

Peer PeerOf(const grpc::ServerContextBase& context, const Connections& connections) {
  Peer peer;
  const std::string name = context.peer();
  absl::string_view descriptor = name;
  int fd = -1;
  if (absl::ConsumePrefix(&descriptor, kDescriptor) && absl::SimpleAtoi(descriptor, &fd)) {
    peer.process = connections.Of(fd);
    return peer;
  }
  peer.address = name;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr) return peer;
  // Not its subject: gRPC takes the common name for an identity where a certificate has no such names.
  for (const grpc::string_ref& san : auth->FindPropertyValues(GRPC_X509_SAN_PROPERTY_NAME)) {
    peer.names.emplace_back(san.data(), san.size());
  }
  return peer;
}

std::string UserOf(const Peer& peer) {
  if (peer.process != nullptr) return absl::StrCat("uid ", peer.process->uid);
  return absl::CHexEscape(absl::StrJoin(peer.names, ", "));
}

absl::Status CheckOwner(const Peer& peer, const Member& member) {
  const SessionTerms& terms = member.session->terms;
  if (peer.process != nullptr && peer.process->uid == terms.uid) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("member_token is of session ", terms.id, ", which uid ",
                                                  terms.uid, " opened; the caller is ", Describe(peer)));
}

}  // namespace kvpool
