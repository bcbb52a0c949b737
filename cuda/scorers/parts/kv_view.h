// A view of one sequence's K and V in place: blocks in sequence order, with the layout's strides.
//
//   element (block, layer, token, head, dim) of K is at
//     blocks[block] + k.offset_bytes + layer * k.layer_stride_bytes + token * k.token_stride_bytes
//                   + head * k.head_stride_bytes + dim * k.dim_stride_bytes
//
// `layer` counts within the layer group. All blocks but the last are full. With MLA, which keeps one latent
// in K, V is absent: v.head_dim is 0. Included by kernels: plain types only.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_KV_VIEW_H_
#define KVPOOL_CUDA_SCORERS_PARTS_KV_VIEW_H_

#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool::scorers {

// The values of kvpool.v1.Dtype but its zero.
enum class KvDtype : uint8_t { kF32, kF16, kBf16, kFp8E4m3, kFp8E5m2 };

KVPOOL_HOST_DEVICE constexpr uint32_t BytesOf(KvDtype dtype) {
  return dtype == KvDtype::kF32 ? 4 : dtype == KvDtype::kF16 || dtype == KvDtype::kBf16 ? 2 : 1;
}

// The numbers of a kvpool.v1.Plane.
struct KvPlane {
  uint64_t offset_bytes = 0;
  uint64_t layer_stride_bytes = 0;
  uint64_t token_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint64_t dim_stride_bytes = 0;
  uint32_t head_dim = 0;  // elements; 0: there is no such plane
};

// The extents of one sequence in one layer group.
struct KvShape {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t tokens_per_block = 0;
  uint32_t tokens = 0;  // valid tokens, in all blocks together
  uint32_t k_head_dim = 0;
  uint32_t v_head_dim = 0;

  KVPOOL_HOST_DEVICE constexpr uint32_t blocks() const {
    return tokens / tokens_per_block + (tokens % tokens_per_block != 0);
  }
  // A plane is one (layer, kv head); its index is layer * kv_heads + head.
  KVPOOL_HOST_DEVICE constexpr uint32_t planes() const { return layers * kv_heads; }
  KVPOOL_HOST_DEVICE constexpr uint32_t TokensOf(uint32_t block) const {
    const uint32_t before = block * tokens_per_block;
    return tokens - before < tokens_per_block ? tokens - before : tokens_per_block;
  }
};

struct KvView {
  const uint64_t* blocks = nullptr;  // the address of each block, on the side that reads
  KvShape shape;
  KvDtype dtype = KvDtype::kF32;
  KvPlane k;
  KvPlane v;

  KVPOOL_HOST_DEVICE const unsigned char* Row(const KvPlane& plane, uint32_t block, uint32_t layer,
                                              uint32_t token_in_block, uint32_t head) const {
    return reinterpret_cast<const unsigned char*>(
        blocks[block] + plane.offset_bytes + layer * plane.layer_stride_bytes +
        token_in_block * plane.token_stride_bytes + head * plane.head_stride_bytes);
  }
  KVPOOL_HOST_DEVICE const unsigned char* KeyRow(uint32_t layer, uint32_t head, uint32_t token) const {
    return Row(k, token / shape.tokens_per_block, layer, token % shape.tokens_per_block, head);
  }
  KVPOOL_HOST_DEVICE const unsigned char* ValueRow(uint32_t layer, uint32_t head, uint32_t token) const {
    return Row(v, token / shape.tokens_per_block, layer, token % shape.tokens_per_block, head);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_KV_VIEW_H_
