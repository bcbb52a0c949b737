// Learns how often, and after how long, contents of a class are asked for again.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_STATISTICS_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_STATISTICS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "server/replacement/parts/ghost_list.h"

namespace kvpool {

// A use that ends begins a wait, which has the class that the content has then. The wait ends when the
// content is asked for again, resident or not. It is given up when it has lasted too long, or when so many
// have begun since that it is forgotten. Time is any number of the caller's that never falls. Old counts are
// halved now and then.
//
// Beyond kWatched blocks a sample of the contents is watched, chosen by hash. So it takes at most kWatched *
// GhostList::kBytesPerGhost, 2.2 MiB.
class ReuseStatistics {
 public:
  static constexpr uint32_t kWatched = 1u << 16;
  static constexpr int kMaxClasses = 256;

  ReuseStatistics(int classes, uint32_t max_blocks);

  // Begins a wait, in place of one of the same content that has not ended.
  void Begin(uint64_t hash, int cls, uint64_t now);
  // Answers the class of the wait that this ends, if one is watched.
  std::optional<int> End(uint64_t hash, uint64_t now);
  // Gives up the waits that began before that time.
  void GiveUp(uint64_t before);

  // Estimates for a class, which lean on the mean of all classes where little is known of it:
  //
  //   ChanceOfEnded   waits that ended / (waits that ended + waits given up)
  //   ShareOfBegun    waits that ended / waits that began, which also serves where none is ever given up
  //   MeanWait        the mean time of the waits that ended
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

  const uint64_t sample_;  // One content in so many is watched.
  // The first to begin first; the number has class and beginning.
  GhostList waits_;
  std::vector<Counts> classes_;
  Counts all_;
  // Waits that ended since the counts were last halved.
  uint32_t ended_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_STATISTICS_H_
