// Attention of a query window on the host: window.h's definition, blocked for a processor's caches and registers.
//
// Rows are the queries of all query heads that read one kv head. A chunk of them, as many as fill the vectors, goes over
// all keys at once: logits (a small matrix product), their exponentials, then what they say of each token. A logit is
// computed once and an exponential is taken once; only a chunk's are kept.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_WINDOW_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_WINDOW_H_

#include <cstdint>

#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::scorers {

// Floats of scratch that one thread needs; aligned to 64 bytes.
uint64_t WindowScratchFloats(const KvShape& shape);

struct WindowPass {
  const ScoreContext* context = nullptr;
  uint32_t plane = 0;
  float* scratch = nullptr;
  // Of the row's elements, side by side, as floats; per dtype of HostRows.
  void (*widen)(const unsigned char* row, uint32_t dim, float* to) = nullptr;
};

// REQUIRES: the plane's queries are loaded (LoadQueries).
void AttendWindowCompiler(const WindowPass& pass);
void AttendWindowAvx2(const WindowPass& pass);
void AttendWindowAvx512(const WindowPass& pass);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_WINDOW_H_
