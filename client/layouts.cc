#include "client/layouts.h"

namespace kvpool {
namespace {

uint64_t ElementBytes(v1::Dtype dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_FP8_E4M3:
    case v1::DTYPE_FP8_E5M2:
      return 1;
    case v1::DTYPE_UNSPECIFIED:
    case v1::Dtype_INT_MIN_SENTINEL_DO_NOT_USE_:
    case v1::Dtype_INT_MAX_SENTINEL_DO_NOT_USE_:
      break;
  }
  return 0;  // The daemon refuses the layout and says why.
}

}  // namespace

v1::Layout PagedLayout(const PagedLayoutOptions& options) {
  v1::Layout layout;
  layout.set_encoding(v1::ENCODING_STRIDED);
  v1::LayerGroup& group = *layout.add_groups();
  group.set_name("full");
  for (uint32_t layer = 0; layer < options.layers; ++layer) group.add_layers(layer);
  group.set_tokens_per_block(options.tokens_per_block);
  group.set_kv_heads(options.kv_heads);
  group.set_k_head_dim(options.head_dim);
  group.set_v_head_dim(options.head_dim);
  group.set_dtype(options.dtype);
  v1::Plane& k = *group.mutable_k();
  k.set_dim_stride_bytes(ElementBytes(options.dtype));
  k.set_head_stride_bytes(k.dim_stride_bytes() * options.head_dim);
  k.set_token_stride_bytes(k.head_stride_bytes() * options.kv_heads);
  k.set_layer_stride_bytes(k.token_stride_bytes() * options.tokens_per_block);
  const uint64_t plane_bytes = k.layer_stride_bytes() * options.layers;
  *group.mutable_v() = k;
  group.mutable_v()->set_offset_bytes(plane_bytes);
  layout.set_block_bytes(2 * plane_bytes);
  return layout;
}

v1::Layout OpaqueLayout(const OpaqueLayoutOptions& options) {
  v1::Layout layout;
  layout.set_encoding(v1::ENCODING_OPAQUE);
  layout.set_block_bytes(options.block_bytes);
  v1::LayerGroup& group = *layout.add_groups();
  group.set_name("full");
  group.add_layers(0);
  group.set_tokens_per_block(options.tokens_per_block);
  return layout;
}

}  // namespace kvpool
