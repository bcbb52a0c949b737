// What an engine can tell of a sequence beyond its K and V. All optional; a policy says what it needs.
//
// A token signal is one float per (layer, kv head, token), GQA groups already averaged. A stride of 0 says
// that layers or heads share their values. Included by kernels: plain types only.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_SIGNALS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_SIGNALS_H_

#include <cstdint>

#include "cuda/scorers/parts/kv_view.h"

namespace kvpool::scorers {

// values[layer * layer_stride + head * head_stride + token], strides in floats.
struct TokenSignal {
  const float* values = nullptr;
  uint64_t layer_stride = 0;
  uint64_t head_stride = 0;

  KVPOOL_HOST_DEVICE const float* Plane(uint32_t layer, uint32_t head) const {
    return values == nullptr ? nullptr : values + layer * layer_stride + head * head_stride;
  }
};

// The last `queries` post-RoPE queries of the sequence: query w is at token tokens - queries + w, and sees
// keys up to and with its own. Element (layer, query, head, dim) is at data + the strides, dims contiguous.
// Query head h reads kv head h / (q_heads / kv_heads).
struct QueryWindow {
  const void* data = nullptr;
  KvDtype dtype = KvDtype::kF32;
  uint32_t queries = 0;
  uint32_t q_heads = 0;
  uint64_t layer_stride_bytes = 0;
  uint64_t query_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  float scale = 0;      // Of the logits; 0: 1 / sqrt(k_head_dim).
  bool behind = false;  // Of a prompt that is not in the sequence: each query sees all of its keys.

  // How many of the sequence's last tokens the queries are those of.
  KVPOOL_HOST_DEVICE uint32_t own_tokens() const { return behind ? 0 : queries; }
};

struct Signals {
  TokenSignal mass;           // Sum over queries so far of the attention the token received.
  TokenSignal mass_square;    // Sum of its square.
  TokenSignal counts;         // Queries that could see the token; without it tokens - index.
  TokenSignal latest;         // Attention of the newest query.
  TokenSignal peak;           // Largest attention of any query (EpiCache: of the patched prompt's queries).
  TokenSignal last_attended;  // Step at which attention was last above the engine's threshold.
  TokenSignal interval;       // Longest gap between two such steps so far; 0: none yet.
  TokenSignal hits;           // Steps (or chunks) at which the token was attended.
  TokenSignal importance;     // Any score of the engine's own, higher stays.
  TokenSignal keep;           // Flags of a gate: 0 leaves.
  QueryWindow window;
  // What a window of queries says of each token, where the engine has computed it: in place of window.data, with
  // window.queries as their number. As Plane::window_mean and its neighbours in policy.h.
  TokenSignal window_mean;
  TokenSignal window_variance;
  TokenSignal window_peak;
  TokenSignal window_latest;
  const float* hidden = nullptr;  // [layer][token][hidden_dim] at hidden_layer_stride; one layer's if 0.
  uint32_t hidden_dim = 0;
  uint64_t hidden_layer_stride = 0;
  const float* weights = nullptr;  // Of a learned policy, as its header says.
  uint64_t weight_count = 0;
  float now = 0;  // Step of the newest query, on the clock of last_attended.
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_SIGNALS_H_
