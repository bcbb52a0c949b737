// The daemon with everything around it: locks, devices, sockets, metrics.
#ifndef KVPOOL_SERVER_KVPOOLD_H_
#define KVPOOL_SERVER_KVPOOLD_H_

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "server/attach/attach_server.h"
#include "server/base/sockets.h"
#include "server/daemon/daemon.h"
#include "server/metrics/metrics_server.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/rpc_stats.h"
#include "server/settings.h"
#include "server/state_dir.h"

namespace kvpool {

class Kvpoold {
 public:
  // Serves from here on. INVALID_ARGUMENT: what was asked for cannot be; ALREADY_EXISTS: another daemon is at the socket
  // or the state directory.
  static absl::StatusOr<std::unique_ptr<Kvpoold>> Start(const Settings& settings);
  ~Kvpoold();

  // Says to everybody that the end is near; answers how many sessions are still open. May be repeated.
  uint32_t Drain();
  // Ends calls, hangs up, and removes the sockets.
  void Stop();

 private:
  Kvpoold(FileLock socket_lock, StateDir state_dir)
      : socket_lock_(std::move(socket_lock)), state_dir_(std::move(state_dir)) {}
  absl::Status Open(const Settings& settings);

  // In the order they are made; what comes later uses what came before.
  FileLock socket_lock_;
  StateDir state_dir_;
  std::string socket_, attach_socket_;
  std::unique_ptr<Daemon> daemon_;
  RpcStats rpc_stats_;
  std::unique_ptr<AttachServer> attach_server_;
  std::unique_ptr<GrpcServer> grpc_server_;
  std::unique_ptr<MetricsServer> metrics_server_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KVPOOLD_H_
