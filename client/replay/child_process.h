// A process that this one started.
#ifndef KVPOOL_CLIENT_REPLAY_CHILD_PROCESS_H_
#define KVPOOL_CLIENT_REPLAY_CHILD_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace kvpool::replay {

// The destructor kills the process with SIGKILL and reaps it. It also gets SIGKILL when its parent dies.
class ChildProcess {
 public:
  static absl::StatusOr<ChildProcess> Start(const std::string& program,
                                            const std::vector<std::string>& arguments);
  ChildProcess(ChildProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)), wait_status_(other.wait_status_) {}
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // The status that waitpid gave, once the child has ended.
  std::optional<int> TryWait();
  int Wait();

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_ = 0;  // 0: moved from.
  std::optional<int> wait_status_;
};

// "exit status 1", "killed by signal 9 (Killed)".
std::string DescribeEnd(int wait_status);

// The path of this program.
std::string OwnPath();

}  // namespace kvpool::replay

#endif  // KVPOOL_CLIENT_REPLAY_CHILD_PROCESS_H_
