#include "server/replacement/parts/reuse_statistics.h"

#include <algorithm>

#include "proto/support/check.h"

namespace kvpool {
namespace {

constexpr uint64_t kClassBits = 8;
// The weight, in waits, of the mean of all classes.
constexpr double kPrior = 20;
// Waits after which what was known counts half: some hundreds for each class.
constexpr uint32_t kHalfLifeWaits = 50'000;
// Waits that began when knowledge had not faded yet may end when it has.
constexpr double kMostSure = 0.999;

uint64_t BeginOf(uint64_t wait) { return wait >> kClassBits; }
size_t ClassOf(uint64_t wait) { return wait % (1 << kClassBits); }

}  // namespace

// Eight times as many contents are watched as are cached, as far as the watched go.
ReuseStatistics::ReuseStatistics(int classes, uint32_t max_blocks)
    : sample_((uint64_t{max_blocks} * 8 + kWatched - 1) / kWatched), classes_(classes) {
  KVPOOL_CHECK(classes <= kMaxClasses, "%d classes", classes);
}

void ReuseStatistics::Ended() {
  if (++ended_ < kHalfLifeWaits) return;
  ended_ = 0;
  const auto fade = [](Counts* c) { *c = {c->begun / 2, c->reused / 2, c->given_up / 2, c->waited / 2}; };
  for (Counts& c : classes_) fade(&c);
  fade(&all_);
}

void ReuseStatistics::GiveUpOldest() {
  ++classes_[ClassOf(waits_.oldest())].given_up;
  ++all_.given_up;
  waits_.Trim(waits_.size() - 1);
  Ended();
}

void ReuseStatistics::GiveUp(uint64_t before) {
  while (waits_.size() > 0 && BeginOf(waits_.oldest()) < before) GiveUpOldest();
}

void ReuseStatistics::Begin(uint64_t hash, int cls, uint64_t now) {
  if (!Watched(hash)) return;
  if (const uint64_t* const wait = waits_.Find(hash)) {
    // Knowledge may have faded since it was counted.
    for (Counts* c : {&classes_[ClassOf(*wait)], &all_}) c->begun = std::max(0.0, c->begun - 1);
  }
  ++classes_[cls].begun;
  ++all_.begun;
  waits_.Add(hash, now << kClassBits | static_cast<uint64_t>(cls));
  while (waits_.size() > kWatched) GiveUpOldest();
}

std::optional<int> ReuseStatistics::End(uint64_t hash, uint64_t now) {
  if (!Watched(hash)) return std::nullopt;
  const uint64_t* const wait = waits_.Find(hash);
  if (wait == nullptr) return std::nullopt;
  const auto waited = static_cast<double>(now - std::min(now, BeginOf(*wait)));
  const size_t cls = ClassOf(*wait);
  for (Counts* c : {&classes_[cls], &all_}) {
    ++c->reused;
    c->waited += waited;
  }
  waits_.Remove(hash);
  Ended();
  return static_cast<int>(cls);
}

double ReuseStatistics::ChanceOfEnded(int cls) const {
  const Counts& c = classes_[cls];
  const double all = all_.reused + all_.given_up;
  const double mean = all > 0 ? all_.reused / all : 0.5;
  return (c.reused + kPrior * mean) / (c.reused + c.given_up + kPrior);
}

double ReuseStatistics::ShareOfBegun(int cls) const {
  const Counts& c = classes_[cls];
  const double mean = all_.begun > 0 ? all_.reused / all_.begun : 0.5;
  return std::min(kMostSure, (c.reused + kPrior * mean) / (c.begun + kPrior));
}

double ReuseStatistics::MeanWait(int cls) const {
  const Counts& c = classes_[cls];
  const double mean = all_.reused > 0 ? all_.waited / all_.reused : 1;
  return std::max(1.0, (c.waited + kPrior * mean) / (c.reused + kPrior));
}

}  // namespace kvpool
