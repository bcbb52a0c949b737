#include "server/base/peer_process.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Debian 12's headers are older than the kernels it may run on.
#endif

namespace kvpool {

bool ProcessEnded(int pidfd) {
  pollfd waiting{.fd = pidfd, .events = POLLIN, .revents = 0};
  return poll(&waiting, 1, 0) == 1;
}

absl::StatusOr<PeerCredentials> CredentialsOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return absl::UnavailableError(absl::StrCat("SO_PEERCRED: ", strerror(errno)));
  }
  return PeerCredentials{.pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid};
}

absl::StatusOr<UniqueFd> PidfdOf(int socket, const PeerCredentials& credentials) {
  int raw = -1;
  socklen_t size = sizeof(raw);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &raw, &size) == 0) return UniqueFd(raw);
  if (errno == ESRCH || errno == EINVAL) {
    return absl::FailedPreconditionError("the process that connected has already ended");
  }
  if (errno != ENOPROTOOPT) return absl::UnavailableError(absl::StrCat("SO_PEERPIDFD: ", strerror(errno)));
  return PidfdByPid(socket, credentials);
}

absl::StatusOr<UniqueFd> PidfdByPid(int socket, const PeerCredentials& credentials) {
  if (credentials.pid <= 0) {
    return absl::FailedPreconditionError(
        "the process is in a pid namespace that this daemon does not see, and this kernel has no "
        "SO_PEERPIDFD "
        "(Linux 6.5): run both in one pid namespace (Kubernetes: shareProcessNamespace)");
  }
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(credentials.pid), 0)));
  if (!pidfd.valid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("pidfd_open of pid ", credentials.pid, ": ", strerror(errno)));
  }
  // The pid may have been given to another process before it was opened. If the peer's socket is still open,
  // the peer was alive until now, or a child of it holds the socket, which then hangs up for both.
  pollfd waiting{.fd = socket, .events = POLLRDHUP, .revents = 0};
  if (poll(&waiting, 1, 0) == 1) {
    return absl::FailedPreconditionError("the process that connected has already ended");
  }
  return pidfd;
}

}  // namespace kvpool
