// The record of a block: its features, which depend on that block alone.
//
//   section         floats
//   norms           [plane][tokens_per_block] of ‖K‖, then the same of ‖V‖ where there is V
//   unit key sums   [plane][k_head_dim]: sum of k/‖k‖ over the tokens whose norm is finite and not 0
//   key sums        [plane][k_head_dim]: sum of k over the same tokens
//   key bounds      [plane][k_head_dim] least, then greatest
//
// The record of a full block stays valid as long as the block's generation. Included by kernels.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_RECORDS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_RECORDS_H_

#include <cstdint>

#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct RecordLayout {
  static constexpr uint32_t kNone = ~uint32_t{0};
  uint32_t floats = 0;  // the length of a record
  uint32_t k_norms = kNone;
  uint32_t v_norms = kNone;
  uint32_t unit_key_sums = kNone;
  uint32_t key_sums = kNone;
  uint32_t key_min = kNone;
  uint32_t key_max = kNone;
  // Whether there is any of the last four sections.
  KVPOOL_HOST_DEVICE constexpr bool sums_keys() const {
    return unit_key_sums != kNone || key_sums != kNone || key_min != kNone;
  }
};

constexpr RecordLayout LayOutRecord(const KvShape& shape, Needs needs) {
  RecordLayout layout;
  const auto section = [&](bool wanted, uint32_t* at, uint32_t floats_per_plane) {
    if (!wanted) return;
    *at = layout.floats;
    layout.floats += shape.planes() * floats_per_plane;
  };
  const bool norms = (needs & (kNeedNorms | kNeedValueNorms | kNeedUnitAnchor | kNeedMeanAnchor)) != 0;
  section(norms, &layout.k_norms, shape.tokens_per_block);
  section(norms && shape.v_head_dim != 0, &layout.v_norms, shape.tokens_per_block);
  section((needs & kNeedUnitAnchor) != 0, &layout.unit_key_sums, shape.k_head_dim);
  section((needs & kNeedMeanAnchor) != 0, &layout.key_sums, shape.k_head_dim);
  section((needs & kNeedKeyBounds) != 0, &layout.key_min, shape.k_head_dim);
  section((needs & kNeedKeyBounds) != 0, &layout.key_max, shape.k_head_dim);
  return layout;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_RECORDS_H_
