// Miss-ratio curves of many policies in one picture.
#ifndef KVPOOL_SERVER_SIM_CURVE_H_
#define KVPOOL_SERVER_SIM_CURVE_H_

#include <string>
#include <vector>

#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// An SVG of its own: share of blocks missed over capacity (logarithmic), a line per policy named at its right
// end, the bounds in black and grey. REQUIRES: two capacities at least.
std::string DrawCurves(const Workload& workload, const std::vector<Result>& results);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_CURVE_H_
