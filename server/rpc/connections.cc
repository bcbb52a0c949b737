#include "server/rpc/connections.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {

absl::Status Connections::Add(int fd, std::shared_ptr<const PeerCredentials> peer) {
  struct stat file;
  if (fstat(fd, &file) != 0) return absl::UnavailableError(absl::StrCat("fstat: ", strerror(errno)));
  const uint32_t uid = peer->uid;
  MutexLock lock(&mu_);
  if (connections_.size() >= limits_.all || of_uid_[uid] >= limits_.of_uid) ForgetClosed();
  if (connections_.size() >= limits_.all) {
    return absl::ResourceExhaustedError(absl::StrCat("connections of all users: ", limits_.all));
  }
  if (of_uid_[uid] >= limits_.of_uid) {
    return absl::ResourceExhaustedError(absl::StrCat("connections of one user: ", limits_.of_uid));
  }
  // If the descriptor is known, it belonged to a connection that is closed by now.
  if (const auto old = connections_.find(fd); old != connections_.end()) --of_uid_[old->second.peer->uid];
  connections_[fd] = {.inode = file.st_ino, .peer = std::move(peer)};
  ++of_uid_[uid];
  return absl::OkStatus();
}

std::shared_ptr<const PeerCredentials> Connections::Of(int fd) const {
  MutexLock lock(&mu_);
  const auto found = connections_.find(fd);
  return found == connections_.end() ? nullptr : found->second.peer;
}

void Connections::ForgetClosed() {
  std::erase_if(connections_, [this](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    struct stat file;
    if (fstat(entry.first, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_ino == entry.second.inode)
      return false;
    --of_uid_[entry.second.peer->uid];
    return true;
  });
  std::erase_if(of_uid_, [](const auto& entry) { return entry.second == 0; });
}

}  // namespace kvpool
