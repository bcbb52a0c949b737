// The daemon with all that surrounds it: locks, devices, sockets, metrics.
#ifndef KVPOOL_SERVER_KVPOOLD_H_
#define KVPOOL_SERVER_KVPOOLD_H_

#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/access/access_control.h"
#include "server/attach/attach_server.h"
#include "server/base/housekeeper.h"
#include "server/daemon/daemon.h"
#include "server/keeper/keeper.h"
#include "server/keeper/keeper_link.h"
#include "server/metrics/metrics_server.h"
#include "server/metrics/scrape_stats.h"
#include "server/place.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/rpc_stats.h"
#include "server/settings.h"
#include "server/state_dir.h"

namespace kvpool {

// The rules of the file; empty: those without one. INVALID_ARGUMENT names file and line.
absl::StatusOr<std::shared_ptr<const AccessPolicy>> AccessPolicyOf(const std::string& file);

class Kvpoold {
 public:
  // The object serves. INVALID_ARGUMENT: the settings can't be met. ALREADY_EXISTS: another daemon uses the
  // socket or the state directory.
  static absl::StatusOr<std::unique_ptr<Kvpoold>> Start(const Settings& settings, KeeperEnd keeper);
  ~Kvpoold();

  // This process was asked to end: upgrades are refused from now on. False: one has begun, and nothing is to be waited for.
  bool BeginEnd();
  // Tells engines and health probes that the daemon is about to end, and answers how many sessions are still
  // open. May be repeated.
  uint32_t Drain();
  // Reads the file of --access again. If something in it is wrong, that is logged, and the rules stay.
  void ReadAccessAgain();
  // If the keeper is a process of its own, another daemon follows, to which engines come back: ends as HandOver does. False:
  // nobody follows, and nothing has changed. REQUIRES: BeginEnd.
  bool EndForNext();
  // Ends calls, hangs up, and removes the sockets.
  void Stop();

  // ---- Upgrades (kvpoold_upgrade.cc)
  // Comes to the process when an operator's call has it hand over.
  static constexpr int kHandOverSignal = SIGUSR1;
  bool handing_over() const { return handing_over_; }
  // Ends calls and threads, and leaves all else to the process that comes next. REQUIRES: no upgrade can begin.
  void HandOver();

 private:
  Kvpoold(std::unique_ptr<KeeperLink> keeper, Place place, StateDir state_dir)
      : keeper_(std::move(keeper)), place_(std::move(place)), state_dir_(std::move(state_dir)) {}
  absl::Status Open(const Settings& settings);
  // What --tier says in the flags, and in the config files as they are now.
  absl::StatusOr<std::vector<std::string>> TiersOfToday() const;
  // The operator's call: looks whether this process may end for another one, and has the keeper and main know.
  absl::Status Upgrade(const Peer& peer, const v1::UpgradeRequest& request, v1::UpgradeResponse* response);
  absl::Status PrepareUpgrade(const Peer& peer, const v1::UpgradeRequest& request,
                              v1::UpgradeResponse* response);
  // Whether this program could start again, if the next one fails.
  absl::Status CheckSettingsOfToday() const;
  // Waits until nothing is under way that a next daemon could not go on with. FAILED_PRECONDITION: something still is.
  // With `end_sessions`, sessions that could not come back don't count.
  absl::Status AwaitSettled(std::chrono::milliseconds patience, bool end_sessions);

  // Members are in the order they are made; each may use those before it.
  std::unique_ptr<KeeperLink> keeper_;  // Null: there is to be no keeper.
  Place place_;
  StateDir state_dir_;
  std::string socket_, attach_socket_;
  std::chrono::milliseconds tier_flush_{0};
  std::string access_file_;  // Empty: none.
  std::vector<std::string> arguments_;
  std::string program_;  // Its path, when the keeper started it.
  // The members below are there. Operators' calls may come before that: gRPC serves as soon as it is started.
  std::atomic<bool> opened_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> upgrading_{false}, handing_over_{false}, ending_{false};
  std::shared_ptr<AccessControl> access_;
  std::unique_ptr<Daemon> daemon_;
  RpcStats rpc_stats_;
  std::unique_ptr<AttachServer> attach_server_;
  std::unique_ptr<GrpcServer> grpc_server_;
  ScrapeStats scrape_stats_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<Housekeeper> keeper_finder_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KVPOOLD_H_
