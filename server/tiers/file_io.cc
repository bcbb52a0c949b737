#include "server/tiers/file_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"

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

absl::Status FileIo::Rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("renaming ", from));
}

absl::Status FileIo::Remove(const std::string& path) {
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("removing ", path));
}

}  // namespace kvpool
