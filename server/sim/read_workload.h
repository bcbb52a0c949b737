// Reads traces from files and makes synthetic ones.
#ifndef KVPOOL_SERVER_SIM_READ_WORKLOAD_H_
#define KVPOOL_SERVER_SIM_READ_WORKLOAD_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// `path` is "synthetic:KIND" (synthetic.h); an event log of kvpoold, known by its first bytes; a file whose
// name ends in .csv or .csv.gz, of lines key,time,size (time in ms, size in bytes; a first line of names is
// skipped); or else Mooncake's JSONL, uncompressed or gzip. Errors of files start with "FILE:LINE: ".
absl::StatusOr<Workload> ReadWorkload(const std::string& path, const WorkloadOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_READ_WORKLOAD_H_
