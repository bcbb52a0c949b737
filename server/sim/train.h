// Trains the weights of policies from a trace.
//
// A trainer is one file and one line in the table of train.cc. It is deterministic given the workload, the
// capacities and the seed.
#ifndef KVPOOL_SERVER_SIM_TRAIN_H_
#define KVPOOL_SERVER_SIM_TRAIN_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/replacement/parts/weights.h"
#include "server/sim/train_options.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

struct Trainer {
  std::string_view policy;
  std::string_view summary;  // One line for --help.
  absl::StatusOr<Weights> (*train)(const Workload& workload, const TrainOptions& options);
};
absl::Span<const Trainer> Trainers();

// INVALID_ARGUMENT names the policies that are trained.
absl::StatusOr<Weights> Train(std::string_view policy, const Workload& workload, const TrainOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TRAIN_H_
