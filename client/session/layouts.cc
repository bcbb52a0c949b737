#include "client/layouts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/dtype.h"
#include "proto/support/limits.h"

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

absl::StatusOr<LowLayout> LowLayoutOf(const v1::Layout& layout, const LowLayoutOptions& options) {
  if (options.group >= static_cast<uint32_t>(layout.groups_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("group is ", options.group, "; the layout has ", layout.groups_size(), " groups"));
  }
  if (!LowLayout::CanHave(options.bits)) {
    return absl::InvalidArgumentError(absl::StrCat("bits is ", options.bits, "; must be 2, 4 or 8"));
  }
  const v1::LayerGroup& group = layout.groups(static_cast<int>(options.group));
  if (layout.encoding() != v1::ENCODING_STRIDED || group.k_head_dim() == 0) {
    return absl::InvalidArgumentError("only tokens of a strided layout can be kept in low precision");
  }
  for (const auto& [name, dim] :
       {std::pair("k_head_dim", group.k_head_dim()), std::pair("v_head_dim", group.v_head_dim())}) {
    if (dim > kMaxHeadDim)
      return absl::InvalidArgumentError(absl::StrCat(name, " is ", dim, "; the limit is ", kMaxHeadDim));
  }
  if (layout.block_bytes() % sizeof(uint32_t) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("block_bytes is ", layout.block_bytes(),
                                                   "; low precision is written in words of four bytes"));
  }
  if (group.kv_heads() > kMaxKvHeads) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_heads is ", group.kv_heads(), "; the limit is ", kMaxKvHeads));
  }
  const LowLayout low =
      LowLayout::Of({.planes = static_cast<uint32_t>(group.layers_size()) * group.kv_heads(),
                     .k_head_dim = group.k_head_dim(),
                     .v_head_dim = group.v_head_dim(),
                     .bits = options.bits,
                     .block_bytes = layout.block_bytes()});
  if (low.records_per_block > 0) return low;
  return absl::InvalidArgumentError(absl::StrCat(LowLayout::kGroupTokens, " tokens of a plane take ",
                                                 low.record_bytes, " bytes in ", options.bits,
                                                 " bits; a block has ", layout.block_bytes()));
}

}  // namespace kvpool
