#include "server/space/space_geometry.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Both factors are below 2^40, so their product may need more than 64 bits.
unsigned __int128 Lcm(uint64_t a, uint64_t b) {
  return static_cast<unsigned __int128>(a / std::gcd(a, b)) * b;
}

}  // namespace

absl::StatusOr<SpaceGeometry> ComputeGeometry(const GeometryRequest& request) {
  const uint64_t granule = request.granularity_bytes;
  KVPOOL_CHECK(granule > 0 && (granule & (granule - 1)) == 0, "granularity %lu", granule);
  // A block larger than the limit makes slabs of one block.
  const uint64_t limit = std::max(request.slab_limit_bytes, RoundUp(request.block_bytes, granule));

  SpaceGeometry geometry;
  // Rounding to a larger power of two pads more and makes the lcm smaller: the first that fits pads least.
  for (uint64_t multiple = 1; multiple <= granule; multiple *= 2) {
    const uint64_t stride = RoundUp(request.block_bytes, multiple);
    const unsigned __int128 unit = Lcm(stride, granule);
    if (unit <= limit) {
      geometry.block_stride_bytes = stride;
      geometry.unit_bytes = static_cast<uint64_t>(unit);
      break;
    }
  }
  KVPOOL_CHECK(geometry.unit_bytes > 0, "no stride for blocks of %lu bytes in slabs of %lu",
               request.block_bytes, limit);
  geometry.slab_bytes = limit / geometry.unit_bytes * geometry.unit_bytes;

  const uint64_t units = request.max_bytes / geometry.unit_bytes;
  const uint64_t unit_blocks = geometry.unit_bytes / geometry.block_stride_bytes;
  // Block ids have 32 bits.
  const uint64_t id_units = std::numeric_limits<uint32_t>::max() / unit_blocks;
  const uint64_t blocks = std::min(units, id_units) * unit_blocks;
  if (blocks < 2) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "layout.block_bytes is ", request.block_bytes, ": with the null block a space needs at least ",
        unit_blocks > 1 ? geometry.unit_bytes : 2 * geometry.unit_bytes, " bytes on each rank, ",
        request.max_bytes, " may be used"));
  }
  geometry.max_blocks = static_cast<uint32_t>(blocks);
  geometry.slab_bytes = std::min(geometry.slab_bytes, units * geometry.unit_bytes);
  return geometry;
}

}  // namespace kvpool
