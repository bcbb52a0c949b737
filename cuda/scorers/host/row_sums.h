// The arguments of sums over rows of K and V.
#ifndef KVPOOL_CUDA_SCORERS_HOST_ROW_SUMS_H_
#define KVPOOL_CUDA_SCORERS_HOST_ROW_SUMS_H_

#include <cstdint>

namespace kvpool::scorers {

// The result of row i, a RowOp, goes to results[i * result_step]. x has `dim` floats; kSquare does not
// read it.
struct RowsOfType {
  const unsigned char* first = nullptr;
  uint64_t stride_bytes = 0;
  uint32_t rows = 0;
  uint32_t dim = 0;
  const float* x = nullptr;
  float* results = nullptr;
  uint32_t result_step = 1;
};

// Sums over rows, one float for each of `dim` columns; any of the four arrays may be null. A row is part of
// `unit` and `raw` only if its norm is given and HasDirection.
struct ColumnSums {
  const unsigned char* first = nullptr;
  uint64_t stride_bytes = 0;
  uint32_t rows = 0;
  uint32_t dim = 0;
  const float* norms = nullptr;  // [rows], or null
  float* unit = nullptr;         // sum of element / norm of its row
  float* raw = nullptr;          // sum of elements
  float* least = nullptr;        // NaN if any element of the column is
  float* greatest = nullptr;     // likewise
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_ROW_SUMS_H_
