// Which part of what a pool caches is asked for again: of the last spells of its blocks without a holder, those that ended with a
// use and not with an eviction, and evictions that were regretted. So a model whose cache is small is not taken for one that
// asks for nothing twice.
//
// Not thread-safe.
#ifndef KVPOOL_SERVER_POOL_REUSE_SHARE_H_
#define KVPOOL_SERVER_POOL_REUSE_SHARE_H_

#include <algorithm>
#include <cstdint>

namespace kvpool {

class ReuseShare {
 public:
  void Reused() {
    ++reuses_;
    End();
  }
  void Evicted() { End(); }
  // Its eviction has been counted.
  void Regretted() { ++reuses_; }
  // Above 0; 1 until something else is known.
  double share() const { return std::min(1.0, (reuses_ + kPrior) / (spells_ + kPrior)); }

 private:
  // A chain of some dozen blocks is used at once, so that a few hundred say little.
  static constexpr double kPrior = 1024;
  // When there are so many all before count half: what is asked for changes.
  static constexpr double kRecentSpells = 16384;

  void End() {
    if (++spells_ < kRecentSpells) return;
    spells_ /= 2;
    reuses_ /= 2;
  }

  double reuses_ = 0, spells_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_REUSE_SHARE_H_
