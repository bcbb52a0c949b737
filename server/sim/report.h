// Results of replays as text for people and as JSON for programs.
#ifndef KVPOOL_SERVER_SIM_REPORT_H_
#define KVPOOL_SERVER_SIM_REPORT_H_

#include <string>
#include <vector>

#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

std::string TextTable(const Workload& workload, const std::vector<Result>& results);
// A table in Markdown with a row per policy and hit ratios by capacity; time per eviction and bytes are the
// largest of all capacities.
std::string MarkdownTable(const Workload& workload, const std::vector<Result>& results);
std::string Json(const Workload& workload, const std::vector<Result>& results);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_REPORT_H_
