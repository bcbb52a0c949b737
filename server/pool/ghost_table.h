// The keys that were evicted lately, and when: a table of fixed size, in sets of four that
// forget their oldest.
//
// It answers "was this here?" for miss reasons, regret and Explain, never whether a block may be used: two
// keys may, very rarely, share a 64-bit fingerprint.
#ifndef KVPOOL_SERVER_POOL_GHOST_TABLE_H_
#define KVPOOL_SERVER_POOL_GHOST_TABLE_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "server/base/virtual_array.h"

namespace kvpool {

class GhostTable {
 public:
  explicit GhostTable(uint32_t entries)
      : sets_(std::bit_ceil(std::max<uint32_t>(1, entries / kWays))), mask_(sets_.size() - 1) {}

  struct Ghost {
    uint64_t fingerprint;  // The key's hash; 0: unused.
    uint32_t evicted_ms;
    bool regretted;  // An eviction is regretted once.
  };
  static_assert(sizeof(Ghost) == 16);

  // So many keys are about to be remembered: see PrefixIndex::Expect.
  void Expect(uint32_t keys) {
    if (keys >= sets_.pages()) sets_.Populate(sets_.size());
  }

  void Prefetch(uint64_t hash) const { sets_.Prefetch(hash >> 32 & mask_); }

  // Records that the key was evicted, in place of the key of its set that was evicted first.
  void Remember(uint64_t hash, uint32_t now_ms) {
    Set& set = sets_[hash >> 32 & mask_];
    const uint64_t fingerprint = Fingerprint(hash);
    Ghost* place = &set.ghosts[0];
    for (Ghost& ghost : set.ghosts) {
      if (ghost.fingerprint == fingerprint || ghost.fingerprint == 0) {
        place = &ghost;
        break;
      }
      if (now_ms - ghost.evicted_ms > now_ms - place->evicted_ms) place = &ghost;
    }
    *place = {.fingerprint = fingerprint, .evicted_ms = now_ms, .regretted = false};
  }

  // Null if the key is not remembered. A key that is resident again is still remembered: ask the index first.
  Ghost* Find(uint64_t hash) { return const_cast<Ghost*>(static_cast<const GhostTable*>(this)->Find(hash)); }
  const Ghost* Find(uint64_t hash) const {
    for (const Ghost& ghost : sets_[hash >> 32 & mask_].ghosts) {
      if (ghost.fingerprint == Fingerprint(hash)) return &ghost;
    }
    return nullptr;
  }

  size_t bytes() const { return sets_.bytes(); }

 private:
  static constexpr uint32_t kWays = 4;
  struct alignas(64) Set {
    Ghost ghosts[kWays];
  };
  static uint64_t Fingerprint(uint64_t hash) { return hash != 0 ? hash : 1; }

  VirtualArray<Set> sets_;
  const uint64_t mask_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_GHOST_TABLE_H_
