// What a trainer is told.
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
  std::vector<uint32_t> capacities;  // Blocks of the pools it learns in. Not empty.
  uint64_t seed = 1;
  uint32_t epochs = 0;  // 0: as many as the trainer finds right.
  PrefillCost cost;
  std::string trained;                           // For the metadata.
  std::function<void(size_t, size_t)> progress;  // Steps done, steps in all. May be null.
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_TRAIN_OPTIONS_H_
