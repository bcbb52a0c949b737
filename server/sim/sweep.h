// Many replays of one trace: every policy at every capacity.
#ifndef KVPOOL_SERVER_SIM_SWEEP_H_
#define KVPOOL_SERVER_SIM_SWEEP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/replacement/parts/weights.h"
#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// "all", or names with commas between them: policies, opt and infinite.
absl::StatusOr<std::vector<std::string>> ParsePolicies(absl::string_view text);
// Numbers of blocks with commas between them.
absl::StatusOr<std::vector<uint32_t>> ParseCapacities(absl::string_view text);
// Round numbers from the largest request to where everything fits, `points` to a factor of ten.
std::vector<uint32_t> SpreadCapacities(const Workload& workload, int points_per_decade);

struct SweepOptions {
  std::vector<std::string> policies;
  std::vector<uint32_t> capacities;
  uint64_t seed = 1;
  PrefillCost cost;
  std::shared_ptr<const Weights> weights;  // For the policy that they are of; null: those built in.
  uint32_t threads = 1;
  bool progress = false;  // A bar on stderr, once it takes longer than a second.
};

// Results by policy, then capacity, as the options list them; `infinite` once.
absl::StatusOr<std::vector<Result>> Sweep(const Workload& workload, const SweepOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_SWEEP_H_
