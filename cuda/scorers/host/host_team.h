// The host's team: one lane, which handles rows whose elements lie side by side with vector instructions.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_TEAM_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_TEAM_H_

#include <cstdint>

#include "cuda/scorers/host/host_rows.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

class HostTeam : public OneLane {
 public:
  // Elements of a row that a lane takes at once where it walks over rows.
  static constexpr uint32_t kColumns = 16;

  explicit HostTeam(const HostRows& rows = BestHostRows()) : rows_(&rows) {}

  template <KvDtype dtype, RowOp op>
  float SumOfRow(const unsigned char* row, uint32_t dim, const float* x) const {
    float result;
    rows_->run[static_cast<int>(dtype)][static_cast<int>(op)]({row, 0, 1, dim, x, &result, 1});
    return result;
  }
  template <KvDtype dtype>
  float ProductWithOwn(const unsigned char* row, uint64_t stride_bytes, uint32_t dim, const float* x,
                       uint32_t) const {
    return stride_bytes == BytesOf(dtype)
               ? SumOverRow<dtype, true, RowOp::kProduct>(*this, row, stride_bytes, dim, x)
               : SumOverRow<dtype, false, RowOp::kProduct>(*this, row, stride_bytes, dim, x);
  }
  template <KvDtype dtype>
  void NormsOfRows(const RowGrid& rows) const {
    for (uint32_t outer = 0; outer < rows.outer_count; ++outer) {
      rows_->run[static_cast<int>(dtype)][static_cast<int>(RowOp::kSquare)](
          {rows.first + outer * rows.outer_stride_bytes, rows.inner_stride_bytes, rows.inner_count, rows.dim,
           nullptr, rows.norms + outer * rows.outer_step, rows.inner_step});
    }
  }

  template <KvDtype dtype, typename RowAt>
  void ProductsOfRows(const RowAt& row_at, bool, uint32_t inner_count, uint32_t all, uint32_t dim,
                      const float* x, float* products) const {
    for (uint32_t i = 0; i < all; ++i)
      products[i] = SumOfRow<dtype, RowOp::kProduct>(row_at(i / inner_count, i % inner_count), dim, x);
  }

  const HostRows& code() const { return *rows_; }

 private:
  const HostRows* rows_;
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_TEAM_H_
