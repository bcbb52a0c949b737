// All that the pool knows of one block, in one cache line.
#ifndef KVPOOL_SERVER_POOL_BLOCK_RECORD_H_
#define KVPOOL_SERVER_POOL_BLOCK_RECORD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "server/pool/pool_types.h"

namespace kvpool {

// What a field holds depends on the state:
//
//                   leased              resident                                free
//   key                                 the chain's key
//   refs            the lessee's holds  holds + sealed children + 1 if pinned   0
//   next_in_bucket                      the index's link to the next record
//   parent                              the block in front of it, or 0
//   children                            resident blocks whose parent it is
//   owner           the lessee          the session that is charged, or kNobody
//
// A record of zero bytes is a free block that was never leased. That of a withheld block is that of a free one, which is
// not in the set of those to be leased (free_set.h).
struct alignas(64) BlockRecord {
  std::array<uint8_t, 32> key;
  uint32_t generation;
  uint32_t refs;
  uint32_t next_in_bucket;
  uint32_t parent;
  uint32_t children;
  uint32_t sealed_ms;
  uint32_t accessed_ms;
  uint16_t owner;
  uint8_t meta;  // Bits 0 to 3 are the group, 4 to 6 the state, 7 is BlockKey::raw.
  uint8_t flags;

  // Pinned; its Protection says until when.
  static constexpr uint8_t kPinned = 1;
  // It has a Protection: it is pinned, or has a priority of its own.
  static constexpr uint8_t kProtected = 2;
  // It has keys besides the chain's.
  static constexpr uint8_t kAliased = 4;
  // The running Reclaim(victims) names it.
  static constexpr uint8_t kListed = 8;
  // Its generations are used up; it is quarantined for ever.
  static constexpr uint8_t kRetired = 16;
  // It is cached and childless, so it may leave.
  static constexpr uint8_t kOffered = 32;
  // It is cached, and its last holder said that it is never used again.
  static constexpr uint8_t kNeverReused = 64;
  // It is resident, and its content is to be compared with what was sealed before it is answered.
  static constexpr uint8_t kDoubted = 128;

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
    // Compared word by word: std::array's == calls memcmp, which for 32 bytes is more call than comparison.
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
  // A lease after this one would need a generation that was already used.
  bool last_generation() const { return generation == UINT32_MAX; }
};
static_assert(sizeof(BlockRecord) == 64 && alignof(BlockRecord) == 64);
// One word, for UndoLog.
static_assert(offsetof(BlockRecord, accessed_ms) % 8 == 0 &&
              offsetof(BlockRecord, meta) / 8 == offsetof(BlockRecord, accessed_ms) / 8);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_BLOCK_RECORD_H_
