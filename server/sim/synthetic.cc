#include "server/sim/synthetic.h"

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvpool::sim {
namespace {

constexpr uint32_t kRequests = 60'000, kMsBetween = 10, kBlockTokens = 16;

// Requests for objects; each object is a chain of its own.
class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) { workload_.tokens_per_block = kBlockTokens; }

  bool full() const { return workload_.requests.size() >= kRequests; }
  double Uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  // Object 0 to n - 1, the first ones more often: 1 / (rank + 1).
  uint32_t Skewed(uint32_t n) { return static_cast<uint32_t>(std::pow(n + 1.0, Uniform()) - 1) % n; }
  // An object that was not asked for before.
  uint64_t New() { return next_new_++; }
  void Ask(uint64_t object, uint32_t blocks) {
    if (full()) return;
    const auto [it, is_new] = first_content_.try_emplace(object, workload_.distinct);
    if (is_new) workload_.distinct += blocks;
    workload_.requests.push_back({.now_ms = workload_.requests.size() * kMsBetween,
                                  .first = workload_.contents.size(),
                                  .blocks = blocks,
                                  .tokens = blocks * kBlockTokens});
    for (uint32_t i = 0; i < blocks; ++i) workload_.contents.push_back(it->second + i);
  }
  Workload Take(std::string name) {
    workload_.name = std::move(name);
    return std::move(workload_);
  }

 private:
  static constexpr uint64_t kFirstNew = uint64_t{1} << 32;  // Objects below are the maker's to number.

  std::mt19937_64 random_;
  Workload workload_;
  absl::flat_hash_map<uint64_t, uint32_t> first_content_;
  uint64_t next_new_ = kFirstNew;
};

void SizeInversion(Maker* make) {
  while (!make->full()) {
    if (make->Uniform() < 0.2) {
      make->Ask(make->Below(100), 8);
    } else {
      make->Ask(make->New(), 1 + make->Below(3));
    }
  }
}

void Bursts(Maker* make) {
  while (!make->full()) {
    if (make->Uniform() < 0.6) {
      make->Ask(make->Below(400), 2);
      continue;
    }
    const uint64_t object = make->New();
    for (uint32_t times = 1 + make->Below(3), i = 0; i < times; ++i) make->Ask(object, 4);
  }
}

void Scans(Maker* make) {
  while (!make->full()) {
    for (int i = 0; i < 600; ++i) make->Ask(make->Skewed(700), 1);
    for (int i = 0; i < 1200; ++i) make->Ask(make->New(), 1);
  }
}

void Flagged(Maker* make) {
  while (!make->full()) {
    make->Ask(make->Below(300), 1);
    make->Ask(make->New(), 2);
  }
}

struct Kind {
  absl::string_view name;
  void (*make)(Maker*);
};
constexpr Kind kKinds[] = {
    {"size_inversion", SizeInversion}, {"bursts", Bursts}, {"scans", Scans}, {"flagged", Flagged}};

}  // namespace

absl::StatusOr<Workload> MakeSynthetic(absl::string_view trace) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(absl::StripPrefix(trace, kSyntheticPrefix), absl::MaxSplits(':', 1));
  uint64_t seed = 1;
  if (parts.size() == 2 && !absl::SimpleAtoi(parts[1], &seed)) {
    return absl::InvalidArgumentError(absl::StrCat(trace, ": seed \"", parts[1], "\" is not a whole number"));
  }
  for (const Kind& kind : kKinds) {
    if (kind.name != parts[0]) continue;
    Maker maker(seed);
    kind.make(&maker);
    return maker.Take(std::string(trace));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(trace, ": there are ", absl::StrJoin(kKinds, ", ", [](std::string* out, const Kind& kind) {
                     absl::StrAppend(out, kSyntheticPrefix, kind.name);
                   })));
}

}  // namespace kvpool::sim
