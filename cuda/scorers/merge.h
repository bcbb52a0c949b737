// Compaction on the host in which tokens that leave are merged into those that stay (parts/merge_rows.h).
#ifndef KVPOOL_CUDA_SCORERS_MERGE_H_
#define KVPOOL_CUDA_SCORERS_MERGE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/merge_rows.h"

namespace kvpool::scorers {

// What one merge may take: so many products of two elements, about two seconds of an H100 and a quarter of an hour of a host's
// 16 cores.
inline constexpr double kMostMergeProducts = 0x1p43;

// RESOURCE_EXHAUSTED: the request takes more products than kMostMergeProducts, or more than `most_bytes` of workspace.
absl::Status CheckMerge(const MergeRequest& request, uint64_t most_bytes);

// REQUIRES: no destination is a source; the arrays of `context` are those of ArrangeMerge.
void Merge(const MergeContext& context, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_MERGE_H_
