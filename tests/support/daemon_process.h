// A real kvpoold in a directory of its own, for tests and benchmarks that cross process borders.
#ifndef KVPOOL_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define KVPOOL_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvpool {

// A fresh directory under $TMPDIR or /tmp, gone with this object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct DaemonProcessOptions {
  std::string binary;  // Of kvpoold.
  std::string capacity = "64MiB";
  std::vector<std::string> flags;  // Added to host device, no metrics port, and the paths.
};

class DaemonProcess {
 public:
  // Returns when it serves. Its log goes to `log` in its directory. The daemon dies with the thread that started it.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const DaemonProcessOptions& options);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::string& socket() const { return socket_; }
  pid_t pid() const { return pid_; }
  // Sends a signal.
  void Signal(int signal) const;
  // Sends it and waits for the end; answers the wait status.
  int End(int signal);

 private:
  DaemonProcess() = default;
  absl::Status Spawn(const DaemonProcessOptions& options);
  // Copies the daemon's log from `pipe` to a file until the line that says it serves; the rest is copied by a thread.
  absl::Status AwaitServing(int pipe);

  TemporaryDirectory directory_;
  std::string socket_ = directory_.path() + "/kvpoold.sock";
  pid_t pid_ = -1;
  std::thread log_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_DAEMON_PROCESS_H_
