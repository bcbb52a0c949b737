// Who is at the other end of a Unix socket, and a descriptor that tells when that process is gone.
#ifndef KVPOOL_SERVER_PEER_PROCESS_H_
#define KVPOOL_SERVER_PEER_PROCESS_H_

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"
#include "server/daemon.h"

namespace kvpool {

// True once the process behind a pidfd has ended.
bool ProcessEnded(int pidfd);

absl::StatusOr<PeerCredentials> CredentialsOf(int socket);

// A pidfd of the process that connected `socket`: the kernel's own where it has SO_PEERPIDFD (6.5), otherwise
// opened by pid, which needs that pid to be visible here. FAILED_PRECONDITION: it is not, or the process is
// gone.
absl::StatusOr<UniqueFd> PidfdOf(int socket, const PeerCredentials& credentials);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_PEER_PROCESS_H_
