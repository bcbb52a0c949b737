// Compaction: the tokens that stay, moved into fewer blocks. Order and rotation are kept: bytes are copied.
#ifndef KVPOOL_CUDA_SCORERS_GATHER_H_
#define KVPOOL_CUDA_SCORERS_GATHER_H_

#include <cstdint>

#include "cuda/host_workers.h"
#include "cuda/scorers/kv_view.h"

namespace kvpool::scorers {

struct GatherRequest {
  KvView from;
  const uint64_t* to_blocks = nullptr;  // Addresses of ceil(kept_tokens / tokens_per_block) blocks.
  // Ascending indices of the tokens that stay; kept[layer * layer_stride + head * head_stride + i]. Strides of 0:
  // all layers or heads keep the same.
  const uint32_t* kept = nullptr;
  uint64_t kept_layer_stride = 0;
  uint64_t kept_head_stride = 0;
  uint32_t kept_tokens = 0;
};

// REQUIRES: no destination is a source.
void Gather(const GatherRequest& request, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_GATHER_H_
