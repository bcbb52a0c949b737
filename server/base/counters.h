// Sums of structs of counters, so that no sum has a list of its own that a new counter could be missing from.
#ifndef KVPOOL_SERVER_BASE_COUNTERS_H_
#define KVPOOL_SERVER_BASE_COUNTERS_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvpool {

// Adds each counter of `from` to the same one of `to`. REQUIRES: Counters holds uint64_t and arrays
// of it, nothing else.
template <typename Counters>
void AddCounters(const Counters& from, Counters* to) {
  using Words = std::array<uint64_t, sizeof(Counters) / sizeof(uint64_t)>;
  const Words more = std::bit_cast<Words>(from);
  Words sum = std::bit_cast<Words>(*to);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
  *to = std::bit_cast<Counters>(sum);
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_COUNTERS_H_
