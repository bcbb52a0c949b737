#include "client/layouts.h"

#include <gtest/gtest.h>

namespace kvpool {
namespace {

uint64_t LastByte(const v1::LayerGroup& group, const v1::Plane& plane, uint32_t head_dim,
                  uint64_t element_bytes) {
  return plane.offset_bytes() + (group.layers_size() - 1) * plane.layer_stride_bytes() +
         (group.tokens_per_block() - 1) * plane.token_stride_bytes() +
         (group.kv_heads() - 1) * plane.head_stride_bytes() + (head_dim - 1) * plane.dim_stride_bytes() +
         element_bytes;
}

TEST(PagedLayout, KAndVFillTheBlock) {
  const v1::Layout layout =
      PagedLayout({.layers = 32, .kv_heads = 8, .head_dim = 128, .tokens_per_block = 16});
  EXPECT_EQ(layout.block_bytes(), 2u * 32 * 16 * 8 * 128 * 2);
  const v1::LayerGroup& group = layout.groups(0);
  EXPECT_EQ(LastByte(group, group.k(), group.k_head_dim(), 2), group.v().offset_bytes());
  EXPECT_EQ(LastByte(group, group.v(), group.v_head_dim(), 2), layout.block_bytes());
}

TEST(OpaqueLayout, SaysOnlyItsSize) {
  const v1::Layout layout = OpaqueLayout({.block_bytes = 4096, .tokens_per_block = 512});
  EXPECT_EQ(layout.encoding(), v1::ENCODING_OPAQUE);
  EXPECT_EQ(layout.block_bytes(), 4096u);
  EXPECT_EQ(layout.groups(0).tokens_per_block(), 512u);
}

TEST(LowLayoutOf, CountsTheBlocksThatTokensTake) {
  const v1::Layout layout =
      PagedLayout({.layers = 32, .kv_heads = 8, .head_dim = 128, .tokens_per_block = 16});
  const LowLayout low = LowLayoutOf(layout, {.bits = 4}).value();
  EXPECT_EQ(low.record_bytes, 128 * 4 + 32 * 64 + 32 * 4 + 32 * 64);
  EXPECT_EQ(low.records_per_block, layout.block_bytes() / low.record_bytes);
  EXPECT_EQ(low.Blocks(0), 0);
  // 256 planes: 442 records fit into a block of 2 MiB.
  EXPECT_EQ(low.Blocks(1), 1);
  EXPECT_EQ(low.Blocks(32), 1);
  EXPECT_EQ(low.Blocks(33), 2);
  EXPECT_EQ(low.Blocks(32 * 20), 12);
  EXPECT_EQ(low.Blocks(32 * 20 + 1), 13);
}

TEST(LowLayoutOf, RefusesWhatTheDaemonWould) {
  const v1::Layout layout = PagedLayout({.layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_block = 4});
  EXPECT_EQ(LowLayoutOf(layout, {.bits = 3}).status().message(), "bits is 3; must be 2, 4 or 8");
  EXPECT_EQ(LowLayoutOf(layout, {.group = 1}).status().message(), "group is 1; the layout has 1 groups");
  EXPECT_EQ(LowLayoutOf(layout, {}).status().message(),
            "32 tokens of a plane take 416 bytes in 4 bits; a block has 128");
  EXPECT_FALSE(LowLayoutOf(OpaqueLayout({.block_bytes = 4096}), {}).ok());
}

}  // namespace
}  // namespace kvpool
