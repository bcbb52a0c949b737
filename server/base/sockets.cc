#include "server/base/sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

#ifndef SO_PASSRIGHTS  // A C library of before has it not.
#define SO_PASSRIGHTS 83
#endif

namespace kvpool {
namespace {

absl::Status SystemError(const std::string& doing, int error) {
  return absl::UnavailableError(absl::StrCat(doing, ": ", strerror(error), " (errno ", error, ")"));
}

absl::Status WriteAll(int fd, const std::string& content, const std::string& path) {
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t wrote = write(fd, content.data() + done, content.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return SystemError(absl::StrCat("writing ", path), errno);
    done += static_cast<size_t>(wrote);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<uint64_t> RaiseOpenFileLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return SystemError("reading the limit on open files", errno);
  if (limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return SystemError("raising the limit on open files", errno);
  }
  return limit.rlim_cur;
}

absl::Status MakeOwnDirectory(const std::string& flag, const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error) || mkdir(path.c_str(), 0750) == 0) return absl::OkStatus();
  const int why = errno;
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, ": cannot make ", path, ": ",
      why == ENOENT ? absl::StrCat("there is no directory ", parent) : std::string(strerror(why))));
}

absl::StatusOr<FileLock> FileLock::Take(const std::string& path) {
  while (true) {
    UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640));
    const int error = errno;
    // On a read-only disk another daemon's file can still be locked, and seen to be.
    if (!fd.valid()) fd.Reset(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return SystemError(absl::StrCat("opening lock file ", path), error);
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return SystemError(absl::StrCat("locking ", path), errno);
      std::array<char, 32> pid{};
      const ssize_t size = pread(fd.get(), pid.data(), pid.size() - 1, 0);
      return absl::AlreadyExistsError(absl::StrCat(path, " is locked by another kvpoold, pid ",
                                                   size > 0 ? std::string(pid.data(), size) : "unknown"));
    }
    // The last owner may have removed the file after it was opened here; a lock on that one
    // would keep nobody out.
    struct stat locked, there;
    if (fstat(fd.get(), &locked) != 0) return SystemError(absl::StrCat("looking at ", path), errno);
    if (stat(path.c_str(), &there) != 0 || there.st_ino != locked.st_ino || there.st_dev != locked.st_dev)
      continue;
    return FileLock(std::move(fd), path);
  }
}

FileLock FileLock::Adopt(UniqueFd fd, const std::string& path) { return {std::move(fd), path}; }

FileLock::FileLock(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {
  // The pid is for people. The lock holds without it, as on a full disk.
  const bool empty = lseek(fd_.get(), 0, SEEK_SET) == 0 && ftruncate(fd_.get(), 0) == 0;
  if (empty) (void)WriteAll(fd_.get(), absl::StrCat(getpid()), path_);
}

FileLock::~FileLock() {
  // The file is removed while it is locked, so that it can't be another owner's.
  if (fd_.valid() && !path_.empty()) unlink(path_.c_str());
}

absl::Status WriteFileAtomically(const std::string& path, const std::string& content) {
  const std::string beside = path + ".new";
  UniqueFd fd(open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0640));
  if (!fd.valid()) return SystemError(absl::StrCat("opening ", beside), errno);
  absl::Status status = WriteAll(fd.get(), content, beside);
  if (status.ok() && fsync(fd.get()) != 0) status = SystemError(absl::StrCat("syncing ", beside), errno);
  if (status.ok() && rename(beside.c_str(), path.c_str()) != 0) {
    status = SystemError(absl::StrCat("renaming ", beside), errno);
  }
  if (!status.ok()) unlink(beside.c_str());
  return status;
}

absl::StatusOr<uint32_t> GroupId(const std::string& group) {
  uint32_t number;
  if (absl::SimpleAtoi(group, &number)) {
    // To chown, this number means that the group stays.
    if (number == static_cast<gid_t>(-1))
      return absl::InvalidArgumentError(absl::StrCat(number, " is no group"));
    return number;
  }
  std::vector<char> buffer(16384);
  struct group entry;
  struct group* found = nullptr;
  if (getgrnam_r(group.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) {
    return absl::NotFoundError(absl::StrCat("no group \"", group, "\" on this system"));
  }
  return entry.gr_gid;
}

absl::StatusOr<uint32_t> UserId(const std::string& user) {
  uint32_t number;
  if (absl::SimpleAtoi(user, &number)) {
    if (number == static_cast<uid_t>(-1))
      return absl::InvalidArgumentError(absl::StrCat(number, " is no user"));
    return number;
  }
  std::vector<char> buffer(16384);
  struct passwd entry;
  struct passwd* found = nullptr;
  if (getpwnam_r(user.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) {
    return absl::NotFoundError(absl::StrCat("no user \"", user, "\" on this system"));
  }
  return entry.pw_uid;
}

absl::StatusOr<UniqueFd> ListenUnix(const ListenOptions& options) {
  const std::string& path = options.path;
  if (path.empty() || path.size() > kMaxSocketPathBytes) {
    return absl::InvalidArgumentError(absl::StrCat("socket path \"", path, "\" has ", path.size(),
                                                   " bytes; the limits are 1 and ", kMaxSocketPathBytes));
  }
  UniqueFd listener(socket(AF_UNIX, options.type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return SystemError("making a socket", errno);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.c_str(), path.size());
  if (unlink(path.c_str()) != 0 && errno != ENOENT)
    return SystemError(absl::StrCat("replacing ", path), errno);
  // Nobody can connect between bind and chmod, since that takes listen().
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return SystemError(absl::StrCat("binding ", path), errno);
  }
  if (options.group.has_value() && chown(path.c_str(), static_cast<uid_t>(-1), *options.group) != 0) {
    return SystemError(absl::StrCat("giving ", path, " to group ", *options.group), errno);
  }
  if (chmod(path.c_str(), options.own ? 0600 : 0660) != 0)
    return SystemError(absl::StrCat("chmod ", path), errno);
  // A peer sends no descriptor: one that nobody takes is closed by the thread that reads, and closing may take as long as its owner likes
  // (SO_LINGER). Connections have this from their listener. Linux before 6.16 does not know it.
  const int no = 0;
  if (!options.own) (void)setsockopt(listener.get(), SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof(no));
  RETURN_IF_ERROR(ListenAgain(listener.get(), path));
  return listener;
}

absl::Status ListenAgain(int listener, const std::string& path) {
  if (listen(listener, 1024) != 0) return SystemError(absl::StrCat("listening on ", path), errno);
  return absl::OkStatus();
}

}  // namespace kvpool
