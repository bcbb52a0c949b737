// Counts what LRU would have missed, and lets a policy fall only so far behind it before LRU chooses
// in its place.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_LRU_SHADOW_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_LRU_SHADOW_H_

#include <cstdint>

#include "server/replacement/parts/ghost_list.h"

namespace kvpool {

// It lists the contents that an LRU cache of the same size would hold. The size is how many are resident when a use
// ends: at other times a lease may have evicted many blocks to make room for contents that are inserted later, and which
// LRU may hold already. For each content asked for it knows which of the two caches had it, and keeps
//
//   debt     misses that LRU would not have had - misses that only LRU would have had - LRU's misses / 16;
//            never below minus the number of resident blocks, so that an old lead does not pay for new misses
//   absent   contents that LRU would hold and the policy has evicted
//
// The policy may choose while debt + absent is less than the number of resident blocks. Each victim of its
// choice adds at most one to absent. A victim of LRU's choice adds none while absent > 0, because the least
// recently used block is then none that LRU would hold. A miss that LRU would not have had moves one from
// absent to debt. So, with k blocks,
//
//   misses <= 17/16 of LRU's + k + 1 at all times,
//
// not more than 2.07 times LRU's, which misses at least k before anything is evicted, and in the long run a
// 16th more than LRU's however wrong the policy is. It is the bound of a deterministic combination (Fiat et
// al. 1991; CombineDeterministic in the succinct predictions of arXiv 2210.02775), kept eviction by eviction
// instead of by phases, so that it needs no second shadow and no reset.
//
// Beyond kWatched blocks a sample of the contents is watched, chosen by hash, and the bound holds for the
// sample. So it takes about kWatched * GhostList::kBytesPerGhost, 2.2 MiB, and up to twice that between two ends.
class LruShadow {
 public:
  static constexpr uint32_t kWatched = 1u << 16;

  explicit LruShadow(uint32_t max_blocks) : sample_((uint64_t{max_blocks} + kWatched - 1) / kWatched) {}

  // The content was asked for: OnMiss if it was not resident before, OnHit if it was.
  void OnMiss(uint64_t hash);
  void OnHit(uint64_t hash);
  void OnUsed(uint64_t hash);
  void OnEvict(uint64_t hash);

  bool PolicyMayChoose() const { return debt_ + kShare * absent_ < kShare * resident_; }

 private:
  enum : uint64_t { kAbsent, kResident };
  static constexpr int64_t kShare = 16;  // Debt is counted in 16ths of a miss.

  bool Watched(uint64_t hash) const {
    return sample_ <= 1 || (hash * 0x9e3779b97f4a7c15u >> 32) % sample_ == 0;
  }
  void Count(bool policy_missed, bool lru_missed);
  void Trim();

  const uint64_t sample_;  // One content in so many is watched.
  // Least recently used first; the number says whether a content is resident.
  GhostList contents_;
  int64_t debt_ = 0, absent_ = 0, resident_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_LRU_SHADOW_H_
