// A team of lanes that shares one plane (a kv head of a layer) or one block. Its lanes form row teams.
//
//   for (uint32_t i = team.id(); i < n; i += team.count()) …          spreads items over all lanes
//   for (uint32_t r = team.row(); r < n; r += team.rows())            gives each row (token) to one row team,
//     for (uint32_t d = team.in_row(); …; d += team.row_width()) …    whose lanes share its elements
//
//   call                         combines                                          result goes to
//   Sum, Max, Min, Count         x of all lanes                                    all lanes
//   RankOf                       flags of all lanes                                all lanes
//   RowSum, RowMax               x of the lanes of a row team                      these lanes
//   SumOfRows, GreatestOfRows    x of the lanes at the same place of all teams     these lanes
//   SumOfRow                     a row's elements, which lie side by side          the lanes of the row team
//   ProductWithOwn               a row times as many rows of floats as lanes       each lane has that of its own
//   NormsOfRows, ProductsOfRows  the same for many rows                            memory
//   HeadsToStage                 how many heads' rows of a block, as NormsOfRows   a number
//                                reads them, the team has memory of its own for
//
// All lanes whose values a call combines must make it. Sync makes the lanes' writes visible to all of
// them. kColumns is how many columns a lane takes at once where it walks over rows. The host's team
// (host_team.h) is one lane with vectors; the GPU's (cuda/kernels/cuda_team.h) is a thread block, whose
// row teams are its warps.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_TEAM_H_
#define KVPOOL_CUDA_SCORERS_PARTS_TEAM_H_

#include <cmath>
#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/kv_view.h"

namespace kvpool::scorers {

class OneLane {
 public:
  KVPOOL_HOST_DEVICE uint32_t id() const { return 0; }
  KVPOOL_HOST_DEVICE uint32_t count() const { return 1; }
  KVPOOL_HOST_DEVICE uint32_t row() const { return 0; }
  KVPOOL_HOST_DEVICE uint32_t rows() const { return 1; }
  KVPOOL_HOST_DEVICE uint32_t in_row() const { return 0; }
  KVPOOL_HOST_DEVICE uint32_t row_width() const { return 1; }
  KVPOOL_HOST_DEVICE void Sync() const {}
  KVPOOL_HOST_DEVICE double Sum(double x) const { return x; }
  KVPOOL_HOST_DEVICE float Max(float x) const { return x; }
  KVPOOL_HOST_DEVICE float Min(float x) const { return x; }
  KVPOOL_HOST_DEVICE uint32_t Count(uint32_t x) const { return x; }
  template <typename T>
  KVPOOL_HOST_DEVICE T RowSum(T x) const {
    return x;
  }
  KVPOOL_HOST_DEVICE float RowMax(float x) const { return x; }
  template <typename T>
  KVPOOL_HOST_DEVICE T SumOfRows(T x) const {
    return x;
  }
  KVPOOL_HOST_DEVICE float GreatestOfRows(float x) const { return x; }
  // The number of lanes with a flag before this one; *all: the number of all of them.
  KVPOOL_HOST_DEVICE uint32_t RankOf(bool flag, uint32_t* all) const {
    *all = flag;
    return 0;
  }
  // A lane's rows are in the processor's cache when they are read again.
  KVPOOL_HOST_DEVICE uint32_t HeadsToStage(const KvPlane&, const unsigned char*, uint32_t, uint32_t) const {
    return 0;
  }
  KVPOOL_HOST_DEVICE unsigned char* stage() const { return nullptr; }
  KVPOOL_HOST_DEVICE float* staged_norms() const { return nullptr; }
  // Adds to a counter that the team or the whole launch shares.
  KVPOOL_HOST_DEVICE void AddTo(uint32_t* counter, uint32_t x) const { *counter += x; }
};

// The elements that a lane takes at once: one vector register on the host, one 16- or 32-byte load on a GPU.
inline constexpr uint32_t kPack = 16;

// The greater of two, or NaN if either is NaN, which fmax would drop.
KVPOOL_HOST_DEVICE inline float GreaterOf(float a, float b) {
  return a != a ? a : b != b ? b : a < b ? b : a;
}
KVPOOL_HOST_DEVICE inline float LesserOf(float a, float b) { return a != a ? a : b != b ? b : b < a ? b : a; }

// A grid of rows whose elements lie side by side; the norm of row (o, i) is norms[o * outer_step + i
// * inner_step].
struct RowGrid {
  const unsigned char* first = nullptr;
  uint32_t outer_count = 0;
  uint32_t inner_count = 0;
  uint64_t outer_stride_bytes = 0;
  uint64_t inner_stride_bytes = 0;
  uint32_t dim = 0;
  float* norms = nullptr;
  uint32_t outer_step = 0;
  uint32_t inner_step = 0;
  unsigned char* stage = nullptr;  // Where the rows are copied to, in the grid's order. Null: nowhere.
};

enum class RowOp : uint8_t {
  kSquare,    // sqrt(sum row_d^2)
  kProduct,   // sum row_d * x_d
  kDistance,  // sum (row_d - x_d)^2
};

// Computes `op` by the row team, each lane of which gets the result. kContiguous: the row's elements lie side
// by side.
template <KvDtype dtype, bool kContiguous, RowOp op, typename Team>
KVPOOL_HOST_DEVICE KVPOOL_INLINE float SumOverRow(const Team& team, const unsigned char* row,
                                                  uint64_t stride_bytes, uint32_t dim, const float* x) {
  using Storage = typename Element<dtype>::Storage;
  if constexpr (kContiguous) return team.template SumOfRow<dtype, op>(row, dim, x);
  float sum = 0;
  for (uint32_t d = team.in_row(); d < dim; d += team.row_width()) {
    const float element = Element<dtype>::Load(*reinterpret_cast<const Storage*>(row + d * stride_bytes));
    const float other = op == RowOp::kSquare ? 0 : x[d];
    sum += op == RowOp::kSquare    ? element * element
           : op == RowOp::kProduct ? element * other
                                   : (element - other) * (element - other);
  }
  sum = team.RowSum(sum);
  return op == RowOp::kSquare ? sqrtf(sum) : sum;
}

// SumOverRow for a type known at run time. REQUIRES: all lanes of a row team pass the same arguments.
template <RowOp op, typename Team>
struct RowSumOfType {
  const Team& team;
  const unsigned char* row;
  uint64_t stride_bytes;
  uint32_t dim;
  const float* x;
  float* result;
  template <KvDtype dtype>
  KVPOOL_HOST_DEVICE void Run() const {
    *result = stride_bytes == BytesOf(dtype) ? SumOverRow<dtype, true, op>(team, row, stride_bytes, dim, x)
                                             : SumOverRow<dtype, false, op>(team, row, stride_bytes, dim, x);
  }
};
template <RowOp op, typename Team>
KVPOOL_HOST_DEVICE float SumOverRow(const Team& team, const unsigned char* row, const KvPlane& plane,
                                    KvDtype dtype, const float* x) {
  float result = 0;
  WithDtype(dtype, RowSumOfType<op, Team>{team, row, plane.dim_stride_bytes, plane.head_dim, x, &result});
  return result;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_TEAM_H_
