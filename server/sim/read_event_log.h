// An event log of kvpoold as a workload.
#ifndef KVPOOL_SERVER_SIM_READ_EVENT_LOG_H_
#define KVPOOL_SERVER_SIM_READ_EVENT_LOG_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// By its first bytes.
bool IsEventLog(const std::string& path);

// Each match is a request. What is sealed behind its chain is the request's answer; what is sealed without a match
// is a request that asks for nothing. FILE.1 is read first if it is the part in front. Of layer groups, only the
// one that is matched first. Hints are of the last request that had the blocks. A record that was cut off at the end is left out. DATA_LOSS: this is no log.
// INVALID_ARGUMENT lists the spaces there are, if it is not said which, and how many events were lost.
absl::StatusOr<Workload> ReadEventLog(const std::string& path, const WorkloadOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_READ_EVENT_LOG_H_
