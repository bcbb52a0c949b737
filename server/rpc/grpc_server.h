// The gRPC side of kvpoold: one server, on the Unix socket and, for operators, on TCP.
#ifndef KVPOOL_SERVER_RPC_GRPC_SERVER_H_
#define KVPOOL_SERVER_RPC_GRPC_SERVER_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/access/peer.h"
#include "server/base/sockets.h"
#include "server/daemon/daemon.h"
#include "server/rpc/operator_tls.h"
#include "server/rpc/rpc_stats.h"

namespace kvpool {

struct GrpcServerOptions {
  std::string socket_path;
  std::optional<uint32_t> group;
  Listen listen = ListenUnix;
  int threads = 0;     // Completion queues, with a thread each; 0: a quarter of the cores, 1 to 8.
  int fd_ceiling = 0;  // AttachServerOptions::fd_ceiling.
  uint32_t max_connections = 2048;
  std::string operator_address;  // "host:port"; empty: none.
  TlsFiles operator_tls;
  // What the operator's Upgrade does.
  std::function<absl::Status(const Peer&, const v1::UpgradeRequest&, v1::UpgradeResponse*)> upgrade;
};

class GrpcServer {
 public:
  // REQUIRES: the caller holds the lock on the socket's path. `daemon` and `stats` outlive the server.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options, Daemon* daemon,
                                                           RpcStats* stats);
  // Stops at once.
  ~GrpcServer();

  // Sets what health probes are told.
  void SetServing(bool serving);
  bool serving() const;
  // See OperatorTls::Look.
  void LookAtCertificates();
  // From now on no batch and no call of engines begins, and their streams end. What is under way is carried through.
  void Rest();
  void GoOn();
  // Openings or large calls are under way.
  bool busy();
  // No call is under way: each was answered.
  bool quiet() const;
  // Accepts nothing new, lets calls end for `patience`, cancels the rest, and joins.
  void Stop(std::chrono::milliseconds patience);
  // 0 without an operator address.
  int operator_port() const;

 private:
  class Rep;
  explicit GrpcServer(std::unique_ptr<Rep> rep);
  std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_GRPC_SERVER_H_
