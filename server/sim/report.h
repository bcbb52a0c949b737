// What came of the replays, for people and for programs.
#ifndef KVPOOL_SERVER_SIM_REPORT_H_
#define KVPOOL_SERVER_SIM_REPORT_H_

#include <string>
#include <vector>

#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

std::string TextTable(const Workload& workload, const std::vector<Result>& results);
// One table in Markdown: a row per policy, hit ratios by capacity; decision time and bytes are the largest met.
std::string MarkdownTable(const Workload& workload, const std::vector<Result>& results);
std::string Json(const Workload& workload, const std::vector<Result>& results);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_REPORT_H_
