// The trainer of learned: which blocks are found again, and how soon.
#ifndef KVPOOL_SERVER_SIM_TRAIN_LEARNED_H_
#define KVPOOL_SERVER_SIM_TRAIN_LEARNED_H_

#include "absl/status/statusor.h"
#include "server/replacement/parts/weights.h"
#include "server/sim/train_options.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Fits ReuseNetwork to what an oracle knows of the trace: of each use, when what was used was found again, had
// nothing ever left. The likelihood of that is made as large as small weights allow. The capacities do not matter.
absl::StatusOr<Weights> TrainLearned(const Workload& workload, const TrainOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TRAIN_LEARNED_H_
