// A real kvpoold for tests, with its own process, directory and ports, which end with the object.
#ifndef KVPOOL_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define KVPOOL_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvpool {

// A fresh directory under $TMPDIR or /tmp, removed with this object.
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
  std::string binary;     // Empty: the kvpoold of this build.
  std::string directory;  // Empty: a new one, removed with the object.
  std::string capacity = "64MiB";
  std::string slab_bytes = "4MiB";
  std::string device = "host";
  std::vector<std::string> flags;        // More flags; a later one wins.
  std::vector<std::string> environment;  // "NAME=value", added to the test's own.
};

// How a program ended.
struct ProgramEnd {
  int exit_code = -1;  // -1: a signal ended it.
  std::string output;  // stdout and stderr together.
};
// Runs a program until it ends.
ProgramEnd RunProgram(const std::vector<std::string>& command);

class DaemonProcess {
 public:
  // Returns once the daemon serves. UNAVAILABLE: it ended before; the error has its log.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const DaemonProcessOptions& options = {});
  // Sends SIGKILL if it still runs. The log of a daemon that ended by itself is printed, since the failing
  // test would not say why.
  ~DaemonProcess();

  const std::string& directory() const { return directory_; }
  std::string socket() const { return directory_ + "/kvpoold.sock"; }
  std::string attach_socket() const { return socket() + ".attach"; }
  std::string target() const { return "unix:" + socket(); }
  pid_t pid() const { return pid_; }
  int metrics_port() const { return metrics_port_; }
  int operator_port() const { return operator_port_; }

  void Signal(int signal) const;
  // Sends a signal, waits for the end, and answers the wait status.
  int End(int signal);
  // Sends SIGTERM and answers the exit code; -1: a signal ended it.
  int Stop();
  // Sends SIGKILL and waits for the end.
  void Kill();
  // What the metrics port answers. UNAVAILABLE has the answer, if its status is not 200.
  absl::StatusOr<std::string> Get(const std::string& path) const;
  // The exposition text of /metrics.
  absl::StatusOr<std::string> Metrics() const { return Get("/metrics"); }
  // The sum of all samples of `name` whose line contains `label`; 0 if there are none.
  double Metric(const std::string& name, const std::string& label = "") const;
  std::string Log() const;
  // The log once it has the text so many times, which a thread of the daemon's own writes; as it is after a minute otherwise.
  std::string AwaitInLog(const std::string& text, int times = 1) const;
  // The binary under test.
  static std::string Program();

 private:
  DaemonProcess() = default;
  absl::Status Launch(const DaemonProcessOptions& options);
  int Reap();

  std::string directory_;
  bool owns_directory_ = false;
  pid_t pid_ = 0;
  int metrics_port_ = 0, operator_port_ = 0;
};

// The same of a text that Metrics answered.
double MetricIn(const std::string& text, const std::string& name, const std::string& label = "");

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_DAEMON_PROCESS_H_
