// The host's inner loops, for each instruction set: sums over rows of K and V whose elements lie side by
// side, conversion of such rows to floats, and the attention of a query window (host_window.h).
//
// They are written with intrinsics because the compiler's own vector code for the same loops, whose
// conversions go through memory, reads f16 and fp8 at a tenth of the memory's bandwidth; kvpool-bench's
// section score shows both.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_ROWS_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_ROWS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "cuda/scorers/host/row_sums.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct WindowPass;
inline constexpr int kDtypes = 5;
inline constexpr int kRowOps = 3;
struct HostRows {
  const char* name;  // "compiler", "avx2" or "avx512"
  void (*run[kDtypes][kRowOps])(const RowsOfType& rows);
  void (*sum_columns[kDtypes])(const ColumnSums& sums);
  void (*widen[kDtypes])(const unsigned char* row, uint32_t dim, float* to);
  void (*attend_window)(const WindowPass& pass);
};

// The fastest that this processor can run; the same for the life of the process.
const HostRows& BestHostRows();
// All that it can run, the compiler's first. Their results agree up to rounding.
absl::Span<const HostRows* const> RunnableHostRows();

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_ROWS_H_
