#include "cuda/host/host_mapping.h"

#include <sys/mman.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool {

HostMapping& HostMapping::operator=(HostMapping&& other) noexcept {
  if (this != &other) {
    Unmap();
    address_ = std::exchange(other.address_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void HostMapping::Unmap() {
  if (bytes_ == 0) return;
  KVPOOL_CHECK(::munmap(address_, bytes_) == 0, "munmap(%p, %zu): errno %d", address_, bytes_, errno);
  address_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<HostMapping> HostMapping::MapShared(int fd, size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", bytes, " bytes"));
  HostMapping mapping(address, bytes);
  RETURN_IF_ERROR(KeepPrivate(address, bytes));
  return mapping;
}

absl::StatusOr<HostMapping> HostMapping::Reserve(size_t bytes, size_t alignment_bytes) {
  const size_t padded_bytes = bytes + alignment_bytes;
  void* start = padded_bytes < bytes ? MAP_FAILED
                                     : ::mmap(nullptr, padded_bytes, PROT_NONE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("reserve_bytes: no ", bytes, " bytes of addresses in a row"));
  }
  // Unmaps the addresses before and behind the aligned range.
  const uintptr_t first = reinterpret_cast<uintptr_t>(start);
  const uintptr_t aligned = (first + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
  HostMapping head(start, aligned - first);
  HostMapping range(reinterpret_cast<void*>(aligned), bytes);
  HostMapping tail(reinterpret_cast<void*>(aligned + bytes), first + padded_bytes - aligned - bytes);
  RETURN_IF_ERROR(KeepPrivate(range.data(), bytes));
  return range;
}

absl::Status KeepPrivate(void* address, size_t bytes) {
  for (const int advice : {MADV_DONTFORK, MADV_DONTDUMP}) {
    if (::madvise(address, bytes, advice) == 0) continue;
    return absl::ErrnoToStatus(
        errno,
        absl::StrCat(advice == MADV_DONTFORK ? "MADV_DONTFORK" : "MADV_DONTDUMP", " on ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace kvpool
