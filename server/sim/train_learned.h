// The trainer of learned, which fits how soon blocks of each class are found again.
#ifndef KVPOOL_SERVER_SIM_TRAIN_LEARNED_H_
#define KVPOOL_SERVER_SIM_TRAIN_LEARNED_H_

#include "absl/status/statusor.h"
#include "server/replacement/parts/weights.h"
#include "server/sim/train_options.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Maximizes the likelihood, penalized for large weights, that ReuseNetwork gives to the waits of the trace:
// for each use, when the block was asked for again, as if nothing ever left. The capacities do not matter.
absl::StatusOr<Weights> TrainLearned(const Workload& workload, const TrainOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TRAIN_LEARNED_H_
