// The sizes in a space. address(b) = base + b * stride holds across slabs only if every slab is a whole
// number of blocks and of device granules, that is of units:
//
//   stride = the smallest s >= block_bytes with lcm(s, granularity) <= slab limit
//   unit   = lcm(stride, granularity): the smallest slab there can be, and the step of their sizes
//   slab   = the most units within the limit (at least one)
#ifndef KVPOOL_SERVER_SPACE_SPACE_GEOMETRY_H_
#define KVPOOL_SERVER_SPACE_SPACE_GEOMETRY_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace kvpool {

struct SpaceGeometry {
  uint64_t block_stride_bytes = 0;
  uint64_t unit_bytes = 0;
  uint64_t slab_bytes = 0;
  uint32_t max_blocks = 0;  // All slabs that fit have so many, the null block included.

  friend bool operator==(const SpaceGeometry&, const SpaceGeometry&) = default;
  uint32_t blocks_in(uint64_t bytes) const { return static_cast<uint32_t>(bytes / block_stride_bytes); }
};

struct GeometryRequest {
  uint64_t block_bytes = 0;        // 64 to 1 GiB.
  uint64_t granularity_bytes = 0;  // A power of two.
  uint64_t slab_limit_bytes = 0;
  uint64_t max_bytes = 0;  // The space may have so many on one rank.
};

// RESOURCE_EXHAUSTED: no slab with a block besides the null block fits into max_bytes.
absl::StatusOr<SpaceGeometry> ComputeGeometry(const GeometryRequest& request);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_GEOMETRY_H_
