#include "server/scoring/sequence_shape.h"

#include "absl/strings/str_cat.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"
#include "server/wire/field_checks.h"

namespace kvpool {
namespace {

scorers::KvPlane PlaneOf(const v1::Plane& plane, uint32_t head_dim) {
  return {.offset_bytes = plane.offset_bytes(),
          .layer_stride_bytes = plane.layer_stride_bytes(),
          .token_stride_bytes = plane.token_stride_bytes(),
          .head_stride_bytes = plane.head_stride_bytes(),
          .dim_stride_bytes = plane.dim_stride_bytes(),
          .head_dim = head_dim};
}

}  // namespace

scorers::KvDtype DtypeOf(v1::Dtype dtype) {
  switch (dtype) {
    case v1::DTYPE_F16:
      return scorers::KvDtype::kF16;
    case v1::DTYPE_BF16:
      return scorers::KvDtype::kBf16;
    case v1::DTYPE_FP8_E4M3:
      return scorers::KvDtype::kFp8E4m3;
    case v1::DTYPE_FP8_E5M2:
      return scorers::KvDtype::kFp8E5m2;
    default:
      return scorers::KvDtype::kF32;
  }
}

absl::StatusOr<scorers::KvView> ViewOfGroup(const v1::LayerGroup& group, const v1::Sequence& sequence) {
  const uint64_t per_block = group.tokens_per_block();
  RETURN_IF_ERROR(CheckRange("sequence.last_block_tokens", sequence.last_block_tokens(), 0, per_block));
  const uint64_t last = sequence.last_block_tokens() == 0 ? per_block : sequence.last_block_tokens();
  const uint64_t tokens = (sequence.blocks_size() - uint64_t{1}) * per_block + last;
  RETURN_IF_ERROR(CheckRange("tokens of the sequence", tokens, 1, kMaxSequenceTokens));
  scorers::KvView view;
  view.shape = {.layers = static_cast<uint32_t>(group.layers_size()),
                .kv_heads = group.kv_heads(),
                .tokens_per_block = group.tokens_per_block(),
                .tokens = static_cast<uint32_t>(tokens),
                .k_head_dim = group.k_head_dim(),
                .v_head_dim = group.v_head_dim()};
  view.dtype = DtypeOf(group.dtype());
  view.k = PlaneOf(group.k(), group.k_head_dim());
  view.v = PlaneOf(group.v(), group.v_head_dim());
  return view;
}

}  // namespace kvpool
