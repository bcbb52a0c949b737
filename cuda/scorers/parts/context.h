// All the arrays of one scoring call, on the side that computes. Included by kernels: plain types only.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_CONTEXT_H_
#define KVPOOL_CUDA_SCORERS_PARTS_CONTEXT_H_

#include <cstdint>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/records.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::scorers {

// What one plane's part of the query window says in all: for budgets over layers (CAKE, D2O).
struct PlaneSpread {
  double entropy = 0;   // -sum A ln(A + 1e-10) over query heads, queries and the keys before the window.
  double variance = 0;  // Sum over query heads and those keys of the unbiased variance over queries.
  double density = 0;   // Unbiased variance over all tokens of window_mean.
};

// Pointers are null where the policy needs no such thing. "[plane][tokens]" arrays are in the workspace.
struct ScoreContext {
  KvView kv;
  Signals signals;
  RecordLayout record;
  const float* const* records = nullptr;
  uint32_t budget_tokens = 0;
  uint32_t first_model_layer = 0;
  uint32_t model_heads = 0;  // Of all ranks.
  uint32_t first_model_head = 0;

  float* k_norms = nullptr;       // [plane][tokens], out of the records
  float* v_norms = nullptr;       // [plane][tokens]
  float* anchors = nullptr;       // [plane][k_head_dim], and its norm behind all of them: [plane]
  float* anchor_norms = nullptr;  // [plane]
  float* anchor_dots = nullptr;   // [plane][tokens]
  float* key_min = nullptr;       // [plane][blocks][k_head_dim], out of the records
  float* key_max = nullptr;
  float* queries = nullptr;      // [plane][group * queries][k_head_dim], scaled
  float* lse = nullptr;          // [plane][group * queries], log-sum-exp of the logits
  float* window_mean = nullptr;  // [plane][tokens], as the three below
  float* window_variance = nullptr;
  float* window_peak = nullptr;
  float* window_latest = nullptr;
  PlaneSpread* spreads = nullptr;  // [plane]
  float* host_scores = nullptr;    // [plane][tokens]
  float* plane_scores = nullptr;   // [plane][tokens]
  float* row_scores = nullptr;     // [rows][tokens]
  float* own_blocks = nullptr;     // [layer or plane][blocks], of policies with blocks of their own
  float* scratch = nullptr;        // [worker, or plane on a GPU][scratch_floats]
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
    const auto bounds = [&](const float* array) {
      return array == nullptr ? nullptr
                              : array + uint64_t{plane_index} * kv.shape.blocks() * kv.shape.k_head_dim;
    };
    const auto given = [&](const TokenSignal& signal) { return signal.Plane(layer, head); };
    Plane plane;
    plane.tokens = kv.shape.tokens;
    plane.tokens_per_block = kv.shape.tokens_per_block;
    plane.layer = layer;
    plane.head = head;
    plane.layers = kv.shape.layers;
    plane.model_heads = model_heads;
    plane.model_head = first_model_head + head;
    plane.first_model_layer = first_model_layer;
    plane.budget_tokens = budget_tokens;
    plane.k_norm = own(k_norms);
    plane.v_norm = own(v_norms);
    plane.anchor_dot = own(anchor_dots);
    plane.anchor_norm = anchor_norms == nullptr ? 0 : anchor_norms[plane_index];
    plane.key_min = bounds(key_min);
    plane.key_max = bounds(key_max);
    plane.window_mean = window_mean != nullptr ? own(window_mean) : given(signals.window_mean);
    plane.window_variance =
        window_variance != nullptr ? own(window_variance) : given(signals.window_variance);
    plane.window_peak = window_peak != nullptr ? own(window_peak) : given(signals.window_peak);
    plane.window_latest = window_latest != nullptr ? own(window_latest) : given(signals.window_latest);
    plane.window_queries = signals.window.queries;
    plane.window_tokens = signals.window.own_tokens();
    plane.queries = queries == nullptr ? nullptr : queries + QueryFloats() * plane_index;
    plane.group = signals.window.q_heads / kv.shape.kv_heads;
    plane.host = own(host_scores);
    plane.mass = given(signals.mass);
    plane.mass_square = given(signals.mass_square);
    plane.counts = given(signals.counts);
    plane.latest = signals.latest.values != nullptr ? given(signals.latest) : plane.window_latest;
    plane.peak = signals.peak.values != nullptr ? given(signals.peak) : plane.window_peak;
    plane.last_attended = given(signals.last_attended);
    plane.interval = given(signals.interval);
    plane.hits = given(signals.hits);
    plane.importance = given(signals.importance);
    plane.keep = given(signals.keep);
    plane.signals = &signals;
    plane.kv = &kv;
    plane.scratch = scratch + scratch_index * scratch_floats;
    return plane;
  }
  KVPOOL_HOST_DEVICE uint64_t QueryFloats() const {
    return uint64_t{group()} * signals.window.queries * kv.shape.k_head_dim;
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_CONTEXT_H_
