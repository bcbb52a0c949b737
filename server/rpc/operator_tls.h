// Mutual TLS of the operator address, whose files may change while the daemon serves.
//
// Each handshake begins with a look at them: what is new counts from that one on, and connections that are open go on.
// Files that can't be read, or do not belong together, change nothing: those before them stay, and the log says why.
#ifndef KVPOOL_SERVER_RPC_OPERATOR_TLS_H_
#define KVPOOL_SERVER_RPC_OPERATOR_TLS_H_

#include <grpc/grpc_security_constants.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"

namespace grpc {
class ServerCredentials;
}
struct grpc_ssl_server_certificate_config;

namespace kvpool {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate, key;
  std::string client_ca;  // Signs the certificates that clients must show.
};

class OperatorTls {
 public:
  // INVALID_ARGUMENT names flag, file and what is wrong with it.
  static absl::StatusOr<std::unique_ptr<OperatorTls>> Open(const TlsFiles& files);
  OperatorTls(const OperatorTls&) = delete;
  OperatorTls& operator=(const OperatorTls&) = delete;

  // For a server that ends before this object does.
  std::shared_ptr<grpc::ServerCredentials> Credentials();
  // Looks at the files now, so that the log says what the next handshake would find.
  void Look() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What the files say.
  struct Pem {
    std::string client_ca, certificate, key;
    bool operator==(const Pem& other) const = default;
  };

  OperatorTls(const TlsFiles& files, Pem pem) : files_(files), pem_(std::move(pem)) {}
  static absl::StatusOr<Pem> Read(const TlsFiles& files);
  static absl::Status Check(const TlsFiles& files, const Pem& pem);
  static grpc_ssl_certificate_config_reload_status OnHandshake(void* tls,
                                                               grpc_ssl_server_certificate_config** config);
  void LookLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const TlsFiles files_;
  Mutex mu_;
  Pem pem_ ABSL_GUARDED_BY(mu_);            // The last that were good.
  bool fresh_ ABSL_GUARDED_BY(mu_) = true;  // gRPC does not have pem_ yet.
  std::string refused_
      ABSL_GUARDED_BY(mu_);  // Why the files are not pem_, as it was logged; empty: they are.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_OPERATOR_TLS_H_
