#include "server/rpc/caller.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <array>
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

// As Peer::certificate.
std::string FingerprintOf(absl::string_view pem) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> reader(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(reader.get(), nullptr, nullptr, nullptr), &X509_free);
  std::array<char, EVP_MAX_MD_SIZE> digest;
  unsigned size = 0;
  const bool known =
      certificate != nullptr && X509_digest(certificate.get(), EVP_sha256(),
                                            reinterpret_cast<unsigned char*>(digest.data()), &size) == 1;
  ERR_clear_error();
  return known ? absl::BytesToHexString({digest.data(), size}) : "";
}

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
  for (const grpc::string_ref& pem : auth->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME)) {
    peer.certificate = FingerprintOf({pem.data(), pem.size()});
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
