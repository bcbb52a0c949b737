// Observations counted into fixed buckets. Not thread-safe: the mutex of what is observed
// protects the histogram too.
#ifndef KVPOOL_SERVER_BASE_HISTOGRAM_H_
#define KVPOOL_SERVER_BASE_HISTOGRAM_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvpool {

// Upper bounds in seconds. A verb holds its space's mutex for microseconds; a call over a Unix socket takes 0.1 to
// 0.5 ms; a disk answers in 0.1 ms to seconds, those that wait in front of it included; a block lives for minutes.
inline constexpr double kHoldBounds[] = {0.000001, 0.0000025, 0.000005, 0.00001, 0.000025, 0.00005, 0.0001,
                                         0.00025,  0.0005,    0.001,    0.002,   0.005,    0.01,    0.1};
inline constexpr double kCallBounds[] = {0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025,
                                         0.005,   0.01,     0.025,   0.05,   0.1,     0.25,   1};
inline constexpr double kTierBounds[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                                         0.05,   0.1,     0.25,   0.5,   1,      2.5,   10};
inline constexpr double kLifeBounds[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,  1,
                                         2,     5,     10,    20,   50,   100,  200, 500, 1000, 1800};

// What was observed until now: counts per bucket (not cumulative), and the sum in seconds.
struct HistogramSnapshot {
  std::vector<double> bounds;
  std::vector<uint64_t> counts;  // bounds.size() + 1.
  double sum = 0;
};

class Histogram {
 public:
  // `bounds` ascending, and outlives the histogram.
  explicit Histogram(absl::Span<const double> bounds) : bounds_(bounds), counts_(bounds.size() + 1) {}

  void Observe(double seconds) {
    ++counts_[std::lower_bound(bounds_.begin(), bounds_.end(), seconds) - bounds_.begin()];
    sum_ += seconds;
  }
  HistogramSnapshot Snapshot() const { return {{bounds_.begin(), bounds_.end()}, counts_, sum_}; }

 private:
  const absl::Span<const double> bounds_;
  std::vector<uint64_t> counts_;
  double sum_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_HISTOGRAM_H_
