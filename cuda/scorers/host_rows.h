// What the host's time goes into, by instruction set: sums over rows of K and V whose elements lie side by side, such
// rows as floats, and the attention of a query window (host_window.h).
//
// Intrinsics per instruction set: the compiler's own vector code for the same loops reads f16 and fp8 at a tenth of the
// memory's speed (its conversions go through memory); kvpool-bench's section score shows both.
#ifndef KVPOOL_CUDA_SCORERS_HOST_ROWS_H_
#define KVPOOL_CUDA_SCORERS_HOST_ROWS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cuda/scorers/kv_view.h"
#include "cuda/scorers/team.h"

namespace kvpool::scorers {

// results[i * result_step] of row i; square roots of them for kSquare. x has `dim` floats, unread by kSquare.
struct RowsOfType {
  const unsigned char* first = nullptr;
  uint64_t stride_bytes = 0;
  uint32_t rows = 0;
  uint32_t dim = 0;
  const float* x = nullptr;
  float* results = nullptr;
  uint32_t result_step = 1;
};

// Sums over rows, a float for each of `dim` columns; any of the four may be null. Rows whose norm has no direction
// (HasDirection) are left out of the first two; without norms all are.
struct ColumnSums {
  const unsigned char* first = nullptr;
  uint64_t stride_bytes = 0;
  uint32_t rows = 0;
  uint32_t dim = 0;
  const float* norms = nullptr;  // Of the rows.
  float* unit = nullptr;         // Of elements over their row's norm.
  float* plain = nullptr;
  float* least = nullptr;  // NaN where a row has it.
  float* greatest = nullptr;
};

struct WindowPass;
inline constexpr int kDtypes = 5;
inline constexpr int kRowOps = 3;
struct HostRows {
  const char* name;  // "compiler", "avx2", "avx512".
  void (*run[kDtypes][kRowOps])(const RowsOfType& rows);
  void (*sum_columns[kDtypes])(const ColumnSums& sums);
  void (*widen[kDtypes])(const unsigned char* row, uint32_t dim, float* to);
  void (*attend_window)(const WindowPass& pass);
};

// The best that this processor runs; the same for the life of the process.
const HostRows& BestHostRows();
// All that it runs, the compiler's first: they agree up to rounding.
absl::Span<const HostRows* const> RunnableHostRows();

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_ROWS_H_
