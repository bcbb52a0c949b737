#include "client/replay/child_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"

namespace kvpool::replay {

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::string& program,
                                                 const std::vector<std::string>& arguments) {
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    // Between fork and exec of a process with threads: system calls only.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    execv(argv[0], argv.data());
    constexpr char kWhat[] = "cannot be started: ";
    const char* why = strerror(errno);
    for (const char* text : {program.c_str(), ": ", kWhat, why, "\n"}) {
      if (write(STDERR_FILENO, text, strlen(text)) < 0) break;
    }
    _exit(127);
  }
  return ChildProcess(pid);
}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(wait_status_, other.wait_status_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ == 0 || wait_status_.has_value()) return;
  Signal(SIGKILL);
  Wait();
}

void ChildProcess::Signal(int signal) const {
  if (!wait_status_.has_value()) kill(pid_, signal);
}

std::optional<int> ChildProcess::TryWait() {
  int status;
  if (!wait_status_.has_value() && waitpid(pid_, &status, WNOHANG) == pid_) wait_status_ = status;
  return wait_status_;
}

int ChildProcess::Wait() {
  while (!wait_status_.has_value()) {
    int status = 0;
    if (waitpid(pid_, &status, 0) == pid_ || errno != EINTR) wait_status_ = status;
  }
  return *wait_status_;
}

std::string DescribeEnd(int wait_status) {
  if (WIFEXITED(wait_status)) return absl::StrCat("exit status ", WEXITSTATUS(wait_status));
  return absl::StrCat("killed by signal ", WTERMSIG(wait_status), " (", strsignal(WTERMSIG(wait_status)),
                      ")");
}

std::string OwnPath() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

}  // namespace kvpool::replay
