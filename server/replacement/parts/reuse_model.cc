#include "server/replacement/parts/reuse_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// The weight, in waits, of what is expected of a class by its prior or by the mean of all classes.
constexpr double kExpectedWaits = 20;
// The weight, in hits at an age, of what is expected of a group.
constexpr double kGroupHits = 5;
// Half of what was learned is forgotten after so many inserted blocks, or so many turnovers of the cache if
// those take longer.
constexpr double kHalfLife = 400e3, kHalfLifeTurnovers = 24;
// The beginnings of ages double in three steps.
constexpr int kAgesPerOctave = 3;
constexpr double kFirstAge = 64;
// From so many blocks on ages are counted in units of more than one block.
constexpr uint32_t kUnitBlocks = 1u << 15;

// Where each age begins, in units, and where the last ends.
const std::array<double, ReuseModel::kAges + 1>& AgeBegins() {
  static const auto begins = [] {
    std::array<double, ReuseModel::kAges + 1> b{};
    for (int a = 1; a <= ReuseModel::kAges; ++a)
      b[a] = kFirstAge * std::exp2((a - 1) / static_cast<double>(kAgesPerOctave));
    return b;
  }();
  return begins;
}

}  // namespace

const std::array<double, ReuseModel::Prior::kSpans + 1>& ReuseModel::Prior::SpanBegins() {
  static constexpr std::array<double, kSpans + 1> begins = {
      0, 5e3, 10e3, 20e3, 30e3, 45e3, 60e3, 80e3, 105e3, 140e3, 190e3, 260e3, 360e3, 500e3, 700e3, 1e6, 2e6};
  return begins;
}

ReuseModel::ReuseModel(std::vector<int> group_of, Prior prior)
    : group_of_(std::move(group_of)),
      prior_(std::move(prior)),
      classes_(group_of_.size()),
      sums_(*std::max_element(group_of_.begin(), group_of_.end()) + 2),
      last_(sums_.size()) {}

double ReuseModel::AgeBegin(int age) const {
  return AgeBegins()[age] * static_cast<double>(1ull << unit_bits_);
}

int ReuseModel::AgeOf(uint64_t age) const {
  // 2^(1/3) and 2^(2/3), scaled to numbers whose top bit is set.
  constexpr uint64_t kThird = 0xa14517cc6b945712, kTwoThirds = 0xcb2ff529eb71e416;
  const uint64_t units = age >> unit_bits_;
  if (units < static_cast<uint64_t>(kFirstAge)) return 0;
  // It is the first age of its octave or one of the two after it.
  const int octave = std::bit_width(units / static_cast<uint64_t>(kFirstAge)) - 1;
  const int first = 1 + octave * kAgesPerOctave;
  if (first + kAgesPerOctave > kAges) return kAges - 1;
  const uint64_t top = units << std::countl_zero(units);
  return first + (top >= kThird ? 1 : 0) + (top >= kTwoThirds ? 1 : 0);
}

ReuseModel::Table ReuseModel::IndexOf(const Table& chances, const Table& widths) {
  // A stretch of ages has, per wait that reaches it, hits, time held and how many waits go on at its end.
  // From the last age to the first, each stretch takes in those after it as long as they give more hits per
  // time than it does.
  struct Stretch {
    double hits, held, waiting;
    int end;
  };
  std::array<Stretch, kAges> from;
  Table index;
  for (int a = kAges - 1; a >= 0; --a) {
    Stretch s = {chances[a], (1 - chances[a] / 2) * widths[a], 1 - chances[a], a + 1};
    while (s.end < kAges && from[s.end].hits * s.held > s.hits * from[s.end].held) {
      const Stretch& next = from[s.end];
      s = {s.hits + s.waiting * next.hits, s.held + s.waiting * next.held, s.waiting * next.waiting,
           next.end};
    }
    from[a] = s;
    index[a] = s.hits / s.held;
  }
  return index;
}

void ReuseModel::SetBlocks(uint32_t blocks) {
  blocks_ = blocks;
  while (blocks / kUnitBlocks >> unit_bits_ > 1) {
    ++unit_bits_;
    // In doubled units every wait is three ages lower.
    for (const int cls : to_learn_) {
      for (Table* t : {&classes_[cls]->hits, &classes_[cls]->gone, &classes_[cls]->open}) {
        for (int i = 1; i <= kAgesPerOctave; ++i) (*t)[0] += (*t)[i];
        for (int a = 1; a + kAgesPerOctave < kAges; ++a) (*t)[a] = (*t)[a + kAgesPerOctave];
        std::fill(t->end() - kAgesPerOctave, t->end(), 0);
      }
    }
  }
}

void ReuseModel::Begin(int cls) {
  if (classes_[cls] != nullptr) return;
  auto begun = std::make_unique<Class>();
  if (prior_.rates_of) begun->expected = prior_.rates_of(cls);
  for (int a = 0; a < kAges; ++a) begun->index[a] = 1.0 / (1 + a);
  classes_[cls] = std::move(begun);
  to_learn_.push_back(cls);
}

bool ReuseModel::LearnNext() {
  if (learned_ == to_learn_.size()) return false;
  LearnClass(to_learn_[learned_++]);
  return true;
}

void ReuseModel::BeginRound(uint64_t now, uint64_t now_ms) {
  const auto blocks = static_cast<double>(now - round_began_);
  memory_ = std::exp2(-blocks / std::max(kHalfLife, kHalfLifeTurnovers * blocks_));
  if (now_ms > round_began_ms_) {
    const double rate = blocks / static_cast<double>(now_ms - round_began_ms_);
    blocks_per_ms_ = blocks_per_ms_ == 0 ? rate : 0.7 * blocks_per_ms_ + 0.3 * rate;
  }
  round_began_ = now;
  round_began_ms_ = now_ms;
  learned_ = 0;
  last_.swap(sums_);
  std::fill(sums_.begin(), sums_.end(), Sums{});
}

void ReuseModel::Expect(const Class& learned, Table* chances) const {
  const bool knows = prior_.rates_of && blocks_per_ms_ > 0;
  const auto& begins = Prior::SpanBegins();
  int span = 0;
  for (int a = 0; a < kAges; ++a) {
    const double mean = last_.back().at_risk[a] > 0 ? last_.back().hits[a] / last_.back().at_risk[a] : 0;
    if (!knows) {
      (*chances)[a] = mean;
      continue;
    }
    const double begin = AgeBegin(a) / blocks_per_ms_, end = AgeBegin(a + 1) / blocks_per_ms_;
    while (span + 1 < Prior::kSpans && begins[span + 1] <= begin) ++span;
    double hazard = 0;
    for (int s = span; s < Prior::kSpans; ++s) {
      const double from = std::max(begin, begins[s]);
      const double to = s + 1 == Prior::kSpans ? end : std::min(end, begins[s + 1]);
      if (to > from) hazard += (to - from) * learned.expected[s];
      if (end <= begins[s + 1]) break;
    }
    (*chances)[a] = 1 - std::exp(-hazard);
  }
}

void ReuseModel::LearnClass(int cls) {
  auto& [expected, hits, gone, open, index] = *classes_[cls];
  // How many waits reached each age, and the chance that one of them ends there.
  Table at_risk, chances;
  double later = 0;
  for (int a = kAges - 1; a >= 0; --a) at_risk[a] = later += hits[a] + gone[a] + open[a];
  Expect(*classes_[cls], &chances);
  for (Sums* sums : {&sums_[group_of_[cls]], &sums_.back()}) {
    for (int a = 0; a < kAges; ++a) {
      sums->hits[a] += hits[a];
      sums->at_risk[a] += at_risk[a];
      sums->expected[a] += at_risk[a] * chances[a];
    }
  }
  const Sums& all = last_.back();
  const Sums& group = last_[group_of_[cls]];
  for (int a = 0; a < kAges; ++a) {
    const double in_all = (all.hits[a] + 1) / (all.expected[a] + 1);
    const double in_group = (group.hits[a] + kGroupHits) / (group.expected[a] * in_all + kGroupHits);
    chances[a] = (hits[a] + kExpectedWaits * std::min(0.9, chances[a] * in_all * in_group)) /
                 (at_risk[a] + kExpectedWaits);
  }
  Table widths;
  for (int a = 0; a < kAges; ++a) widths[a] = AgeBegin(a + 1) - AgeBegin(a);
  index = IndexOf(chances, widths);
  for (int a = 0; a < kAges; ++a) {
    hits[a] *= memory_;
    gone[a] *= memory_;
  }
  open.fill(0);
}

}  // namespace kvpool
