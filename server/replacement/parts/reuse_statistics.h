// How often, and after how long, contents of a class are asked for again: learned from what comes back.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_STATISTICS_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_STATISTICS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "server/replacement/parts/ghost_list.h"

namespace kvpool {

// A use that ends begins a wait of the content's class then. The wait ends when the content is asked for again,
// resident or not, or is given up when it has lasted too long, or so many have begun since that it is forgotten.
// Time is the caller's: anything that doesn't run backwards. Old knowledge fades by halves.
//
// Beyond kWatched a sample of the contents is watched, chosen by hash.
class ReuseStatistics {
 public:
  static constexpr uint32_t kWatched = 1u << 16;
  // Of memory in all.
  static constexpr double kBytes = kWatched * GhostList::kBytesPerGhost;
  static constexpr int kMaxClasses = 256;

  ReuseStatistics(int classes, uint32_t max_blocks);

  // Takes the place of a wait that the content has not ended.
  void Begin(uint64_t hash, int cls, uint64_t now);
  // The class of the wait that this ends, if one is watched.
  std::optional<int> End(uint64_t hash, uint64_t now);
  // Waits that began before are given up.
  void GiveUp(uint64_t before);

  // Of the class's waits that ended or were given up, the share that ended; of those that began, the share that ended
  // so far, which says something also where waits are never given up; the mean time of those that ended. Classes of
  // which little is known lean on all.
  double ChanceOfEnded(int cls) const;
  double ShareOfBegun(int cls) const;
  double MeanWait(int cls) const;

 private:
  struct Counts {
    double begun = 0, reused = 0, given_up = 0, waited = 0;
  };
  bool Watched(uint64_t hash) const {
    return sample_ <= 1 || (hash * 0x9e3779b97f4a7c15u >> 32) % sample_ == 0;
  }
  void GiveUpOldest();
  void Ended();

  const uint64_t sample_;  // One content in so many.
  GhostList waits_;        // Class and beginning; the first to begin first.
  std::vector<Counts> classes_;
  Counts all_;
  uint32_t ended_ = 0;  // Since knowledge last faded.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_STATISTICS_H_
