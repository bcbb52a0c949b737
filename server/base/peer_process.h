// The process at the other end of a Unix socket: its credentials, its cgroup, and a descriptor that
// tells when it has ended.
#ifndef KVPOOL_SERVER_BASE_PEER_PROCESS_H_
#define KVPOOL_SERVER_BASE_PEER_PROCESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

struct PeerCredentials {
  int64_t pid = 0;  // 0: not visible in the daemon's pid namespace.
  uint32_t uid = 0;
  uint32_t gid = 0;
  // Names the process among those that live; 0: two connections can't be told to be of one process.
  uint64_t process = 0;
  std::vector<uint32_t> groups;  // Its supplementary groups, sorted.
  // Its path in the tree of cgroup v2, as the daemon's cgroup namespace shows it; empty: not known.
  std::string cgroup;
  // Of the process, where who connected is watched. Null: not known.
  std::shared_ptr<const UniqueFd> pidfd;
};

// Its pid in the daemon's pid namespace, for as long as it has not ended; 0: it is not visible there.
int64_t PidOf(int pidfd);

// True once the process behind a pidfd has ended.
bool ProcessEnded(int pidfd);

// The credentials of the process that connected `socket`, as they were then; without its cgroup.
absl::StatusOr<PeerCredentials> CredentialsOf(int socket);

// The cgroup of the process behind `pidfd`; empty: it has ended, so that its pid may be another's, or /proc does not
// show it. The kernel takes a lock of its cgroups for this: it is not for the threads of RPC queues.
std::string CgroupOf(int64_t pid, int pidfd);

// A pidfd of the process that connected `socket`: from SO_PEERPIDFD where the kernel has it (6.5), else by
// PidfdByPid. FAILED_PRECONDITION: the process is gone, or is not visible.
absl::StatusOr<UniqueFd> PidfdOf(int socket, const PeerCredentials& credentials);

// The same on older kernels: opened by pid, which must be visible in this pid namespace.
absl::StatusOr<UniqueFd> PidfdByPid(int socket, const PeerCredentials& credentials);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_PEER_PROCESS_H_
