// The daemon with all that surrounds it: locks, devices, sockets, metrics.
#ifndef KVPOOL_SERVER_KVPOOLD_H_
#define KVPOOL_SERVER_KVPOOLD_H_

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "server/access/access_control.h"
#include "server/attach/attach_server.h"
#include "server/base/sockets.h"
#include "server/daemon/daemon.h"
#include "server/keeper/keeper_link.h"
#include "server/metrics/metrics_server.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/rpc_stats.h"
#include "server/settings.h"
#include "server/state_dir.h"

namespace kvpool {

class Kvpoold {
 public:
  // The object serves. `keeper` is the socket of the keeper that has started this process; invalid: none has. INVALID_ARGUMENT: the settings can't be met. ALREADY_EXISTS: another daemon uses the
  // socket or the state directory.
  static absl::StatusOr<std::unique_ptr<Kvpoold>> Start(const Settings& settings, UniqueFd keeper);
  ~Kvpoold();

  // Tells engines and health probes that the daemon is about to end, and answers how many sessions are still
  // open. May be repeated.
  uint32_t Drain();
  // Reads the file of --access again. If something in it is wrong, that is logged, and the rules stay.
  void ReadAccessAgain();
  // Ends calls, hangs up, and removes the sockets.
  void Stop();

 private:
  Kvpoold(FileLock socket_lock, StateDir state_dir)
      : socket_lock_(std::move(socket_lock)), state_dir_(std::move(state_dir)) {}
  absl::Status Open(const Settings& settings, UniqueFd keeper);

  // Members are in the order they are made; each may use those before it.
  FileLock socket_lock_;
  StateDir state_dir_;
  std::string socket_, attach_socket_;
  std::chrono::milliseconds tier_flush_{0};
  std::string access_file_;  // Empty: none.
  std::shared_ptr<AccessControl> access_;
  std::unique_ptr<KeeperLink> keeper_;  // Null: there is no keeper.
  std::unique_ptr<Daemon> daemon_;
  RpcStats rpc_stats_;
  std::unique_ptr<AttachServer> attach_server_;
  std::unique_ptr<GrpcServer> grpc_server_;
  std::unique_ptr<MetricsServer> metrics_server_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KVPOOLD_H_
