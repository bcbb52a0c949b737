// A range of this process's addresses, which its destructor unmaps.
#ifndef KVPOOL_CUDA_HOST_HOST_MAPPING_H_
#define KVPOOL_CUDA_HOST_HOST_MAPPING_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvpool {

class HostMapping {
 public:
  HostMapping() = default;
  HostMapping(HostMapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping() { Unmap(); }

  // Maps the memory of `fd`, shared and writable.
  static absl::StatusOr<HostMapping> MapShared(int fd, size_t bytes);
  // Reserves inaccessible addresses, for other mappings to be placed over; huge pages need them aligned.
  static absl::StatusOr<HostMapping> Reserve(size_t bytes, size_t alignment_bytes);

  char* data() const { return static_cast<char*>(address_); }
  uint64_t address() const { return reinterpret_cast<uintptr_t>(address_); }
  size_t bytes() const { return bytes_; }

 private:
  HostMapping(void* address, size_t bytes) : address_(address), bytes_(bytes) {}
  void Unmap();

  void* address_ = nullptr;
  size_t bytes_ = 0;
};

// Keeps [address, address + bytes) out of forked children, which would hold the memory after this process has
// released it, and out of core files, which must not contain a tenant's data.
absl::Status KeepPrivate(void* address, size_t bytes);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_HOST_HOST_MAPPING_H_
