#include "cuda/member_ranges.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace kvpool {

absl::Status MemberRanges::CheckFree(size_t offset_bytes, size_t bytes) const {
  if (bytes == 0 || bytes % granularity_bytes_ != 0 || offset_bytes % granularity_bytes_ != 0) {
    return absl::InvalidArgumentError(absl::StrCat("slab of ", bytes, " bytes at offset ", offset_bytes,
                                                   ": both must be multiples of ", granularity_bytes_,
                                                   ", and bytes not 0"));
  }
  if (bytes > reserved_bytes_ || offset_bytes > reserved_bytes_ - bytes) {
    return absl::InvalidArgumentError(absl::StrCat("slab of ", bytes, " bytes at offset ", offset_bytes,
                                                   " ends beyond the ", reserved_bytes_, " bytes reserved"));
  }
  const auto next = bytes_at_.lower_bound(offset_bytes);
  const bool hits_next = next != bytes_at_.end() && next->first - offset_bytes < bytes;
  const bool hits_previous =
      next != bytes_at_.begin() && offset_bytes - std::prev(next)->first < std::prev(next)->second;
  if (!hits_next && !hits_previous) return absl::OkStatus();
  const auto& other = hits_next ? *next : *std::prev(next);
  return absl::InvalidArgumentError(absl::StrCat("slab of ", bytes, " bytes at offset ", offset_bytes,
                                                 ": a slab of ", other.second, " bytes is mapped at offset ",
                                                 other.first));
}

absl::Status MemberRanges::CheckMapped(size_t offset_bytes, size_t bytes) const {
  const auto found = bytes_at_.find(offset_bytes);
  if (found != bytes_at_.end() && found->second == bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slab of ", bytes, " bytes at offset ", offset_bytes, ": ",
                   found == bytes_at_.end()
                       ? "no slab is mapped there"
                       : absl::StrCat("the slab that is mapped there has ", found->second, " bytes")));
}

absl::Status CheckReservation(const MemberMemoryOptions& options, size_t granularity_bytes) {
  if (options.reserve_bytes != 0 && options.reserve_bytes % granularity_bytes == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("reserve_bytes: ", options.reserve_bytes,
                                                 " is not a positive multiple of ", granularity_bytes));
}

}  // namespace kvpool
