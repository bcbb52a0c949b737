#include "client/layouts.h"

#include "proto/support/dtype.h"

namespace kvpool {

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
  k.set_dim_stride_bytes(ElementBytes(options.dtype));  // 0: the daemon refuses the layout and says why.
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
