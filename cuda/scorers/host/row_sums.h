// What sums over rows of K and V are told.
#ifndef KVPOOL_CUDA_SCORERS_HOST_ROW_SUMS_H_
#define KVPOOL_CUDA_SCORERS_HOST_ROW_SUMS_H_

#include <cstdint>

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

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_ROW_SUMS_H_
