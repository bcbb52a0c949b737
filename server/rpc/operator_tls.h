// Mutual TLS of the operator address, whose files may change while the daemon serves.
//
// Each handshake begins with a look at them: what is new counts from that one on, and connections that are open go on.
#ifndef KVPOOL_SERVER_RPC_OPERATOR_TLS_H_
#define KVPOOL_SERVER_RPC_OPERATOR_TLS_H_

#include <grpc/grpc_security_constants.h>

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "server/rpc/tls_files.h"

namespace grpc {
class ServerCredentials;
}
struct grpc_ssl_server_certificate_config;

namespace kvpool {

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
  explicit OperatorTls(WatchedTlsFiles files) : files_(std::move(files)) {}
  static grpc_ssl_certificate_config_reload_status OnHandshake(void* tls,
                                                               grpc_ssl_server_certificate_config** config);

  Mutex mu_;
  WatchedTlsFiles files_ ABSL_GUARDED_BY(mu_);
  bool fresh_ ABSL_GUARDED_BY(mu_) = true;  // gRPC does not have what they say yet.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_OPERATOR_TLS_H_
