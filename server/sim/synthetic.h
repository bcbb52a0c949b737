// Workloads that LRU does badly on, made up: objects that are worth keeping, and a flood of others.
//
//   size_inversion   large objects come back, small ones do not
//   bursts           objects that are asked for a few times in a row and never again, between steady ones
//   scans            long runs over new objects, between skewed accesses to a small set
//   flagged          half of the requests are for objects that never come back, and those are the ones of two blocks
#ifndef KVPOOL_SERVER_SIM_SYNTHETIC_H_
#define KVPOOL_SERVER_SIM_SYNTHETIC_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Such a workload as a trace: "synthetic:NAME" or "synthetic:NAME:SEED".
inline constexpr absl::string_view kSyntheticPrefix = "synthetic:";

// 60,000 requests, 10 ms apart. INVALID_ARGUMENT names the workloads there are.
absl::StatusOr<Workload> MakeSynthetic(absl::string_view trace);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_SYNTHETIC_H_
