// Layouts that engines commonly have. An engine whose blocks look otherwise fills in v1::Layout itself.
#ifndef KVPOOL_CLIENT_LAYOUTS_H_
#define KVPOOL_CLIENT_LAYOUTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvpool/v1/layout.pb.h"
#include "proto/support/low_layout.h"

namespace kvpool {

// One group of full attention; K, then V, each [layer][token][head][dim] without gaps.
struct PagedLayoutOptions {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;  // Heads on one rank.
  uint32_t head_dim = 0;
  uint32_t tokens_per_block = 16;
  v1::Dtype dtype = v1::DTYPE_BF16;
};
v1::Layout PagedLayout(const PagedLayoutOptions& options);

// One group of full attention whose bytes only the engine understands.
struct OpaqueLayoutOptions {
  uint64_t block_bytes = 0;
  uint32_t tokens_per_block = 16;
};
v1::Layout OpaqueLayout(const OpaqueLayoutOptions& options);

// Which low-precision blocks of a layout.
struct LowLayoutOptions {
  uint32_t group = 0;
  uint32_t bits = LowLayout::kDefaultBits;  // 2, 4 or 8.
};
// Where Compact with DISPOSITION_LOW (v1::LowTerms) puts tokens of one rank in this layout's blocks; Blocks(tokens) of it says how
// many blocks `tokens` tokens that leave take, to be leased before. INVALID_ARGUMENT: there is no such group, or no such number
// of bits, the group is not strided, its dims are beyond a layout's limits, or a block is too small for one record or no whole
// number of words; with the numbers.
absl::StatusOr<LowLayout> LowLayoutOf(const v1::Layout& layout, const LowLayoutOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_LAYOUTS_H_
