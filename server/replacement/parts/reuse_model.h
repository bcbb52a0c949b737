// Learns what a cached block is worth per unit of room and time, by its class and its age.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_MODEL_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_MODEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace kvpool {

// Time is counted in inserted blocks: those are what a cached block keeps out.
//
// A use that ends begins a *wait*, which has the class that the block has then and ends by a hit. Waits are
// watched whether or not the block stays in the cache, so what is learned does not depend on what was
// evicted. Each class has a table over ages: how many waits reached the age, and how many of them ended
// there. The *index* of a class at an age is the most hits per time that holding the block until some later
// age T gives,
//
//   index(c, a) = max over T of P(hit before T | waits at a) / E(time held until hit or T | waits at a)
//
// which is Gittins' index: as all blocks have one size, evicting the least index is the best choice that
// this knowledge allows. A class of which little is known is estimated by what was expected of it, from
// its prior or else from the mean of all classes, times the ratio of seen to expected hits in its group
// of similar classes.
//
// Learning goes in rounds. In each the owner shows all open waits, then the classes are learned one by one,
// at a microsecond each.
class ReuseModel {
 public:
  static constexpr int kAges = 40;

  // What is known of each class before it is seen: the rate, in hits per ms, at which blocks of an age in ms
  // are found again.
  struct Prior {
    static constexpr int kSpans = 16;
    // Where each span begins, in ms; the last number is the end of the last span.
    static const std::array<double, kSpans + 1>& SpanBegins();
    using Rates = std::array<double, kSpans>;
    // Asked once for each class that comes. Null: nothing is known.
    std::function<Rates(int cls)> rates_of;
  };

  using Table = std::array<double, kAges>;

  // The index at each age, from the chance that a wait which reaches an age ends there by a hit, and the
  // lengths of the ages.
  static Table IndexOf(const Table& chances, const Table& widths);

  // group_of[cls] is the group of a class; groups count from 0.
  explicit ReuseModel(std::vector<int> group_of, Prior prior = {});

  // Adapts the ages to how many blocks are resident.
  void SetBlocks(uint32_t blocks);
  // A wait began. From now on its class is learned.
  void Begin(int cls);
  // A wait ended by a hit, at this age. REQUIRES, here and below: a wait of the class began.
  void Hit(int cls, uint64_t age) { classes_[cls]->hits[AgeOf(age)] += 1; }
  // A wait is no longer watched, from this age on.
  void Forget(int cls, uint64_t age) { classes_[cls]->gone[AgeOf(age)] += 1; }

  // An open wait, shown once a round; it stands for `times` waits.
  void Show(int cls, uint64_t age, double times = 1) { classes_[cls]->open[AgeOf(age)] += times; }
  // Learns the next class. False if all were learned in this round.
  bool LearnNext();
  void BeginRound(uint64_t now, uint64_t now_ms);

  // Before anything is learned of the class the oldest leaves.
  double Index(int cls, uint64_t age) const {
    return classes_[cls] == nullptr ? 1.0 / (1 + AgeOf(age)) : classes_[cls]->index[AgeOf(age)];
  }

 private:
  struct Class {
    Prior::Rates expected{};
    // Waits by age: those that ended by a hit, those no longer watched, and the open ones shown in this round.
    Table hits{}, gone{}, open{};
    Table index;
  };

  int AgeOf(uint64_t age) const;
  double AgeBegin(int age) const;
  void LearnClass(int cls);
  // The chance to end within each age, by what was known before.
  void Expect(const Class& learned, Table* chances) const;

  const std::vector<int> group_of_;
  const Prior prior_;
  uint32_t blocks_ = 0;
  int unit_bits_ = 0;  // Ages are counted in units of 2^unit_bits_ blocks.
  // Null: no wait of the class began. Most spaces see few of the classes.
  std::vector<std::unique_ptr<Class>> classes_;

  // The classes in the order in which they were seen, and how many of them were learned in this round.
  std::vector<int> to_learn_;
  size_t learned_ = 0;
  uint64_t round_began_ = 0, round_began_ms_ = 0;
  double memory_ = 1;         // The share of past counts that this round keeps.
  double blocks_per_ms_ = 0;  // 0: unknown.
  // By age: hits, expected hits, and waits that reached it.
  struct Sums {
    Table hits{}, expected{}, at_risk{};
  };
  // One for each group, then one for all classes: in this round, and in the one before.
  std::vector<Sums> sums_, last_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_REUSE_MODEL_H_
