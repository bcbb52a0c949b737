// Compaction on the host: copies the tokens that stay into fewer blocks, in order and with their rotation.
#ifndef KVPOOL_CUDA_SCORERS_GATHER_H_
#define KVPOOL_CUDA_SCORERS_GATHER_H_

#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/gather_rows.h"

namespace kvpool::scorers {

// REQUIRES: no destination is a source.
void Gather(const GatherRequest& request, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_GATHER_H_
