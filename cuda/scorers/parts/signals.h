// What an engine can tell of a sequence beyond its K and V. All of it is optional; a policy says what it
// needs. Included by kernels: plain types only.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_SIGNALS_H_
#define KVPOOL_CUDA_SCORERS_PARTS_SIGNALS_H_

#include <cstdint>

#include "cuda/scorers/parts/kv_view.h"

namespace kvpool::scorers {

// How many floats one row of a signal has, and which rows there may be.
//
//   shape      floats of a row               a row for each
//   kToken     tokens                        layer and kv head, or shared by layers, heads or both
//   kWindow    tokens                        as kToken
//   kHidden    tokens * hidden_dim           as kToken
//   kWeights   weight_count                  nothing: there is one
enum class SignalShape : uint8_t {
  kToken,  // GQA groups are averaged already.
  // As kToken, computed by the engine from a query window: given in place of QueryWindow::data, with
  // QueryWindow::queries as the number of queries.
  kWindow,
  kHidden,
  kWeights,
};

// The signals, one line each. Every other list of signals is made from this one: the members of Signals
// (below) and of Plane (policy.h), the bits of Need (policy.h), the checks and the staging of a request
// (server), the names that kvpool-lab knows, and what a message calls a signal that is missing.
//
//   X(member, Need, kind, shape, words)
//     member   in Signals and in Plane; SignalKind in score.proto has SIGNAL_KIND_ and the same name
//     Need     kNeedMass: the bit that a policy sets that reads plane.mass
//     kind     the number of that value of SignalKind
//     shape    a SignalShape
//     words    for people: "policy h2o needs attention mass, not given"
#define KVPOOL_SIGNALS(X)                                                                                  \
  /* The sum, over the queries so far, of the attention that the token received. */                        \
  X(mass, Mass, 1, kToken, "attention mass")                                                               \
  /* The sum of its square. */                                                                             \
  X(mass_square, MassSquare, 2, kToken, "attention mass squared")                                          \
  /* Queries that could see the token. Never needed: without it they are tokens - index (Plane::Count). */ \
  X(counts, Counts, 3, kToken, "numbers of queries")                                                       \
  /* The attention of the newest query. */                                                                 \
  X(latest, Latest, 4, kToken, "the newest query's attention")                                             \
  /* The greatest attention of any query; for epicache of any query of the patched prompt. */              \
  X(peak, Peak, 5, kToken, "peak attention")                                                               \
  /* The step at which attention was last above the engine's threshold, on the clock of Signals::now. */   \
  X(last_attended, LastAttended, 6, kToken, "last-attended steps")                                         \
  /* The longest gap between two such steps so far; 0: none yet. */                                        \
  X(interval, Interval, 7, kToken, "recurrence intervals")                                                 \
  /* The number of steps (or chunks) at which the token was attended. */                                   \
  X(hits, Hits, 8, kToken, "attention hits")                                                               \
  /* Any score of the engine's own; the highest stays. */                                                  \
  X(importance, Importance, 9, kToken, "importance")                                                       \
  /* The flags of a gate: a token with 0 leaves. */                                                        \
  X(keep, Keep, 10, kToken, "keep flags")                                                                  \
  /* Attention from a query window, each the mean over the GQA group: its mean over the queries (0 from */ \
  /* those before the token), its unbiased variance over them, its maximum, and that of the newest one. */ \
  X(window_mean, WindowMean, 11, kWindow, "a query window")                                                \
  X(window_variance, WindowVariance, 12, kWindow, "a query window")                                        \
  X(window_peak, WindowPeak, 13, kWindow, "a query window")                                                \
  X(window_latest, WindowLatest, 14, kWindow, "a query window")                                            \
  /* Hidden states at a layer's input. */                                                                  \
  X(hidden, Hidden, 15, kHidden, "hidden states")                                                          \
  /* The weights of a learned policy, in the order that its header states. */                              \
  X(weights, Weights, 16, kWeights, "weights")

// values[layer * layer_stride + head * head_stride + i], strides in floats. A stride of 0 says that layers or
// heads share their row.
struct SignalArray {
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
  // The factor of the logits; 0: 1 / sqrt(k_head_dim).
  float scale = 0;
  // The queries are those of a prompt that is not in the sequence: each sees all of its keys.
  bool behind = false;

  // The number of the sequence's last tokens that the queries belong to.
  KVPOOL_HOST_DEVICE uint32_t own_tokens() const { return behind ? 0 : queries; }
};

struct Signals {
#define KVPOOL_SIGNAL_MEMBER(member, ...) SignalArray member;
  KVPOOL_SIGNALS(KVPOOL_SIGNAL_MEMBER)
#undef KVPOOL_SIGNAL_MEMBER
  QueryWindow window;
  uint32_t hidden_dim = 0;    // floats of one token of `hidden`
  uint64_t weight_count = 0;  // floats of `weights`
  float now = 0;              // step of the newest query, on the clock of last_attended

  // Floats of one row of a signal of this shape.
  constexpr uint64_t RowFloats(SignalShape shape, uint32_t tokens) const {
    switch (shape) {
      case SignalShape::kToken:
      case SignalShape::kWindow:
        return tokens;
      case SignalShape::kHidden:
        return uint64_t{tokens} * hidden_dim;
      case SignalShape::kWeights:
        return weight_count;
    }
    return 0;
  }
};

// A set of bits of Need (policy.h).
using Needs = uint64_t;
// The need of signal kind k is bit k + kSignalNeedShift; the bits below are for what is computed from K, V
// and queries.
inline constexpr uint32_t kSignalNeedShift = 15;

struct SignalFacts {
  const char* name;
  uint32_t kind;
  SignalShape shape;
  const char* words;
  SignalArray Signals::*array;

  constexpr Needs need() const { return Needs{1} << (kind + kSignalNeedShift); }
};

inline constexpr SignalFacts kSignals[] = {
#define KVPOOL_SIGNAL_FACTS(member, Need, kind, shape, words) \
  {#member, kind, SignalShape::shape, words, &Signals::member},
    KVPOOL_SIGNALS(KVPOOL_SIGNAL_FACTS)
#undef KVPOOL_SIGNAL_FACTS
};

// The needs of all signals of this shape.
constexpr Needs NeedsOf(SignalShape shape) {
  Needs needs = 0;
  for (const SignalFacts& facts : kSignals) needs |= facts.shape == shape ? facts.need() : 0;
  return needs;
}

// The signal of a value of SignalKind; null if there is none.
constexpr const SignalFacts* FindSignal(uint32_t kind) {
  for (const SignalFacts& facts : kSignals) {
    if (facts.kind == kind) return &facts;
  }
  return nullptr;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_SIGNALS_H_
