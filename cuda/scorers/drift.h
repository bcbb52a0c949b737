// How far a layer's attention output moves when tokens leave (parts/drift_rows.h): the bounds of one measurement, what came of it, and the
// host's.
#ifndef KVPOOL_CUDA_SCORERS_DRIFT_H_
#define KVPOOL_CUDA_SCORERS_DRIFT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/drift_rows.h"

namespace kvpool::scorers {

// The newest queries of a window that are measured: so many say what all of them would, and bound what a long window costs.
inline constexpr uint32_t kMostDriftQueries = 64;

// In the sum a drift counts as this at most: an output whose values nearly cancel has no length to speak of, and would decide alone.
inline constexpr double kMostDrift = 10;

// The drifts of queries and query heads.
struct Drift {
  double sum = 0;
  double greatest = 0;
  uint64_t rows = 0;
};

// INVALID_ARGUMENT: the layout has no V, or the window is none of the shape's. RESOURCE_EXHAUSTED: workspace, queries
// and bits take more than `most_bytes`.
absl::Status CheckDrift(const DriftRequest& request, uint64_t most_bytes);

// Multiplications of a measurement, of queries with keys and of weights with values.
double DriftProducts(const DriftRequest& request);

// OUT_OF_RANGE: some are not finite, as a query, all of its keys or a value are not.
absl::StatusOr<Drift> DriftOf(absl::Span<const float> drifts);

// Fills context.drifts. REQUIRES: the arrays of `context` are those of ArrangeDrift.
void MeasureDrift(const DriftContext& context, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_DRIFT_H_
