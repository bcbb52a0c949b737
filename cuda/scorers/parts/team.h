// A team of lanes that shares one plane (one layer's kv head) or one block.
//
//   for (uint32_t i = team.id(); i < n; i += team.count()) …      items spread over all lanes
//   for (uint32_t r = team.row(); r < n; r += team.rows())         rows (tokens), each by one row team, whose lanes
//     for (uint32_t d = team.in_row(); …; d += team.row_width()) … share the row's elements: team.RowSum(x)
//
// Sum, Max and Min give their result to every lane, and all lanes must call them; SumOfRows and GreatestOfRows bring
// together the lanes that stand at the same place of all row teams; Sync makes what lanes wrote visible to all. A team also says how it sums over a row whose elements lie side by side (SumOfRow, NormsOfRows) and how
// many columns a lane takes at once where it walks over rows (kColumns). HostTeam (host_team.h) has one lane and vectors; the GPU's is a
// thread block.
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
  KVPOOL_HOST_DEVICE float RowSum(float x) const { return x; }
  template <typename T>
  KVPOOL_HOST_DEVICE T SumOfRows(T x) const {
    return x;
  }
  KVPOOL_HOST_DEVICE float GreatestOfRows(float x) const { return x; }
  // Which of the lanes with a flag this one is, counted from 0; *all: how many there are.
  KVPOOL_HOST_DEVICE uint32_t RankOf(bool flag, uint32_t* all) const {
    *all = flag;
    return 0;
  }
  // For counters that the team or the whole launch shares.
  KVPOOL_HOST_DEVICE void AddTo(uint32_t* counter, uint32_t x) const { *counter += x; }
};

// Elements that a lane takes at once: one vector register on the host, one 16- or 32-byte load on a GPU.
inline constexpr uint32_t kPack = 16;

// The greater of two, and not a number if either is none (fmax would drop it).
KVPOOL_HOST_DEVICE inline float GreaterOf(float a, float b) {
  return a != a ? a : b != b ? b : a < b ? b : a;
}
KVPOOL_HOST_DEVICE inline float LesserOf(float a, float b) { return a != a ? a : b != b ? b : b < a ? b : a; }

// Rows of elements that lie side by side, in two dimensions; the norm of row (o, i) goes to
// norms[o * outer_step + i * inner_step].
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
};

enum class RowOp : uint8_t {
  kSquare,    // Of the row's elements: the root of their sum, its norm.
  kProduct,   // Of each with that of x.
  kDistance,  // Square of its difference from that of x.
};

// Summed over the row's elements by the row team: every lane of it gets the sum. kContiguous: elements lie side by
// side.
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

// For a type known only now. REQUIRES: all lanes of a row team call it alike.
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
