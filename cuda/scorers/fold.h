// Tokens that leave a sequence, added to a state of constant size on the host (parts/fold_rows.h).
#ifndef KVPOOL_CUDA_SCORERS_FOLD_H_
#define KVPOOL_CUDA_SCORERS_FOLD_H_

#include <cstdint>

#include "absl/status/status.h"
#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/parts/fold_rows.h"

namespace kvpool::scorers {

// What one fold may take: so many products of two numbers, as a merge (merge.h).
inline constexpr double kMostFoldProducts = 0x1p43;

double FoldProducts(const FoldRequest& request);

// FAILED_PRECONDITION: the shape has no V, or longer keys than a tile has room for. RESOURCE_EXHAUSTED: the request takes more
// products than kMostFoldProducts, or more than `most_bytes` of weights, states, indices of tokens and workspace, the weights
// being `weight_bytes`.
absl::Status CheckFold(const FoldRequest& request, uint64_t weight_bytes, uint64_t most_bytes);

// REQUIRES: CheckFold is OK; the arrays of `context` are those of ArrangeFold.
void Fold(const FoldContext& context, HostWorkers* workers);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_FOLD_H_
