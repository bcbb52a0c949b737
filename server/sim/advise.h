// Advises how much memory and which policy a trace pays for.
#ifndef KVPOOL_SERVER_SIM_ADVISE_H_
#define KVPOOL_SERVER_SIM_ADVISE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Answers one paragraph and a table. `results` are those of a sweep that has `infinite`. The size advised
// is the smallest at which the best policy saves nine tenths of what infinite memory would. The table
// ends where more memory saves nothing more. LRU counts as the best unless another policy saves 0.5 % of
// all prefill more.
std::string Advise(const Workload& workload, const std::vector<Result>& results, uint64_t block_bytes);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_ADVISE_H_
