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
// this knowledge. A class of which little is known leans on what is expected of it: what was known before it was
// seen, or else the mean of all classes; more or less by as much as the classes of its group, which are alike, came
// back more or less than was expected of them.
//
// Learning is done in steps of a few microseconds: a sweep over the open waits, then one class a step.
class ReuseModel {
 public:
  static constexpr int kAges = 40;
  static constexpr uint32_t kWatched = 1u << 16;
  // Of memory in all, whatever the number of blocks.
  static constexpr double kBytes = kWatched * GhostList::kBytesPerGhost;

  // What is known of a class before it was seen: how many of those that wait at an age in ms are found again
  // per ms. Of no class: nothing is.
  struct Prior {
    static constexpr int kSpans = 16;
    static const std::array<double, kSpans + 1>& SpanBegins();  // In ms; the last is the end.
    using Rates = std::array<double, kSpans>;
    std::vector<Rates> classes;
  };

  using Table = std::array<double, kAges>;

  // The index at each age, of the chance that a wait which comes to an age ends there by a hit, and how long ages are.
  static Table IndexOf(const Table& chances, const Table& widths);

  // group_of: of each class, from 0.
  explicit ReuseModel(std::vector<int> group_of, Prior prior = {});

  // How many contents there are now; adapts the sample and the ages.
  void SetBlocks(uint32_t blocks);
  void BeginWait(uint64_t hash, int cls, uint64_t now);
  void EndWait(uint64_t hash, uint64_t now);
  // A step of learning.
  void Step(uint64_t now, uint64_t now_ms);
  double Index(int cls, uint64_t age) const { return index_[cls][AgeOf(age)]; }

 private:
  int AgeOf(uint64_t age) const;
  double AgeBegin(int age) const;
  bool Sampled(uint64_t hash) const { return (hash * 0x9e3779b97f4a7c15u >> 40) % sample_ == 0; }
  void BeginSweep(uint64_t now, uint64_t now_ms);
  void Sweep(uint64_t now);
  void LearnClass(int cls);
  // Chances to end within each age, on what was known before.
  void Expect(int cls, Table* chances) const;

  const std::vector<int> group_of_;
  const Prior prior_;
  uint32_t sample_ = 1;      // One content in so many.
  uint64_t unit_ = 1;        // Ages are counted in so many blocks.
  GhostList waits_;          // Class and beginning, by hash.
  std::vector<Table> hits_;  // Waits ended by a hit, by age.
  std::vector<Table> gone_;  // Waits no longer watched, by the age they had then.
  std::vector<Table> open_;  // Waits of today, as far as the sweep came.
  std::vector<Table> index_;

  uint32_t swept_ = 0;  // Slots of waits_.
  int learned_ = 0;     // Classes since the sweep.
  uint64_t sweep_began_ = 0, sweep_began_ms_ = 0;
  double memory_ = 1;         // What is kept of the past in this round.
  double blocks_per_ms_ = 0;  // 0: not known.
  // Hits, those expected, and waits that came to an age.
  struct Sums {
    Table hits{}, expected{}, at_risk{};
  };
  // Of each group and, the last, of all classes; in this round and the one before.
  std::vector<Sums> sums_, last_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_REUSE_MODEL_H_
