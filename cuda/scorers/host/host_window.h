// The attention of a query window on the host: computes what window.h defines, blocked for caches
// and registers.
//
// Rows are the queries of all query heads that read one kv head. A chunk of them, as many as fill the
// vectors, goes over all keys: logits (a small matrix product), then their exponentials, then each token's
// statistics. Each logit and each exponential is computed once, and only a chunk's are kept.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_WINDOW_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_WINDOW_H_

#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::scorers {

// The floats of scratch that one thread needs; their address is a multiple of 64.
uint64_t WindowScratchFloats(const KvShape& shape);

struct WindowPass {
  const ScoreContext* context = nullptr;
  uint32_t plane = 0;
  float* scratch = nullptr;
  // HostRows::widen of the type of K: converts a row whose elements lie side by side to floats.
  void (*widen)(const unsigned char* row, uint32_t dim, float* to) = nullptr;
};

// REQUIRES: the plane's queries are loaded (LoadQueries).
void AttendWindowCompiler(const WindowPass& pass);
void AttendWindowAvx2(const WindowPass& pass);
void AttendWindowAvx512(const WindowPass& pass);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_WINDOW_H_
