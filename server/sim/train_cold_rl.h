// The trainer of cold_rl: deep Q-learning with a target network (Mnih et al. 2015, double: van Hasselt
// et al. 2016).
#ifndef KVPOOL_SERVER_SIM_TRAIN_COLD_RL_H_
#define KVPOOL_SERVER_SIM_TRAIN_COLD_RL_H_

#include "absl/status/statusor.h"
#include "server/replacement/parts/weights.h"
#include "server/sim/train_options.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Each epoch replays the workload at every capacity with the network as it is, a share of decisions at
// random, and then learns from a sample of the candidates that were judged:
//
//   asked for again within a turnover   Q(keep) = kDiscount ^ turnovers until then
//   not                                 Q(keep) = kDiscount * max Q of the same block a turnover older
//   leaving                             Q(evict) = 0
//
// Evicted blocks are watched too: whether they are asked for again shows what keeping them
// would have brought.
absl::StatusOr<Weights> TrainColdRl(const Workload& workload, const TrainOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TRAIN_COLD_RL_H_
