// The bodies that read K and V, compiled for the instruction sets of this machine's kind.
#ifndef KVPOOL_CUDA_SCORERS_HOST_KERNELS_H_
#define KVPOOL_CUDA_SCORERS_HOST_KERNELS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cuda/scorers/context.h"
#include "cuda/scorers/records.h"

namespace kvpool::scorers {

struct HostKernels {
  const char* name;  // "baseline", "avx2", "avx512".
  void (*record)(const KvView& kv, const RecordLayout& at, uint32_t block, uint32_t layer, float* record);
  void (*anchor_dots)(const ScoreContext& context, uint32_t plane);
  void (*window)(const ScoreContext& context, uint32_t plane);
};

// The best that this processor runs; the same for the life of the process.
const HostKernels& BestHostKernels();
// All that it runs, the baseline first: they agree up to rounding.
absl::Span<const HostKernels* const> RunnableHostKernels();

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_KERNELS_H_
