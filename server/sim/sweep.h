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

// Parses "all" or a list, separated by commas, of policies, opt and infinite.
absl::StatusOr<std::vector<std::string>> ParsePolicies(absl::string_view text);
// Parses numbers of blocks, separated by commas.
absl::StatusOr<std::vector<uint32_t>> ParseCapacities(absl::string_view text);
// Round numbers from the largest request to where everything fits, `points` per factor of ten.
std::vector<uint32_t> SpreadCapacities(const Workload& workload, int points_per_decade);

struct SweepOptions {
  std::vector<std::string> policies;
  std::vector<uint32_t> capacities;
  uint64_t seed = 1;
  PrefillCost cost;
  // Weights for the policy that they name; null: those built in.
  std::shared_ptr<const Weights> weights;
  uint32_t threads = 1;
  bool progress = false;  // a bar on stderr, once it takes longer than a second
};

// Answers results in the order of the options, by policy and then by capacity; `infinite` comes once.
absl::StatusOr<std::vector<Result>> Sweep(const Workload& workload, const SweepOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_SWEEP_H_
