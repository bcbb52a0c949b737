// What a cached block is worth per unit of room and time, by its class and its age: learned from what comes back.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_MODEL_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_MODEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpool {

// Time is counted in blocks inserted: what a block in the cache keeps out.
//
// A use that ends begins a *wait*, of the block's class then. It ends by a hit, or is unended as yet. Waits are
// watched whether or not the block stays in the cache, so what is learned does not hang on what was evicted. Each
// class has a table over ages: how many waits came to that age, how many of them ended there. From it follows the
// *index* of a class at an age: the most hits per time that holding the block up to any later age would give,
//
//   index(c, a) = max over T of P(hit before T | waits at a) / E(time held until hit or T | waits at a)
//
// which is Gittins' index: with all blocks of one size, to drop the least is the best that can be done on
// this knowledge. A class of which little is known leans on what is expected of it: what was known before it was
// seen, or else the mean of all classes; more or less by as much as the classes of its group, which are alike, came
// back more or less than was expected of them.
//
// Learning goes in rounds: the owner shows all that wait now, and one class after the other is learned, at a microsecond
// each.
class ReuseModel {
 public:
  static constexpr int kAges = 40;

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

  // How many contents there are now; adapts the ages.
  void SetBlocks(uint32_t blocks);
  // A wait began: from now on its class is learned.
  void Begin(int cls);
  // It ended by a hit, at this age.
  void Hit(int cls, uint64_t age) { hits_[cls][AgeOf(age)] += 1; }
  // It is no longer watched, at this age.
  void Forget(int cls, uint64_t age) { gone_[cls][AgeOf(age)] += 1; }

  // All that wait are shown, each once a round, or some that stand for so many each.
  void Show(int cls, uint64_t age, double times = 1) { open_[cls][AgeOf(age)] += times; }
  // Learns the next class. False: in this round all were.
  bool LearnNext();
  void BeginRound(uint64_t now, uint64_t now_ms);

  double Index(int cls, uint64_t age) const { return index_[cls][AgeOf(age)]; }

 private:
  int AgeOf(uint64_t age) const;
  double AgeBegin(int age) const;
  void LearnClass(int cls);
  // Chances to end within each age, on what was known before.
  void Expect(int cls, Table* chances) const;

  const std::vector<int> group_of_;
  const Prior prior_;
  uint32_t blocks_ = 0;
  int unit_bits_ = 0;        // Ages are counted in 2^unit_bits_ blocks.
  std::vector<Table> hits_;  // Waits ended by a hit, by age.
  std::vector<Table> gone_;  // Waits no longer watched, by the age they had then.
  std::vector<Table> open_;  // Waits of today, as far as they were shown.
  std::vector<Table> index_;

  std::vector<bool> seen_;     // Of each class: a wait of it began.
  std::vector<int> to_learn_;  // Those, in the order in which they were seen.
  size_t learned_ = 0;         // Of them, in this round.
  uint64_t round_began_ = 0, round_began_ms_ = 0;
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

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_MODEL_H_
