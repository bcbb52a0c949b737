// Unix sockets of the daemon, and the files that keep a second daemon off them.
#ifndef KVPOOL_SERVER_BASE_SOCKETS_H_
#define KVPOOL_SERVER_BASE_SOCKETS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// A socket address holds at most this many bytes of path, without the NUL.
inline constexpr size_t kMaxSocketPathBytes = 107;

// Raises the soft limit on open files to the hard one; answers the limit.
absl::StatusOr<uint64_t> RaiseOpenFileLimit();

// Makes the directory (mode 0750 less the umask) unless there is one, which stays as it is. INVALID_ARGUMENT:
// it could not be made, for example because its parent is missing; the error begins with `flag`, the flag
// that named it.
absl::Status MakeOwnDirectory(const std::string& flag, const std::string& path);

// A lock file with one owner at a time, which may not take it twice. It holds the owner's pid and is removed
// with this object. After a kill the file stays, but is free; unless another process has a copy of the descriptor, whose lock
// it is as well.
class FileLock {
 public:
  // ALREADY_EXISTS: it is locked; the error names the pid in the file. UNAVAILABLE: the system's words.
  static absl::StatusOr<FileLock> Take(const std::string& path);
  // `fd` is a copy of an earlier owner's, and the file at the path is what it has locked.
  static FileLock Adopt(UniqueFd fd, const std::string& path);
  FileLock(FileLock&&) = default;
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock();
  // The file stays, for another process has a copy of the descriptor.
  void LeaveFile() { path_.clear(); }
  int fd() const { return fd_.get(); }

 private:
  FileLock(UniqueFd fd, std::string path);
  UniqueFd fd_;       // Invalid once moved from.
  std::string path_;  // Empty: the file stays.
};

// Replaces a file's content in one rename: readers see the old or the new, never a part. The new one is
// written to `path`.new and synced; the directory is not, so that a power cut may bring the old one back. It
// is for one writer at a time.
absl::Status WriteFileAtomically(const std::string& path, const std::string& content);

// Answers the id of a group given by name; a number is answered as it is. NOT_FOUND: no such name.
// INVALID_ARGUMENT: a number that is none.
absl::StatusOr<uint32_t> GroupId(const std::string& group);
// The same of a user.
absl::StatusOr<uint32_t> UserId(const std::string& user);

struct ListenOptions {
  std::string path;
  int type = 0;                   // SOCK_STREAM or SOCK_SEQPACKET.
  std::optional<uint32_t> group;  // The socket is given to it; empty: it keeps the one it is made with.
  bool own = false;               // It is this user's alone, mode 0600, and peers may send descriptors.
};
// Binds and listens, non-blocking, mode 0660, and removes what was at the path. REQUIRES: the caller has a
// FileLock that every daemon takes for this path. INVALID_ARGUMENT: the path is empty or longer than
// kMaxSocketPathBytes.
absl::StatusOr<UniqueFd> ListenUnix(const ListenOptions& options);
// Whoever makes a listener with these options.
using Listen = std::function<absl::StatusOr<UniqueFd>(const ListenOptions&)>;
// The socket of another process that listens is this one's from now on, in the kernel's words too. UNAVAILABLE: it can't be.
absl::Status ListenAgain(int listener, const std::string& path);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_SOCKETS_H_
