// A pruning policy: a name, what it needs, its parameters, and one pure function.
//
//   struct KeyDiff {
//     static constexpr PolicyFacts kFacts = {.name = "keydiff", …};
//     template <typename Lane>
//     KVPOOL_HOST_DEVICE static void Score(const Lane& lane, const Plane& plane, const Params& params,
//                                          float* scores);
//   };
//
// Score fills scores[0, plane.tokens) for one (layer, kv head): higher stays. The lanes of one launch share a
// plane; see README.md here for how to add one. Scores are floats in this order when victims are chosen: NaN
// (a token whose K or V is not a number goes first), -Inf, …, +Inf; equal ones leave oldest first.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_POLICY_H_
#define KVPOOL_CUDA_SCORERS_PARTS_POLICY_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::scorers {

// What a policy reads. The first group is computed from K, V and the query window; the second must be given.
enum Need : uint32_t {
  kNeedNorms = 1u << 0,            // ‖K‖ and, unless MLA, ‖V‖ per token.
  kNeedUnitAnchor = 1u << 1,       // Dot of each key with the mean of k/‖k‖, and ‖K‖.
  kNeedPlainAnchor = 1u << 2,      // Dot of each key with the mean of k, and ‖K‖.
  kNeedKeyBounds = 1u << 3,        // Least and greatest of each key element per block.
  kNeedKeys = 1u << 4,             // K itself.
  kNeedValues = 1u << 5,           // V itself: not with MLA.
  kNeedValueNorms = 1u << 6,       // ‖V‖: not with MLA.
  kNeedWindow = 1u << 7,           // A query window, and what it says of each token.
  kNeedQueries = 1u << 9,          // The window's queries themselves.
  kNeedWindowVariance = 1u << 10,  // How the window's attention varies over its queries.
  kNeedHost = 1u << 8,             // Scores of another policy, named by the parameter "host".
  kNeedMass = 1u << 16,
  kNeedMassSquare = 1u << 17,
  kNeedLatest = 1u << 18,
  kNeedPeak = 1u << 19,
  kNeedLastAttended = 1u << 20,
  kNeedInterval = 1u << 21,
  kNeedHits = 1u << 22,
  kNeedImportance = 1u << 23,
  kNeedKeep = 1u << 24,
  kNeedHidden = 1u << 25,
  kNeedWeights = 1u << 26,
};
using Needs = uint32_t;

enum class ParamType : uint8_t { kFloat, kInt, kBool, kChoice };

struct ParamFacts {
  std::string_view name;
  ParamType type = ParamType::kFloat;
  float default_value = 0;  // Of a choice: the index.
  float min = 0;
  float max = 0;
  std::string_view choices;  // "a|b|c".
  std::string_view help;
};

inline constexpr uint32_t kMaxParams = 12;
// Values in the order of the policy's ParamFacts.
struct Params {
  float values[kMaxParams] = {};
  KVPOOL_HOST_DEVICE float operator[](uint32_t i) const { return values[i]; }
  KVPOOL_HOST_DEVICE uint32_t Int(uint32_t i) const { return static_cast<uint32_t>(values[i]); }
  KVPOOL_HOST_DEVICE bool Is(uint32_t i, float value) const { return values[i] == value; }
};

// What must stay whatever its score: the ends of a sequence, in tokens and in blocks.
struct Protection {
  uint32_t first_tokens = 0;
  uint32_t last_tokens = 0;
  uint32_t first_blocks = 0;
  uint32_t last_blocks = 0;
};

// One (layer, kv head) as a policy sees it. Arrays have `tokens` floats and are null unless needed.
struct Plane {
  uint32_t tokens = 0;
  uint32_t tokens_per_block = 0;
  uint32_t layer = 0;  // Within the group.
  uint32_t head = 0;
  uint32_t layers = 0;
  uint32_t model_heads = 0;        // A layer's kv heads of all ranks, for policies with weights for each …
  uint32_t model_head = 0;         // … and which of them this one is.
  uint32_t first_model_layer = 0;  // Of the group's layer 0: for policies that leave the first layers alone.
  uint32_t budget_tokens = 0;      // What shall stay; 0: scored without one.
  const float* k_norm = nullptr;
  const float* v_norm = nullptr;
  const float* anchor_dot = nullptr;
  float anchor_norm = 0;
  const float* key_min = nullptr;  // [block][k_head_dim]
  const float* key_max = nullptr;
  // Of the query window, mean over the GQA group: a token's attention, mean over the window's queries (0 from those
  // before it), its unbiased variance over them, its maximum, and that of the newest query.
  const float* window_mean = nullptr;
  const float* window_variance = nullptr;
  const float* window_peak = nullptr;
  const float* window_latest = nullptr;
  uint32_t window_queries = 0;
  uint32_t window_tokens = 0;  // Of the sequence, at its end, that the queries are those of.
  // The window's queries, scaled: [query head of the group][query][k_head_dim]; null if only what it says is given.
  const float* queries = nullptr;
  uint32_t group = 0;           // Query heads.
  const float* host = nullptr;  // Scores of the host policy.
  // Signals, as in signals.h.
  const float* mass = nullptr;
  const float* mass_square = nullptr;
  const float* counts = nullptr;
  const float* latest = nullptr;
  const float* peak = nullptr;
  const float* last_attended = nullptr;
  const float* interval = nullptr;
  const float* hits = nullptr;
  const float* importance = nullptr;
  const float* keep = nullptr;
  const Signals* signals = nullptr;
  const KvView* kv = nullptr;
  float* scratch = nullptr;  // ScratchFloats(shape) floats for this plane alone.

  KVPOOL_HOST_DEVICE float Count(uint32_t token) const {
    return counts != nullptr ? counts[token] : static_cast<float>(tokens - token);
  }
};
inline constexpr uint32_t kScratchRows = 3;
KVPOOL_HOST_DEVICE constexpr uint64_t ScratchFloats(const KvShape& shape) {
  return uint64_t{kScratchRows} * shape.tokens + shape.k_head_dim + shape.v_head_dim;
}

// Planes [first, first + count): the heads of one layer, or one of them.
struct PlaneRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

struct PolicyFacts {
  std::string_view name;
  std::string_view title;   // "PagedEviction"
  std::string_view source;  // Paper and arXiv id.
  std::string_view description;
  Needs needs = 0;
  std::span<const ParamFacts> params;
  std::string_view default_host;  // Of a policy over another's scores.
  // The tokens of the query window stay whatever their score.
  bool protect_window = false;
  // Needs that hang on parameters, in place of `needs`.
  Needs (*needs_with)(const Params& params) = nullptr;
  // Layers of the model that the policy leaves whole: left out where layers are reduced to one row, unless there
  // are no others.
  uint32_t (*whole_layers)(const Params& params) = nullptr;
  // Defaults for what must stay; none if null. `budget_tokens` as asked.
  Protection (*protect)(const Params& params, const KvShape& shape, uint32_t budget_tokens) = nullptr;
  // What a sequence is compacted to, of `budget_tokens`; the budget itself if null.
  uint32_t (*compact_to)(const Params& params, const KvShape& shape, uint32_t budget_tokens) = nullptr;
  // Whether block scores are not reduced from token scores, but the policy's own, for one layer or one plane:
  //   static void ScoreBlocks(const Team& team, const ScoreContext& context, PlaneRange planes,
  //                           uint32_t scratch_index, const Params& params, float* block_scores)
  bool (*own_blocks)(const Params& params) = nullptr;
  // How many weights there must be, next to those given: FAILED_PRECONDITION if there are others. `shape` has the heads
  // of all ranks.
  uint64_t (*weight_count)(const Params& params, const KvShape& shape, uint32_t hidden_dim,
                           uint64_t given) = nullptr;

  constexpr Needs NeedsOf(const Params& values) const {
    return needs_with == nullptr ? needs : needs_with(values);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_POLICY_H_
