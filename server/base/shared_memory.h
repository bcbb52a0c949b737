// Zeroed memory behind a descriptor, which another process can hold while this one dies.
#ifndef KVPOOL_SERVER_BASE_SHARED_MEMORY_H_
#define KVPOOL_SERVER_BASE_SHARED_MEMORY_H_

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

class SharedMemory {
 public:
  // `name` is for people who look at /proc. Pages come when they are first touched; where the system has none it ends
  // this process, as it does for any other memory.
  static absl::StatusOr<SharedMemory> Make(const std::string& name, size_t bytes);
  // Maps all of what Make made, here or in another process. INVALID_ARGUMENT: the descriptor is of something else.
  static absl::StatusOr<SharedMemory> Map(UniqueFd fd);
  SharedMemory(SharedMemory&& other) noexcept
      : fd_(std::move(other.fd_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  ~SharedMemory();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  SharedMemory(UniqueFd fd, char* data, size_t bytes) : fd_(std::move(fd)), data_(data), bytes_(bytes) {}

  UniqueFd fd_;
  char* data_;
  size_t bytes_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_SHARED_MEMORY_H_
