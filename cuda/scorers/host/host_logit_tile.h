// A tile of one token and one query: the definition of a window's attention on the host's team (parts/window.h).
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_LOGIT_TILE_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_LOGIT_TILE_H_

#include <cstdint>

#include "cuda/scorers/host/host_team.h"
#include "cuda/scorers/parts/base2.h"
#include "cuda/scorers/parts/window.h"

namespace kvpool::scorers {

template <KvDtype dtype>
class HostLogitTile {
 public:
  static constexpr uint32_t kStripRows = 1, kTokens = 1, kRows = 1, kColumns = 1;

  HostLogitTile(const HostTeam& team, const ScoreContext& c, uint32_t plane)
      : team_(team),
        c_(c),
        layer_(plane / c.shape().kv_heads),
        head_(plane % c.shape().kv_heads),
        queries_(c.queries + c.QueryFloats() * plane) {}
  uint32_t at_once() const { return 1; }
  uint32_t strip() const { return 0; }
  bool has_logits() const { return true; }
  void Hold(const uint32_t (&rows)[kRows]) {
    held_ = rows[0];
    row_ = queries_ + uint64_t{held_} * c_.shape().k_head_dim;
  }
  uint32_t held(uint32_t) const { return held_; }
  void Keep(uint32_t, float x) { kept_ = x; }
  float kept(uint32_t) const { return kept_; }
  uint32_t row(uint32_t) const { return 0; }
  uint32_t column(uint32_t) const { return 0; }
  void Multiply(uint32_t token) {
    const KvPlane& k = c_.kv.k;
    const unsigned char* const key = c_.kv.KeyRow(layer_, head_, token);
    constexpr RowOp kOp = RowOp::kProduct;
    logit_ = kLog2E * (k.dim_stride_bytes == BytesOf(dtype)
                           ? SumOverRow<dtype, true, kOp>(team_, key, k.dim_stride_bytes, k.head_dim, row_)
                           : SumOverRow<dtype, false, kOp>(team_, key, k.dim_stride_bytes, k.head_dim, row_));
  }
  float logit(uint32_t, uint32_t) const { return logit_; }
  float RowSum(float x) const { return x; }
  float RowGreatest(float x) const { return x; }
  bool is_first_of_row() const { return true; }
  void PutColumns(uint32_t token, const float (&p)[kRows][kColumns]) {
    stats_[token % 2] = {.mean = p[0][0], .squares = 0, .peak = p[0][0]};
  }
  void PutLatest(uint32_t token, uint32_t, float p) { latest_[token % 2] = p; }
  const ColumnStats& of(uint32_t token, uint32_t, uint32_t) const { return stats_[token % 2]; }
  float latest(uint32_t token, uint32_t, uint32_t) const { return latest_[token % 2]; }

 private:
  const HostTeam& team_;
  const ScoreContext& c_;
  const uint32_t layer_, head_;
  const float* const queries_;
  uint32_t held_ = kNoRow;
  float kept_ = 0;
  const float* row_ = nullptr;
  float logit_ = 0;
  ColumnStats stats_[2] = {};
  float latest_[2] = {};
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_LOGIT_TILE_H_
