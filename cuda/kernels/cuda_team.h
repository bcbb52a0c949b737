// A thread block as a team: its warps are the row teams. Included by .cu files alone.
#ifndef KVPOOL_CUDA_KERNELS_CUDA_TEAM_H_
#define KVPOOL_CUDA_KERNELS_CUDA_TEAM_H_

#include <cstdint>

#include "cuda/scorers/element.h"
#include "cuda/scorers/kv_view.h"
#include "cuda/scorers/team.h"

namespace kvpool::scorers {

// REQUIRES: blockDim.x is a multiple of 32, at most 1024; every thread of the block calls what reduces or syncs.
class CudaTeam {
 public:
  static constexpr uint32_t kColumns = 1;  // Neighbouring lanes read neighbouring columns.
  static constexpr uint32_t kWarp = 32;

  __device__ uint32_t id() const { return threadIdx.x; }
  __device__ uint32_t count() const { return blockDim.x; }
  __device__ uint32_t row() const { return threadIdx.x / kWarp; }
  __device__ uint32_t rows() const { return blockDim.x / kWarp; }
  __device__ uint32_t in_row() const { return threadIdx.x % kWarp; }
  __device__ uint32_t row_width() const { return kWarp; }
  __device__ void Sync() const { __syncthreads(); }
  __device__ double Sum(double x) const {
    return Reduce(x, [](double a, double b) { return a + b; });
  }
  __device__ float Max(float x) const {
    return Reduce(x, [](float a, float b) { return a < b ? b : a; });
  }
  __device__ float Min(float x) const {
    return Reduce(x, [](float a, float b) { return b < a ? b : a; });
  }
  __device__ uint32_t Count(uint32_t x) const {
    return Reduce(x, [](uint32_t a, uint32_t b) { return a + b; });
  }
  __device__ float RowSum(float x) const {
    for (uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
  }

  // Eight bytes a lane at once, where the row lies so.
  template <KvDtype dtype, RowOp op>
  __device__ __forceinline__ float SumOfRow(const unsigned char* row, uint32_t dim, const float* x) const {
    using Storage = typename Element<dtype>::Storage;
    constexpr uint32_t kElements = sizeof(uint64_t) / sizeof(Storage);
    const auto term = [x](Storage stored, uint32_t d) {
      const float element = Element<dtype>::Load(stored);
      const float other = op == RowOp::kSquare ? 0 : x[d];
      return op == RowOp::kSquare    ? element * element
             : op == RowOp::kProduct ? element * other
                                     : (element - other) * (element - other);
    };
    float sum = 0;
    uint32_t whole = 0;
    if (reinterpret_cast<uint64_t>(row) % sizeof(uint64_t) == 0) {
      whole = dim / kElements * kElements;
      for (uint32_t d = in_row() * kElements; d < whole; d += kWarp * kElements) {
        const uint64_t word = *reinterpret_cast<const uint64_t*>(row + d * sizeof(Storage));
#pragma unroll
        for (uint32_t j = 0; j < kElements; ++j) {
          if constexpr (dtype == KvDtype::kF32) {
            sum += term(__uint_as_float(static_cast<uint32_t>(word >> (32 * j))), d + j);
          } else {
            sum += term(static_cast<Storage>(word >> (8 * sizeof(Storage) * j)), d + j);
          }
        }
      }
    }
    for (uint32_t d = whole + in_row(); d < dim; d += kWarp) {
      sum += term(reinterpret_cast<const Storage*>(row)[d], d);
    }
    sum = RowSum(sum);
    return op == RowOp::kSquare ? sqrtf(sum) : sum;
  }

  template <KvDtype dtype>
  __device__ __forceinline__ void NormsOfRows(const unsigned char* first, uint64_t stride_bytes,
                                              uint32_t rows_in_all, uint32_t dim, float* norms,
                                              uint32_t step) const {
#pragma unroll 4
    for (uint32_t i = row(); i < rows_in_all; i += rows()) {
      const float norm = SumOfRow<dtype, RowOp::kSquare>(first + i * stride_bytes, dim, nullptr);
      if (in_row() == 0) norms[i * step] = norm;
    }
  }

 private:
  template <typename T, typename Op>
  __device__ T Reduce(T x, Op op) const {
    __shared__ T of_warp[kWarp];
    for (uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
      x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    // What an earlier call left is read by all before it is written over.
    __syncthreads();
    if (in_row() == 0) of_warp[row()] = x;
    __syncthreads();
    x = of_warp[0];
    for (uint32_t warp = 1; warp < rows(); ++warp) x = op(x, of_warp[warp]);
    return x;
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_KERNELS_CUDA_TEAM_H_
