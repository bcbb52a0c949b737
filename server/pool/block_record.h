// All that the pool knows of one block, in one cache line.
#ifndef KVPOOL_SERVER_POOL_BLOCK_RECORD_H_
#define KVPOOL_SERVER_POOL_BLOCK_RECORD_H_

#include <array>
#include <cstdint>
#include <cstring>

#include "server/pool/pool_types.h"

namespace kvpool {

// Zero bytes are a free block that was never leased.
struct alignas(64) BlockRecord {
  std::array<uint8_t, 32> key;  // Resident: the chain's key.
  uint32_t generation;
  uint32_t refs;            // Leased: the lessee's holds. Resident: holds + sealed children + 1 if pinned.
  uint32_t next_in_bucket;  // Resident: the index's link to the next. Free: the block kFreeJump below.
  uint32_t parent;          // Resident: block in front of it, or 0. Free: the block below in the stack, or 0.
  uint32_t children;        // Resident blocks that have it as their parent.
  uint32_t sealed_ms;
  uint32_t accessed_ms;
  uint16_t owner;  // Holder whose lease it is or that it is charged to.
  uint8_t meta;    // Group in bits 0-3, state in bits 4-6, BlockKey::raw in bit 7.
  uint8_t flags;

  static constexpr uint8_t kPinned = 1;     // Its Protection says until when.
  static constexpr uint8_t kProtected = 2;  // Has a Protection: pinned, or a priority of its own.
  static constexpr uint8_t kAliased = 4;    // Has keys besides the chain's.
  static constexpr uint8_t kListed = 8;     // Named in the Reclaim(victims) that is running.
  static constexpr uint8_t kRetired = 16;   // Generations are used up; quarantined for ever.
  static constexpr uint8_t kOffered = 32;   // Cached and childless: may leave.
  static constexpr uint8_t kForsaken = 64;  // Cached, and its last holder said that it is never used again.

  BlockState state() const { return static_cast<BlockState>(meta >> 4 & 7); }
  void set_state(BlockState state) {
    meta = static_cast<uint8_t>((meta & 0x8f) | static_cast<uint8_t>(state) << 4);
  }
  bool resident() const { return state() == BlockState::kSealed || state() == BlockState::kCached; }
  uint8_t group() const { return meta & 15; }
  bool raw() const { return meta >> 7; }
  // REQUIRES: key.group < 16.
  void set_key(const BlockKey& k) {
    key = k.bytes;
    meta = static_cast<uint8_t>((meta & 0x70) | k.group | (k.raw ? 0x80 : 0));
  }
  bool has_key(const BlockKey& k) const {
    // In words: std::array's == calls memcmp, which for 32 bytes is more call than comparison.
    const auto differs = [&](size_t at) {
      uint64_t mine, theirs;
      std::memcpy(&mine, key.data() + at, sizeof(mine));
      std::memcpy(&theirs, k.bytes.data() + at, sizeof(theirs));
      return mine ^ theirs;
    };
    static_assert(sizeof(key) == 32 && sizeof(k.bytes) == 32);
    return (differs(0) | differs(8) | differs(16) | differs(24)) == 0 && group() == k.group && raw() == k.raw;
  }
  BlockKey block_key() const { return {.bytes = key, .group = group(), .raw = raw()}; }
  bool has(uint8_t flag) const { return (flags & flag) != 0; }
  // The block's last life: a lease after this one would need a generation that was already used.
  bool spent() const { return generation == UINT32_MAX; }
};
static_assert(sizeof(BlockRecord) == 64 && alignof(BlockRecord) == 64);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_BLOCK_RECORD_H_
