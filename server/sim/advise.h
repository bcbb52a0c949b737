// How much memory, which policy, and what it saves.
#ifndef KVPOOL_SERVER_SIM_ADVISE_H_
#define KVPOOL_SERVER_SIM_ADVISE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// One paragraph and a table. `results` are of a sweep that has `infinite`. The size advised is the smallest at
// which the best policy saves nine tenths of what infinite memory would: beyond it a GiB more buys little. The table
// ends where more buys nothing. LRU is the best where no other saves half a hundredth of all prefill more.
std::string Advise(const Workload& workload, const std::vector<Result>& results, uint64_t block_bytes);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_ADVISE_H_
