// Compaction on the host in which tokens that leave go on in low precision (parts/low_rows.h).
#ifndef KVPOOL_CUDA_SCORERS_LOW_H_
#define KVPOOL_CUDA_SCORERS_LOW_H_

#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/low_rows.h"

namespace kvpool::scorers {

// Products that take as long as making the code of one element does: 4 to 9 ns of a host's core.
inline constexpr double kProductsOfLowElement = 32;

// REQUIRES: no destination is a source.
void KeepLow(const LowRequest& request, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_LOW_H_
