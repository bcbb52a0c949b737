#include "tests/gpu/gpu_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/sticky.h"
#include "proto/support/status_macros.h"
#include "tests/device/peer.h"

namespace kvpool {

absl::StatusOr<SocketPair> MakeSocketPair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  return SocketPair{.first = UniqueFd(ends[0]), .second = UniqueFd(ends[1])};
}

absl::StatusOr<std::unique_ptr<GpuProcess>> GpuProcess::Start() {
  ASSIGN_OR_RETURN(SocketPair sockets, MakeSocketPair());
  const pid_t pid = ::fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    // Only async-signal-safe calls between fork and exec.
    if (sockets.second.get() == 3) {
      ::fcntl(3, F_SETFD, 0);
    } else {
      ::dup2(sockets.second.get(), 3);
    }
    ::execl("/proc/self/exe", "gpu_facts", "--role", nullptr);
    ::_exit(127);
  }
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  return std::unique_ptr<GpuProcess>(new GpuProcess(pid, std::move(pidfd), std::move(sockets.first)));
}

GpuProcess::~GpuProcess() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

absl::StatusOr<GpuAnswer> GpuProcess::Do(const GpuCommand& command, int fd, UniqueFd* answer_fd) {
  RETURN_IF_ERROR(Send(command, fd));
  // A role that waits for its GPU for ever must not hang the whole check.
  constexpr int kPatienceMs = 60'000;
  pollfd answered = {.fd = socket_.get(), .events = POLLIN};
  if (::poll(&answered, 1, kPatienceMs) == 0) {
    return absl::DeadlineExceededError(absl::StrCat("no answer to operation ", static_cast<int>(command.op),
                                                    " within ", kPatienceMs, " ms"));
  }
  GpuAnswer answer;
  UniqueFd unwanted;
  RETURN_IF_ERROR(
      ReceivePacket(socket_.get(), &answer, sizeof answer, answer_fd != nullptr ? answer_fd : &unwanted));
  if (answer.code == 0) return answer;
  absl::Status status(static_cast<absl::StatusCode>(answer.code), answer.text);
  if (answer.sticky) MarkSticky(&status);
  return status;
}

absl::Status GpuProcess::Send(const GpuCommand& command, int fd) {
  return SendPacket(socket_.get(), &command, sizeof command, fd);
}

absl::StatusOr<uint64_t> GpuProcess::Kill() {
  const auto start = std::chrono::steady_clock::now();
  if (::kill(pid_, SIGKILL) != 0) return absl::ErrnoToStatus(errno, "kill");
  pollfd death = {.fd = pidfd_.get(), .events = POLLIN};
  while (pidfd_.valid() && ::poll(&death, 1, -1) < 0 && errno == EINTR) {
  }
  siginfo_t end;
  while (!pidfd_.valid() && ::waitid(P_PID, pid_, &end, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
  }
  const auto took = std::chrono::steady_clock::now() - start;
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return std::chrono::duration_cast<std::chrono::microseconds>(took).count();
}

}  // namespace kvpool
