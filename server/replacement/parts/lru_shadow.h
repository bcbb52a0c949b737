// What LRU would have missed, and how far behind it a policy may fall before LRU chooses in its place.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_LRU_SHADOW_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_LRU_SHADOW_H_

#include <cstdint>

#include "server/replacement/parts/ghost_list.h"

namespace kvpool {

// A list of the contents that an LRU cache of the same size would hold. For each content asked for it knows which
// of the two caches had it, and keeps
//
//   debt     misses that LRU would not have had, less those that only LRU would have had, less a 16th of LRU's;
//            never below minus the number of resident blocks, so that old merits don't pay for new sins
//   absent   contents that LRU would hold and the policy has let go
//
// The policy may choose while debt + absent is less than the number of resident blocks. Each victim of its choice
// adds at most one to absent, and a victim of LRU's none while there are any, as the least recently used is then
// none of LRU's; a miss that LRU has not moves one from absent to debt. So, with k blocks,
//
//   misses <= 17/16 of LRU's + k + 1 at all times,
//
// not more than 2.07 times LRU's, which misses at least k before anything is evicted, and in the long run a 16th
// more than LRU's however wrong the policy is. It is the bound of a deterministic combination (Fiat et al. 1991;
// CombineDeterministic in the succinct predictions of arXiv 2210.02775), kept eviction by eviction instead of by
// phases, so that it needs no second shadow and no reset.
//
// Beyond kWatched blocks a sample of the contents is watched, chosen by hash, and the bound holds for the sample.
class LruShadow {
 public:
  static constexpr uint32_t kWatched = 1u << 16;
  // Of memory in all.
  static constexpr double kBytes = kWatched * GhostList::kBytesPerGhost;

  explicit LruShadow(uint32_t max_blocks) : sample_((uint64_t{max_blocks} + kWatched - 1) / kWatched) {}

  // The content was asked for and is resident only from now on, or was before.
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

  const uint64_t sample_;  // One content in so many.
  GhostList contents_;     // Least recently used first; whether they are resident.
  int64_t debt_ = 0, absent_ = 0, resident_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_LRU_SHADOW_H_
