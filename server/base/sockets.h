// Unix sockets of the daemon, and the files that keep a second daemon off them.
#ifndef KVPOOL_SERVER_BASE_SOCKETS_H_
#define KVPOOL_SERVER_BASE_SOCKETS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// Longest path that fits in a socket address.
inline constexpr size_t kMaxSocketPathBytes = 107;

// Raises the soft limit on open files to the hard one; answers the limit.
absl::StatusOr<uint64_t> RaiseOpenFileLimit();

// Makes a directory of the daemon's own, mode 0750, if it is missing; an existing one stays as it is. Its
// parent must exist: INVALID_ARGUMENT names what is missing and `flag`, which named the path.
absl::Status MakeOwnDirectory(const std::string& flag, const std::string& path);

// A file that one process at a time can lock. It exists while it is locked.
class FileLock {
 public:
  // ALREADY_EXISTS: another process has it; the error names the pid that is written there.
  static absl::StatusOr<FileLock> Take(const std::string& path);
  FileLock(FileLock&&) = default;
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock();

 private:
  FileLock(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;  // Invalid once moved from.
  std::string path_;
};

// Replaces a file's content all at once: the new one is written beside it, synced, and renamed.
absl::Status WriteFileAtomically(const std::string& path, const std::string& content);

// The numeric id of a group that is given by name or number. NOT_FOUND names the group.
absl::StatusOr<uint32_t> GroupId(const std::string& group);

struct ListenOptions {
  std::string path;
  int type = 0;                   // SOCK_STREAM or SOCK_SEQPACKET.
  std::optional<uint32_t> group;  // The socket's group; empty: the process's.
};
// A non-blocking listener, mode 0660. It replaces what is at the path. REQUIRES: the caller holds
// the lock on the path.
absl::StatusOr<UniqueFd> ListenUnix(const ListenOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_SOCKETS_H_
