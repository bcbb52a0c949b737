// Traces of kinds that no public file at hand has, to see what a policy that suits one kind does
// on the others.
#ifndef KVPOOL_SERVER_SIM_SYNTHETIC_H_
#define KVPOOL_SERVER_SIM_SYNTHETIC_H_

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

struct SyntheticKind {
  std::string_view name;
  std::string_view summary;  // One line for --help.
};
absl::Span<const SyntheticKind> SyntheticKinds();

struct SyntheticOptions {
  uint32_t requests = 10000;
  uint64_t seed = 1;
};

// The same workload for the same options, on every machine. INVALID_ARGUMENT names the kinds there are.
absl::StatusOr<Workload> MakeSynthetic(std::string_view kind, const SyntheticOptions& options);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_SYNTHETIC_H_
