// Traces from files, and those made at once.
#ifndef KVPOOL_SERVER_SIM_READ_WORKLOAD_H_
#define KVPOOL_SERVER_SIM_READ_WORKLOAD_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Reads a trace: an event log of kvpoold, which is known by its first bytes; or, plain or gzip, Mooncake's JSONL, or,
// if the name ends in .csv or .csv.gz, lines of key,time,size (time in ms; size in bytes; a first line of names is
// skipped). "synthetic:KIND" is not a file but made at once, see synthetic.h. Errors of files start with
// "FILE:LINE: ".
absl::StatusOr<Workload> ReadWorkload(const std::string& path, const WorkloadOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_READ_WORKLOAD_H_
