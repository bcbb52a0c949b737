// Who is at the other end of a Unix socket, and a descriptor that tells when that process is gone.
#ifndef KVPOOL_SERVER_BASE_PEER_PROCESS_H_
#define KVPOOL_SERVER_BASE_PEER_PROCESS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

struct PeerCredentials {
  int64_t pid = 0;  // 0: not visible in the daemon's pid namespace.
  uint32_t uid = 0;
  uint32_t gid = 0;
};

// True once the process behind a pidfd has ended.
bool ProcessEnded(int pidfd);

absl::StatusOr<PeerCredentials> CredentialsOf(int socket);

// A pidfd of the process that connected `socket`: the kernel's own where it has SO_PEERPIDFD (6.5), otherwise
// opened by pid, which needs that pid to be visible here. FAILED_PRECONDITION: it is not, or the process is
// gone.
absl::StatusOr<UniqueFd> PidfdOf(int socket, const PeerCredentials& credentials);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_PEER_PROCESS_H_
