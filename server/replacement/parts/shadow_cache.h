// A cache without memory: what a policy would find if it had decided alone, on a sample of the contents.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_SHADOW_CACHE_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_SHADOW_CACHE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/replacement/policy.h"

namespace kvpool {

// Its blocks are slots, 1 to `slots`. As in the pool, what is in use and what has a resident child is not offered. A
// content's parent is the nearest of the sample in front of it.
class ShadowCache {
 public:
  // REQUIRES: the policy was made for that many blocks and the null block.
  ShadowCache(std::unique_ptr<ReplacementPolicy> policy, uint32_t slots);

  // Most blocks from the next access on; at first all slots.
  void set_capacity(uint32_t blocks) { capacity_ = blocks; }
  // The content is in use from now on; true: it was resident. `parent`: hash, or 0.
  bool Access(uint64_t hash, uint64_t parent, uint64_t now_ms);
  // The use ended.
  void Used(uint64_t hash, uint64_t now_ms);
  // Per slot, the policy's own besides; of the hash table at its worst load of 7/16.
  static constexpr double kBytesPerSlot = 24 + 4 + 17 * 16.0 / 7;

 private:
  struct Slot {
    uint64_t hash;
    uint32_t parent, children;
    bool in_use, offered;
  };
  static_assert(sizeof(Slot) == 24);

  void Offer(uint32_t slot);
  void Withdraw(uint32_t slot);
  void Evict(uint32_t slot);

  const std::unique_ptr<ReplacementPolicy> policy_;
  uint32_t capacity_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> unused_;
  absl::flat_hash_map<uint64_t, uint32_t> slot_of_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_SHADOW_CACHE_H_
