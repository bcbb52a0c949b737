#include "server/replacement/reuse_model.h"

#include <algorithm>
#include <cmath>

#include "proto/support/check.h"

namespace kvpool {
namespace {

constexpr uint64_t kClassBits = 8;
// Waits of the mean of all classes that a class begins with.
constexpr double kPrior = 10;
// Of what was learned, half is forgotten in so many inserted blocks per content sampled.
constexpr double kHalfLife = 200e3;

// Where each age begins; one more than there are ages.
const std::array<uint64_t, ReuseModel::kAges + 1>& AgeBegins() {
  static const auto begins = [] {
    std::array<uint64_t, ReuseModel::kAges + 1> b{};
    uint64_t at = 64;
    for (int i = 1; i <= ReuseModel::kAges; ++i, at += at / 4) b[i] = at;
    return b;
  }();
  return begins;
}

}  // namespace

ReuseModel::ReuseModel(int classes) : hits_(classes), gone_(classes), index_(classes) {
  KVPOOL_CHECK(classes <= 1 << kClassBits, "%d classes", classes);
  for (int c = 0; c < classes; ++c) {
    hits_[c].fill(0);
    gone_[c].fill(0);
    // Before anything is known the oldest leaves.
    for (int a = 0; a < kAges; ++a) index_[c][a] = 1.0 / (1 + a);
  }
}

int ReuseModel::AgeOf(uint64_t age) {
  const auto& begins = AgeBegins();
  return static_cast<int>(std::upper_bound(begins.begin(), begins.end() - 1, age) - begins.begin()) - 1;
}

void ReuseModel::SetBlocks(uint32_t blocks) {
  // Four times as many contents as are cached, as far as the watched go.
  const auto sample = std::max<uint32_t>(1, static_cast<uint32_t>(uint64_t{blocks} * 4 / kWatched));
  if (sample <= sample_) return;
  sample_ = sample;
  waits_.Trim(0);  // Those that are no longer sampled would look as if they never ended.
}

void ReuseModel::BeginWait(uint64_t hash, int cls, uint64_t now) {
  if (!Sampled(hash)) return;
  waits_.Add(hash, now << kClassBits | static_cast<uint64_t>(cls));
  while (waits_.size() > kWatched) {
    const uint64_t oldest = waits_.oldest();
    gone_[oldest % (1 << kClassBits)][AgeOf(now - (oldest >> kClassBits))] += 1;
    waits_.Trim(kWatched);
  }
}

void ReuseModel::EndWait(uint64_t hash, uint64_t now) {
  if (!Sampled(hash)) return;
  const uint64_t* const wait = waits_.Find(hash);
  if (wait == nullptr) return;
  hits_[*wait % (1 << kClassBits)][AgeOf(now - (*wait >> kClassBits))] += 1;
  waits_.Remove(hash);
}

void ReuseModel::Learn(uint64_t now) {
  const double memory = std::exp2(-static_cast<double>(now - learned_) / (kHalfLife * sample_));
  learned_ = now;
  const size_t classes = hits_.size();
  // Ends by hit, and all ends, those of today's waits at today's ages among them.
  std::vector<Table> ends = gone_;
  for (size_t c = 0; c < classes; ++c) {
    for (int a = 0; a < kAges; ++a) ends[c][a] += hits_[c][a];
  }
  waits_.ForEachValue(
      [&](uint64_t wait) { ends[wait % (1 << kClassBits)][AgeOf(now - (wait >> kClassBits))] += 1; });
  // Waits that came to an age; the mean over classes is what a class leans on.
  std::vector<Table> at_risk(classes);
  Table all_hits{}, all_risk{};
  for (size_t c = 0; c < classes; ++c) {
    double later = 0;
    for (int a = kAges - 1; a >= 0; --a) {
      later += ends[c][a];
      at_risk[c][a] = later;
      all_hits[a] += hits_[c][a];
      all_risk[a] += later;
    }
  }
  const auto& begins = AgeBegins();
  for (size_t c = 0; c < classes; ++c) {
    Table ends_here;  // Chance that a wait of this age ends in it.
    for (int a = 0; a < kAges; ++a) {
      const double mean = all_risk[a] > 0 ? all_hits[a] / all_risk[a] : 0;
      ends_here[a] = (hits_[c][a] + kPrior * mean) / (at_risk[c][a] + kPrior);
    }
    for (int a = 0; a < kAges; ++a) {
      double waiting = 1, hit = 0, held = 0, best = 0;
      for (int t = a; t < kAges; ++t) {
        const auto width = static_cast<double>(begins[t + 1] - begins[t]);
        const double hits_now = waiting * ends_here[t];
        hit += hits_now;
        held += (waiting - hits_now / 2) * width;
        waiting -= hits_now;
        best = std::max(best, hit / held);
      }
      index_[c][a] = best;
    }
    for (int a = 0; a < kAges; ++a) {
      hits_[c][a] *= memory;
      gone_[c][a] *= memory;
    }
  }
}

}  // namespace kvpool
