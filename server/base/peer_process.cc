#include "server/base/peer_process.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string_view>

#include "absl/strings/str_cat.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Debian 12's headers are older than the kernels it may run on.
#endif

namespace kvpool {
namespace {

// A socket's peer has at most NGROUPS_MAX groups, 65,536. Kernels before 4.13 do not tell.
std::vector<uint32_t> GroupsOf(int socket) {
  std::vector<uint32_t> groups(64);
  for (;;) {
    auto size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    const bool told = getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) == 0;
    if (!told && errno != ERANGE) return {};
    groups.resize(size / sizeof(gid_t));
    if (!told) continue;  // Now it has the size that is needed.
    std::sort(groups.begin(), groups.end());
    return groups;
  }
}

}  // namespace

int64_t PidOf(int pidfd) {
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", pidfd));
  int64_t pid = 0;
  for (std::string word; info >> word;) {
    if (word == "Pid:" && info >> pid) break;
  }
  return std::max<int64_t>(pid, 0);
}

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
  return PeerCredentials{
      .pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid, .groups = GroupsOf(socket)};
}

std::string CgroupOf(int64_t pid, int pidfd) {
  if (pid <= 0) return "";
  std::ifstream file(absl::StrCat("/proc/", pid, "/cgroup"));
  constexpr std::string_view kUnified = "0::";
  std::string line;
  while (std::getline(file, line) && !line.starts_with(kUnified)) {
  }
  if (!line.starts_with(kUnified) || ProcessEnded(pidfd)) return "";
  return line.substr(kUnified.size());
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
