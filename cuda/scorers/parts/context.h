// The arrays of one scoring call, on the side that computes. Included by kernels: plain types only.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_CONTEXT_H_
#define KVPOOL_CUDA_SCORERS_PARTS_CONTEXT_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/records.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::scorers {

// How a query window's attention A is spread over one plane's keys: for budgets over layers (CAKE, D2O).
struct PlaneSpread {
  double entropy = 0;   // -sum A ln(A + 1e-10) over query heads, queries and the keys before the window
  double variance = 0;  // sum over query heads and those keys of A's unbiased variance over queries
  double density = 0;   // unbiased variance of window_mean over all tokens
};

// An array that the policy does not need is null. All but `kv`, `signals` and `records` lie in the workspace.
struct ScoreContext {
  KvView kv;
  Signals signals;
  RecordLayout record;
  const float* const* records = nullptr;
  uint32_t budget_tokens = 0;
  uint32_t model_heads = 0;  // kv heads of a layer on all ranks
  uint32_t first_model_head = 0;

  // Unpacked from the records.
  float* k_norms = nullptr;  // [plane][tokens]
  float* v_norms = nullptr;  // [plane][tokens]

  float* anchors = nullptr;       // [plane][k_head_dim]
  float* anchor_norms = nullptr;  // [plane]
  float* anchor_dots = nullptr;   // [plane][tokens]

  // The query window, and its attention as in signals.h; without the attention where a policy reads the queries alone.
  float* queries = nullptr;          // [plane][group * queries][k_head_dim], scaled
  float* query_peaks = nullptr;      // [plane][group * queries], the greatest magnitude of a query's elements
  float* lse = nullptr;              // [plane][group * queries], log-sum-exp of the logits
  float* window_mean = nullptr;      // [plane][tokens]
  float* window_variance = nullptr;  // [plane][tokens]
  float* window_peak = nullptr;      // [plane][tokens]
  float* window_latest = nullptr;    // [plane][tokens]
  PlaneSpread* spreads = nullptr;    // [plane]

  float* host_scores = nullptr;   // [plane][tokens]
  float* plane_scores = nullptr;  // [plane][tokens]
  float* row_scores = nullptr;    // [rows][tokens]
  float* own_blocks = nullptr;    // [layer or plane][blocks], for policies with a block form of their own
  float* scratch = nullptr;       // [worker on the host, plane on a GPU][scratch_floats]
  uint64_t scratch_floats = 0;

  KVPOOL_HOST_DEVICE const KvShape& shape() const { return kv.shape; }
  // The query heads that read one kv head.
  KVPOOL_HOST_DEVICE uint32_t group() const { return signals.window.q_heads / kv.shape.kv_heads; }

  KVPOOL_HOST_DEVICE Plane At(uint32_t plane_index, uint32_t scratch_index) const {
    const uint32_t layer = plane_index / kv.shape.kv_heads;
    const uint32_t head = plane_index % kv.shape.kv_heads;
    const uint64_t tokens = kv.shape.tokens;
    const auto own = [&](const float* array) {
      return array == nullptr ? nullptr : array + plane_index * tokens;
    };
    Plane plane;
    plane.tokens = kv.shape.tokens;
    plane.tokens_per_block = kv.shape.tokens_per_block;
    plane.layer = layer;
    plane.head = head;
    plane.layers = kv.shape.layers;
    plane.model_heads = model_heads;
    plane.model_head = first_model_head + head;
    plane.budget_tokens = budget_tokens;
    plane.k_norm = own(k_norms);
    plane.v_norm = own(v_norms);
    plane.anchor_dot = own(anchor_dots);
    plane.anchor_norm = anchor_norms == nullptr ? 0 : anchor_norms[plane_index];
    plane.records = records;
    plane.key_min_at = record.key_min + uint64_t{plane_index} * kv.shape.k_head_dim;
    plane.key_max_at = record.key_max + uint64_t{plane_index} * kv.shape.k_head_dim;
#define KVPOOL_SIGNAL_GIVEN(member, ...) plane.member = signals.member.Plane(layer, head);
    KVPOOL_SIGNALS(KVPOOL_SIGNAL_GIVEN)
#undef KVPOOL_SIGNAL_GIVEN
    if (window_mean != nullptr) plane.window_mean = own(window_mean);
    if (window_variance != nullptr) plane.window_variance = own(window_variance);
    if (window_peak != nullptr) plane.window_peak = own(window_peak);
    if (window_latest != nullptr) plane.window_latest = own(window_latest);
    if (plane.latest == nullptr) plane.latest = plane.window_latest;
    if (plane.peak == nullptr) plane.peak = plane.window_peak;
    plane.window_queries = signals.window.queries;
    plane.window_tokens = signals.window.own_tokens();
    plane.queries = queries == nullptr ? nullptr : queries + QueryFloats() * plane_index;
    plane.group = signals.window.q_heads / kv.shape.kv_heads;
    plane.host = own(host_scores);
    plane.signals = &signals;
    plane.kv = &kv;
    plane.scratch = scratch + scratch_index * scratch_floats;
    return plane;
  }
  // The window's rows of a plane: the queries of each head of its group.
  KVPOOL_HOST_DEVICE uint32_t WindowRows() const { return group() * signals.window.queries; }
  KVPOOL_HOST_DEVICE uint64_t QueryFloats() const { return uint64_t{WindowRows()} * kv.shape.k_head_dim; }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_CONTEXT_H_
