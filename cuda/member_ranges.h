// The parts of a member's reservation that hold slabs, and the checks of new ones that all devices share.
#ifndef KVPOOL_CUDA_MEMBER_RANGES_H_
#define KVPOOL_CUDA_MEMBER_RANGES_H_

#include <cstddef>
#include <map>

#include "absl/status/status.h"
#include "cuda/device.h"

namespace kvpool {

// The granularity of host memory and the least of any device: the size of a huge page, so that one layout
// fits both.
inline constexpr size_t kSlabGranularityBytes = size_t{2} << 20;

// Offsets and sizes come from another process: they are checked for overflow before they are summed.
class MemberRanges {
 public:
  MemberRanges(size_t reserved_bytes, size_t granularity_bytes)
      : reserved_bytes_(reserved_bytes), granularity_bytes_(granularity_bytes) {}

  // INVALID_ARGUMENT: the range is not aligned, leaves the reservation, or overlaps a slab that is mapped.
  absl::Status CheckFree(size_t offset_bytes, size_t bytes) const;
  // REQUIRES: CheckFree of this range was OK.
  void Add(size_t offset_bytes, size_t bytes) { bytes_at_[offset_bytes] = bytes; }
  // INVALID_ARGUMENT: no slab is mapped that is exactly this range.
  absl::Status CheckMapped(size_t offset_bytes, size_t bytes) const;
  // REQUIRES: CheckMapped of this range was OK.
  void Remove(size_t offset_bytes) { bytes_at_.erase(offset_bytes); }
  // Sizes of the slabs by their offsets.
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
