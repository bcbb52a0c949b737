// Block ids and refs, on both sides of the wire.
#ifndef KVPOOL_PROTO_SUPPORT_BLOCK_REF_H_
#define KVPOOL_PROTO_SUPPORT_BLOCK_REF_H_

#include <cstdint>

namespace kvpool {

// Index of a block in its space: block b lies at base + b * block_stride_bytes. 0 is the null block, which is
// never leased and never written.
enum class BlockId : uint32_t {};
inline constexpr BlockId kNullBlock{0};
constexpr uint32_t Index(BlockId id) { return static_cast<uint32_t>(id); }

// A block at one moment of its life. The generation moves each time the block changes hands, so that a ref
// kept too long names nothing. On the wire: generation << 32 | id.
struct BlockRef {
  BlockId id = kNullBlock;
  uint32_t generation = 0;

  static constexpr BlockRef Unpack(uint64_t wire) {
    return {BlockId{static_cast<uint32_t>(wire)}, static_cast<uint32_t>(wire >> 32)};
  }
  constexpr uint64_t Pack() const { return uint64_t{generation} << 32 | Index(id); }
  friend constexpr bool operator==(const BlockRef&, const BlockRef&) = default;
};
inline constexpr BlockRef kNullRef{};

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_BLOCK_REF_H_
