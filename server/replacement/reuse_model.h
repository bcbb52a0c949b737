// What a cached block is worth per unit of room and time, by its class and its age: learned from what comes back.
#ifndef KVPOOL_SERVER_REPLACEMENT_REUSE_MODEL_H_
#define KVPOOL_SERVER_REPLACEMENT_REUSE_MODEL_H_

#include <array>
#include <cstdint>
#include <vector>

#include "server/replacement/ghost_list.h"

namespace kvpool {

// Time is counted in blocks inserted: what a block in the cache keeps out.
//
// A use that ends begins a *wait*, of the block's class then. It ends by a hit, or is unended as yet. Waits are
// watched whether or not the block stays in the cache, so what is learned does not hang on what was evicted;
// of a sample of the contents, chosen by hash, as large as kWatched allows. Each class has a table over ages:
// how many waits came to that age, how many of them ended there. From it follows the *index* of a class at an
// age: the most hits per time that holding the block up to any later age would give,
//
//   index(c, a) = max over T of P(hit before T | waits at a) / E(time held until hit or T | waits at a)
//
// which is Gittins' index: with all blocks of one size, to drop the least is the best that can be done on
// this knowledge. Classes of which little is known lean on the mean of all classes.
class ReuseModel {
 public:
  static constexpr int kAges = 40;
  static constexpr uint32_t kWatched = 1u << 16;
  // Of memory in all, whatever the number of blocks.
  static constexpr double kBytes = kWatched * GhostList::kBytesPerGhost;

  explicit ReuseModel(int classes);

  // At most so many blocks are cached: what is sampled follows from it.
  void SetBlocks(uint32_t blocks);
  void BeginWait(uint64_t hash, int cls, uint64_t now);
  // Found again.
  void EndWait(uint64_t hash, uint64_t now);
  // Learns from all so far; old knowledge fades.
  void Learn(uint64_t now);
  double Index(int cls, uint64_t age) const { return index_[cls][AgeOf(age)]; }

 private:
  using Table = std::array<double, kAges>;

  // Ages grow by a quarter from one to the next, from 64 blocks on.
  static int AgeOf(uint64_t age);
  bool Sampled(uint64_t hash) const { return (hash * 0x9e3779b97f4a7c15u >> 40) % sample_ == 0; }

  uint64_t learned_ = 0;
  uint32_t sample_ = 1;      // One content in so many.
  GhostList waits_;          // Class and beginning, by hash.
  std::vector<Table> hits_;  // Waits ended by a hit, by age.
  std::vector<Table> gone_;  // Waits no longer watched, by the age they had then.
  std::vector<Table> index_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_REUSE_MODEL_H_
