#include "server/tiers/file_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/tiers/buffers.h"

namespace kvpool {

absl::Status FileIo::Write(int fd, const void* data, uint64_t bytes, uint64_t at) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = pwrite(fd, from, bytes, static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return absl::ErrnoToStatus(errno, absl::StrCat("writing ", bytes, " bytes at ", at));
    from += written;
    at += static_cast<uint64_t>(written);
    bytes -= static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status FileIo::Read(int fd, void* data, uint64_t bytes, uint64_t at) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t read = pread(fd, to, bytes, static_cast<off_t>(at));
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return absl::ErrnoToStatus(errno, absl::StrCat("reading ", bytes, " bytes at ", at));
    if (read == 0) return absl::DataLossError(absl::StrCat("the file ends ", bytes, " bytes short at ", at));
    to += read;
    at += static_cast<uint64_t>(read);
    bytes -= static_cast<uint64_t>(read);
  }
  return absl::OkStatus();
}

absl::Status FileIo::Allocate(int fd, uint64_t bytes) {
  if (fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0) return absl::OkStatus();
  // Without it the file is sparse, and a full disk is met when it is written to.
  if (errno == EOPNOTSUPP && ftruncate(fd, static_cast<off_t>(bytes)) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("making room for ", bytes, " bytes"));
}

absl::Status FileIo::Zero(int fd, uint64_t bytes, uint64_t at) {
  const auto begin = static_cast<off_t>(at), length = static_cast<off_t>(bytes);
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, length) == 0 &&
      fallocate(fd, FALLOC_FL_KEEP_SIZE, begin, length) == 0) {
    return absl::OkStatus();
  }
  alignas(kTierPageBytes) static constexpr char kZeros[64 << 10] = {};
  while (bytes > 0) {
    const uint64_t some = std::min<uint64_t>(bytes, sizeof(kZeros));
    RETURN_IF_ERROR(Write(fd, kZeros, some, at));
    at += some;
    bytes -= some;
  }
  return absl::OkStatus();
}

absl::Status FileIo::Sync(int fd) {
  if (fdatasync(fd) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "fdatasync");
}

absl::Status FileIo::Rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("renaming ", from));
}

absl::Status FileIo::Remove(const std::string& path) {
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("removing ", path));
}

}  // namespace kvpool
