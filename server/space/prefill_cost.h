// What it takes to compute tokens, as engines have reported: fixed + n * per_token + n * (d + n / 2) * per_pair seconds for n
// tokens behind d others, where d + n / 2 is what each token has in front of it on average, and attends to.
//
// Of tokens that are brought up from below the pool the fixed part is not saved: at least one token of the request is computed
// all the same.
#ifndef KVPOOL_SERVER_SPACE_PREFILL_COST_H_
#define KVPOOL_SERVER_SPACE_PREFILL_COST_H_

#include <array>
#include <cstdint>
#include <optional>

#include "server/base/recent_fit.h"

namespace kvpool {

class PrefillCost {
 public:
  // With fewer, nothing is known.
  static constexpr uint64_t kLeastSamples = 32;

  void Add(uint64_t tokens, uint64_t before, double seconds) {
    const auto [n, pairs] = Regressors(tokens, before);
    seconds_.Add({1, n, pairs}, seconds);
  }
  // Seconds that are saved by not computing so many; none: too little was reported.
  std::optional<double> Saved(uint64_t tokens, uint64_t before) const {
    if (samples() < kLeastSamples) return std::nullopt;
    const auto [n, pairs] = Regressors(tokens, before);
    return seconds_.At({0, n, pairs});
  }
  uint64_t samples() const { return seconds_.samples(); }
  // Fixed, for each token, for each pair.
  const std::array<double, 3>& coefficients() const { return seconds_.coefficients(); }

 private:
  static std::array<double, 2> Regressors(uint64_t tokens, uint64_t before) {
    const auto n = static_cast<double>(tokens);
    return {n, n * (static_cast<double>(before) + n / 2)};
  }
  // A prefill counts half after so many others: engines change what they run, and a GPU its clock.
  RecentFit<3> seconds_{256};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_PREFILL_COST_H_
