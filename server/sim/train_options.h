// The options of a trainer.
#ifndef KVPOOL_SERVER_SIM_TRAIN_OPTIONS_H_
#define KVPOOL_SERVER_SIM_TRAIN_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/sim/replay.h"

namespace kvpool::sim {

struct TrainOptions {
  std::vector<uint32_t> capacities;  // sizes of the pools it learns in, in blocks; not empty
  uint64_t seed = 1;
  uint32_t epochs = 0;  // 0: the trainer's default
  PrefillCost cost;
  std::string trained;                           // how they were trained, for the metadata of the weights
  std::function<void(size_t, size_t)> progress;  // steps done, steps in all; may be null
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TRAIN_OPTIONS_H_
