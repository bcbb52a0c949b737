// The guard of what pruning costs: of a sample of the operations that drop tokens it keeps how far a layer's attention output moved
// (cuda/scorers/parts/drift_rows.h), for each space and policy, and turns a policy off in a space where that is too far.
//
//   mean of the newest `samples` drifts > bound, and there are as many   the policy is off there, until an operator resets it
//
// It has an entry for each open space and policy that has dropped tokens there. What it has is gone with the process: a daemon that
// starts measures again. Thread-safe; nothing is called under its mutex.
#ifndef KVPOOL_SERVER_SCORING_QUALITY_GUARD_H_
#define KVPOOL_SERVER_SCORING_QUALITY_GUARD_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"

namespace kvpool {

// A drift counts as scorers::kMostDrift at most, so no mean is above it.
inline constexpr double kMostGuardBound = 10;
inline constexpr uint32_t kMostGuardSamples = 4096;
inline constexpr double kLeastGuardShare = 1e-6;

struct GuardOptions {
  double share = 0;       // This part of those that can be measured is: 0, or kLeastGuardShare to 1.
  double bound = 0;       // 0 to kMostGuardBound; 0: it only measures.
  uint32_t samples = 32;  // 1 to kMostGuardSamples.
};

// What became of an operation that dropped tokens.
enum class GuardOutcome {
  kMeasured,
  kFailed,      // It was to be measured and could not be.
  kPassedOver,  // It is not in the sample.
  kNoWindow,    // No queries came with it.
  kUnsuited,    // The layout has no V, or what stays is not what was there.
};
inline constexpr size_t kGuardOutcomes = 5;
inline constexpr const char* kGuardOutcomeNames[kGuardOutcomes] = {"measured", "failed", "passed_over",
                                                                   "no_window", "unsuited"};
using GuardCounts = std::array<uint64_t, kGuardOutcomes>;

// What is known of a policy in a space.
struct GuardedPolicy {
  uint64_t space = 0;
  std::string policy;
  uint32_t samples = 0;  // So many measurements count now.
  double mean = 0;       // The mean of these.
  double greatest = 0;   // The greatest of any query and head among these.
  bool off = false;
  GuardCounts operations = {};  // Indexed by GuardOutcome; since the space was opened.
  uint64_t refused = 0;
  std::string last_failure;
};

// The same of a policy in all spaces since the daemon started, closed ones included.
struct GuardTotals {
  HistogramSnapshot drift;
  GuardCounts operations = {};
  uint64_t refused = 0;
  uint32_t off_spaces = 0;  // Now.
};

class QualityGuard {
 public:
  explicit QualityGuard(const GuardOptions& options);

  const GuardOptions& options() const { return options_; }
  // FAILED_PRECONDITION: the policy is off in the space.
  absl::Status Admit(uint64_t space, std::string_view policy) ABSL_LOCKS_EXCLUDED(mu_);
  // An operation drops tokens, and may be measured (kMeasured) or can't be: kNoWindow or kUnsuited. The answer is the sample's number
  // among those of its space and policy if it is to be measured; Add or Fail follows.
  std::optional<uint32_t> Take(uint64_t space, std::string_view policy, GuardOutcome can)
      ABSL_LOCKS_EXCLUDED(mu_);
  // `mean` and `greatest` are over the sample's queries and heads.
  void Add(uint64_t space, std::string_view policy, double mean, double greatest) ABSL_LOCKS_EXCLUDED(mu_);
  void Fail(uint64_t space, std::string_view policy, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);

  // Ordered by space and name. Space 0 is every space, an empty name every policy.
  std::vector<GuardedPolicy> List(uint64_t space, std::string_view policy) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets their samples, and turns them on where they are off; answers what they had.
  std::vector<GuardedPolicy> Reset(uint64_t space, std::string_view policy) ABSL_LOCKS_EXCLUDED(mu_);
  // The space is closed. REQUIRES: none of its operations is under way.
  void Forget(uint64_t space) ABSL_LOCKS_EXCLUDED(mu_);
  // Keyed by policy.
  std::map<std::string, GuardTotals> Totals() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Sample {
    double mean = 0, greatest = 0;
  };
  struct Entry {
    uint32_t credit = 0;          // Millionths of an operation: at a million one is measured.
    uint32_t taken = 0;           // Samples.
    std::vector<Sample> samples;  // The newest ones, a ring once it is full.
    uint32_t next = 0;            // Place of the next one in the ring.
    bool off = false;
    GuardCounts operations = {};
    uint64_t refused = 0;
    std::string last_failure;

    Sample Judged() const;
  };
  struct Policy {
    Histogram drift;
    GuardCounts operations = {};
    uint64_t refused = 0;
  };
  using Key = std::pair<uint64_t, std::string>;
  static GuardedPolicy Show(const Key& key, const Entry& entry);
  Policy& PolicyOf(std::string_view policy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Count(GuardOutcome outcome, std::string_view policy, Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const GuardOptions options_;
  const uint32_t share_millionths_;
  Mutex mu_;
  std::map<Key, Entry> entries_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Policy, std::less<>> policies_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_QUALITY_GUARD_H_
