// One layer's part of one destination block of a compaction.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_GATHER_ROWS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_GATHER_ROWS_H_

#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// No token. In place of the index of one that stays it says that the row has none, and all its elements are the filler.
inline constexpr uint32_t kNoToken = UINT32_MAX;
enum class Filler : uint8_t { kZero, kNan };

// The arguments of a compaction.
struct GatherRequest {
  KvView from;
  const uint64_t* to_blocks = nullptr;  // addresses of ceil(kept_tokens / tokens_per_block) blocks
  // Ascending indices of the tokens that stay: kept[layer * layer_stride + head * head_stride + i]. A stride
  // of 0 says that all layers or heads keep the same tokens. kNoToken may be among them where nothing is merged.
  const uint32_t* kept = nullptr;
  uint64_t kept_layer_stride = 0;
  uint64_t kept_head_stride = 0;
  uint32_t kept_tokens = 0;
  Filler filler = Filler::kZero;
};

// The bits of a NaN.
KVPOOL_HOST_DEVICE constexpr uint32_t NanBits(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kF32:
      return 0x7fc00000u;
    case KvDtype::kF16:
      return 0x7e00u;
    case KvDtype::kBf16:
      return 0x7fc0u;
    case KvDtype::kFp8E4m3:
      return 0x7fu;
    case KvDtype::kFp8E5m2:
      return 0x7eu;
  }
  return 0;
}

// Fills one row by a row team with elements of these bits.
template <typename Team>
KVPOOL_HOST_DEVICE void FillRow(const Team& team, const KvPlane& plane, KvDtype dtype, uint32_t bits,
                                unsigned char* to) {
  const uint32_t element_bytes = BytesOf(dtype);
  for (uint32_t d = team.in_row(); d < plane.head_dim; d += team.row_width()) {
    const uint64_t at = d * plane.dim_stride_bytes;
    for (uint32_t byte = 0; byte < element_bytes; ++byte)
      to[at + byte] = static_cast<unsigned char>(bits >> 8 * byte);
  }
}

// Copies one row by a row team, in words if its elements lie side by side and all is aligned.
template <typename Team>
KVPOOL_HOST_DEVICE void CopyRow(const Team& team, const KvPlane& plane, KvDtype dtype,
                                const unsigned char* from, unsigned char* to) {
  const uint32_t element_bytes = BytesOf(dtype);
  if (plane.dim_stride_bytes == element_bytes) {
    const uint32_t bytes = plane.head_dim * element_bytes;
    if ((reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | bytes) % sizeof(uint64_t) == 0) {
      for (uint32_t i = team.in_row(); i < bytes / sizeof(uint64_t); i += team.row_width()) {
        reinterpret_cast<uint64_t*>(to)[i] = reinterpret_cast<const uint64_t*>(from)[i];
      }
      return;
    }
  }
  for (uint32_t d = team.in_row(); d < plane.head_dim; d += team.row_width()) {
    const uint64_t at = d * plane.dim_stride_bytes;
    for (uint32_t byte = 0; byte < element_bytes; ++byte) to[at + byte] = from[at + byte];
  }
}

template <typename Team>
KVPOOL_HOST_DEVICE void GatherLayer(const Team& team, const GatherRequest& request, uint32_t block,
                                    uint32_t layer) {
  const KvView& kv = request.from;
  const uint32_t per_block = kv.shape.tokens_per_block;
  const uint32_t first = block * per_block;
  const uint32_t count = request.kept_tokens - first < per_block ? request.kept_tokens - first : per_block;
  const uint32_t rows = count * kv.shape.kv_heads;
  const KvPlane* const planes[2] = {&kv.k, &kv.v};
  const uint32_t bits = request.filler == Filler::kNan ? NanBits(kv.dtype) : 0;
  for (uint32_t p = 0; p < 2; ++p) {
    const KvPlane& plane = *planes[p];
    if (plane.head_dim == 0) continue;
    for (uint32_t row = team.row(); row < rows; row += team.rows()) {
      const uint32_t token = row / kv.shape.kv_heads, head = row % kv.shape.kv_heads;
      const uint32_t source =
          request.kept[layer * request.kept_layer_stride + head * request.kept_head_stride + first + token];
      const uint64_t within = plane.offset_bytes + layer * plane.layer_stride_bytes +
                              token * plane.token_stride_bytes + head * plane.head_stride_bytes;
      unsigned char* const to = reinterpret_cast<unsigned char*>(request.to_blocks[block] + within);
      if (source == kNoToken) {
        FillRow(team, plane, kv.dtype, bits, to);
        continue;
      }
      CopyRow(team, plane, kv.dtype, kv.Row(plane, source / per_block, layer, source % per_block, head), to);
    }
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_GATHER_ROWS_H_
