// A linear model of what was measured lately: y = c0 x0 + c1 x1 + ..., by least squares in which an older sample counts less,
// with coefficients that are never negative: what is modelled is time, and no part of a piece of work takes less than none.
//
// x1 is the size of the work. Samples of one size, or nearly, fit any coefficient alike; so others than c1 are there only where
// that leaves clearly less unexplained.
#ifndef KVPOOL_SERVER_BASE_RECENT_FIT_H_
#define KVPOOL_SERVER_BASE_RECENT_FIT_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvpool {

// Not thread-safe. N is small: a solution tries each set of coefficients that may be the positive ones.
template <size_t N>
class RecentFit {
  static_assert(N >= 2 && N <= 4);

 public:
  using Sample = std::array<double, N>;
  // A sample counts half after so many others.
  explicit RecentFit(double half_life) : keep_(std::exp2(-1 / half_life)) {}

  // Values that are negative, or no numbers, are left out.
  void Add(const Sample& x, double y) {
    bool usable = std::isfinite(y) && y >= 0;
    for (const double value : x) usable = usable && std::isfinite(value) && value >= 0;
    if (!usable) return;
    for (size_t i = 0; i < N; ++i) {
      for (size_t j = 0; j < N; ++j) xx_[i][j] = keep_ * xx_[i][j] + x[i] * x[j];
      xy_[i] = keep_ * xy_[i] + x[i] * y;
    }
    yy_ = keep_ * yy_ + y * y;
    ++samples_;
    solved_ = false;
  }
  uint64_t samples() const { return samples_; }
  const Sample& coefficients() const {
    if (!solved_) Solve();
    return coefficients_;
  }
  double At(const Sample& x) const {
    double y = 0;
    for (size_t i = 0; i < N; ++i) y += coefficients()[i] * x[i];
    return y;
  }

 private:
  // Of all sets of coefficients whose solution has no negative one, the one that leaves least. One that comes later must leave a
  // tenth less than those before it.
  void Solve() const {
    constexpr double kClearly = .9;
    solved_ = true;
    coefficients_.fill(0);
    double least = yy_ / kClearly;
    for (const bool sized : {true, false}) {
      for (uint32_t set = 1; set < (1u << N); ++set) {
        Sample found{};
        if (((set & kSize) != 0) != sized || !SolveSet(set, &found)) continue;
        double left = yy_;
        for (size_t i = 0; i < N; ++i) {
          left -= 2 * found[i] * xy_[i];
          for (size_t j = 0; j < N; ++j) left += found[i] * xx_[i][j] * found[j];
        }
        // What is less is rounding.
        left = std::max(left, 1e-12 * yy_);
        if (left >= kClearly * least) continue;
        least = left;
        coefficients_ = found;
      }
    }
  }
  // Gaussian elimination of the normal equations of these coefficients, scaled to a diagonal of ones, since what is measured
  // has sizes of 1 and of 1e10. False: the samples don't tell them apart, or one would be negative.
  bool SolveSet(uint32_t set, Sample* found) const {
    constexpr double kLeastPivot = 1e-9;
    std::array<size_t, N> of{};
    size_t n = 0;
    for (size_t i = 0; i < N; ++i) {
      if ((set >> i & 1) != 0 && xx_[i][i] > 0) of[n++] = i;
    }
    if (n == 0) return false;
    std::array<std::array<double, N + 1>, N> rows{};
    std::array<double, N> scale{};
    for (size_t i = 0; i < n; ++i) scale[i] = 1 / std::sqrt(xx_[of[i]][of[i]]);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) rows[i][j] = xx_[of[i]][of[j]] * scale[i] * scale[j];
      rows[i][N] = xy_[of[i]] * scale[i];
    }
    for (size_t i = 0; i < n; ++i) {
      if (rows[i][i] < kLeastPivot) return false;
      for (size_t k = i + 1; k < n; ++k) {
        const double factor = rows[k][i] / rows[i][i];
        for (size_t j = i; j < n; ++j) rows[k][j] -= factor * rows[i][j];
        rows[k][N] -= factor * rows[i][N];
      }
    }
    for (size_t i = n; i-- > 0;) {
      double value = rows[i][N];
      for (size_t j = i + 1; j < n; ++j) value -= rows[i][j] * (*found)[of[j]] / scale[j];
      value /= rows[i][i];
      if (value < 0) return false;
      (*found)[of[i]] = value * scale[i];
    }
    return true;
  }

  static constexpr uint32_t kSize = 1u << 1;  // The set of c1 alone.
  const double keep_;
  std::array<std::array<double, N>, N> xx_{};
  Sample xy_{};
  double yy_ = 0;
  uint64_t samples_ = 0;
  // Solved when somebody asks.
  mutable Sample coefficients_{};
  mutable bool solved_ = true;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_RECENT_FIT_H_
