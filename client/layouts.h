// Layouts that engines commonly have. An engine whose blocks look otherwise fills in v1::Layout itself.
#ifndef KVPOOL_CLIENT_LAYOUTS_H_
#define KVPOOL_CLIENT_LAYOUTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/v1/layout.pb.h"

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

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_LAYOUTS_H_
