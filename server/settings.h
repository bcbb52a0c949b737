// The command line and the config file of kvpoold.
#ifndef KVPOOL_SERVER_SETTINGS_H_
#define KVPOOL_SERVER_SETTINGS_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/support/attach_socket.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/rpc/grpc_server.h"

namespace kvpool {

// What was asked for, checked as far as it can be without opening anything.
struct Settings {
  LogOptions log;
  std::string device, capacity;  // As OpenDevices takes them.
  std::string socket, state_dir, metrics_listen;
  bool default_socket = false;  // Nobody named one: its directory is the daemon's own.
  std::optional<uint32_t> socket_group;
  int rpc_threads = 0;
  std::string operator_tls_listen;
  TlsFiles operator_tls;
  std::chrono::milliseconds shutdown_grace{0};
  std::string reply;     // What --help or --version asked for: to be printed instead of serving. Else empty.
  DaemonOptions daemon;  // Without epoch, version and device capacities.

  std::string attach_socket() const { return socket + kAttachSuffix; }
  std::string socket_directory() const { return socket.substr(0, std::max<size_t>(1, socket.rfind('/'))); }
};

// Parses the command line (without the program's name) and the files named by --config, which it wins over.
// INVALID_ARGUMENT names flag, value and limits.
absl::StatusOr<Settings> ParseSettings(const std::vector<std::string>& arguments);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SETTINGS_H_
