// What a file tier asks the system for. Tests stand in for it: a disk that is full, and a process that ends between any two
// writes.
#ifndef KVPOOL_SERVER_TIERS_FILE_IO_H_
#define KVPOOL_SERVER_TIERS_FILE_IO_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace kvpool {

class FileIo {
 public:
  virtual ~FileIo() = default;
  // All of it, or an error in the system's words.
  virtual absl::Status Write(int fd, const void* data, uint64_t bytes, uint64_t at);
  virtual absl::Status Read(int fd, void* data, uint64_t bytes, uint64_t at);
  // Gives the file its size and, where the file system can, the room for it.
  virtual absl::Status Allocate(int fd, uint64_t bytes);
  // The range reads as zero, and keeps its room. What lay there is the disk's own again, which may keep it in sectors that it
  // does not show.
  virtual absl::Status Zero(int fd, uint64_t bytes, uint64_t at);
  virtual absl::Status Sync(int fd);
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  virtual absl::Status Remove(const std::string& path);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_FILE_IO_H_
