// kvpoold's command line and config files.
#ifndef KVPOOL_SERVER_SETTINGS_H_
#define KVPOOL_SERVER_SETTINGS_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/attach_socket.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/rpc/grpc_server.h"
#include "server/tier_options.h"

namespace kvpool {

// All that the flags say, checked as far as it can be without opening anything. The initial values are
// the flags' defaults.
struct Settings {
  LogOptions log;
  // Both are written as OpenDevices reads them. Half of the memory is taken, since engines keep weights and
  // activations on the same GPU, and everything else lives in the same RAM.
  std::string device = "auto", capacity = "0.5";
  std::string socket, state_dir;
  std::string access;  // File of rules; empty: none.
  std::string metrics_listen = "127.0.0.1:9400";
  TlsFiles metrics_tls;
  bool default_socket = false;  // Nobody named one: its directory is the daemon's own.
  std::optional<uint32_t> socket_group;
  uint32_t rpc_threads = 0;  // See GrpcServerOptions::threads.
  std::string operator_tls_listen;
  TlsFiles operator_tls;
  std::chrono::milliseconds shutdown_grace{5000};
  std::vector<TierOptions> tiers;
  std::string tier_key_file;         // Empty: see OpenTiers.
  std::string tier_encryption_keys;  // File; empty: what is in tiers is not encrypted.
  std::chrono::milliseconds tier_flush{20000};
  bool keeper = false;  // Started as a keeper, which starts the daemon and another when that is killed.
  // Another process keeps, and does not start this one.
  bool keeper_elsewhere = false;
  bool keeper_only = false;     // Started as a keeper that starts no daemon.
  std::string keeper_socket;    // Where keepers listen, and daemons look for them.
  uint32_t keeper_deaths = 10;  // The keeper gives up after so many.
  // These settings were read from them.
  std::vector<std::string> arguments;
  std::string
      reply;  // The text that --help or --version asked for, to be printed instead of serving. Else empty.
  DaemonOptions daemon;                       // Epoch, version and device capacities are not set yet.
  std::map<std::string, std::string> places;  // Flag -> "FILE:LINE", of those that a config file sets.

  std::string attach_socket() const { return socket + kAttachSuffix; }
  // So long a program that takes over has until it serves: engines go on waiting while the one before it comes back.
  std::chrono::milliseconds most_start() const {
    return std::min(kMostStart, std::chrono::milliseconds(daemon.reattach_ms / 2));
  }
  static constexpr std::chrono::milliseconds kMostStart{20000};
  std::string socket_directory() const { return socket.substr(0, std::max<size_t>(1, socket.rfind('/'))); }
  // Errors about a flag begin with its name. This puts the place in front where a config file sets the flag.
  absl::Status Placed(const absl::Status& status) const;
};

// Parses the command line (without the program's name) and the files that --config names; the command line
// wins over them. INVALID_ARGUMENT names flag, value and limits, and file and line where a file sets it.
absl::StatusOr<Settings> ParseSettings(const std::vector<std::string>& arguments);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SETTINGS_H_
