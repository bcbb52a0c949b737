// An event log of kvpoold as a workload.
#ifndef KVPOOL_SERVER_SIM_READ_EVENT_LOG_H_
#define KVPOOL_SERVER_SIM_READ_EVENT_LOG_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Judges by the first bytes of the file.
bool IsEventLog(const std::string& path);

// Each match is a request. Blocks sealed behind its chain are the request's answer; a seal without a match is
// a request that asks for nothing. FILE.1 is read first if it is the part before FILE. Only the layer group
// that is matched first is read. A hint belongs to the last request that had the blocks. A record that is cut
// off at the end is left out. DATA_LOSS: this is no event log. INVALID_ARGUMENT: the options name no space
// and there are several, which it lists. Prints on stderr how many events were lost.
absl::StatusOr<Workload> ReadEventLog(const std::string& path, const WorkloadOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_READ_EVENT_LOG_H_
