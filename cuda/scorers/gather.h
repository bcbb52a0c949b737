// Compaction: the tokens that stay, moved into fewer blocks. Order and rotation are kept: bytes are copied.
#ifndef KVPOOL_CUDA_SCORERS_GATHER_H_
#define KVPOOL_CUDA_SCORERS_GATHER_H_

#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/gather_rows.h"

namespace kvpool::scorers {

// REQUIRES: no destination is a source.
void Gather(const GatherRequest& request, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_GATHER_H_
