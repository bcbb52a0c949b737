// Which parts of a member's reservation hold slabs: the checks that all devices share.
#ifndef KVPOOL_CUDA_MEMBER_RANGES_H_
#define KVPOOL_CUDA_MEMBER_RANGES_H_

#include <cstddef>
#include <map>

#include "absl/status/status.h"
#include "cuda/device.h"

namespace kvpool {

// The least granularity of any device, and that of host memory: the size of a huge page. One layout then fits
// both.
inline constexpr size_t kSlabGranularityBytes = size_t{2} << 20;

// Offsets and sizes come from another process: they are checked before they are added.
class MemberRanges {
 public:
  MemberRanges(size_t reserved_bytes, size_t granularity_bytes)
      : reserved_bytes_(reserved_bytes), granularity_bytes_(granularity_bytes) {}

  // INVALID_ARGUMENT: not aligned, outside the reservation, or touching a slab that is there.
  absl::Status CheckFree(size_t offset_bytes, size_t bytes) const;
  // REQUIRES: CheckFree said so.
  void Add(size_t offset_bytes, size_t bytes) { bytes_at_[offset_bytes] = bytes; }
  // Slabs by offset.
  const std::map<size_t, size_t>& slabs() const { return bytes_at_; }

 private:
  const size_t reserved_bytes_;
  const size_t granularity_bytes_;
  std::map<size_t, size_t> bytes_at_;
};

// INVALID_ARGUMENT: the reservation is empty or not a multiple of the granularity.
absl::Status CheckReservation(const MemberMemoryOptions& options, size_t granularity_bytes);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_MEMBER_RANGES_H_
