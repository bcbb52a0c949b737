// A pruning policy: a name, what it needs, its parameters, and one pure function.
//
//   struct Keydiff {
//     static constexpr PolicyFacts kFacts = {.name = "keydiff", …};
//     template <typename Team>
//     KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
//                                          float* scores);
//   };
//
// Score fills scores[0, plane.tokens) for one (layer, kv head): the highest stay. The lanes of one team
// (team.h) share the plane. cuda/scorers/README.md says how to add a policy. Victims are chosen in this order
// of scores: NaN (a token whose K or V is not a number goes first), -Inf, …, +Inf; tokens of equal scores
// leave oldest first.
#ifndef KVPOOL_CUDA_SCORERS_PARTS_POLICY_H_
#define KVPOOL_CUDA_SCORERS_PARTS_POLICY_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "cuda/base/lane.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::scorers {

// The inputs that a policy reads.
enum Need : Needs {
  // Computed from K, V and scores.
  kNeedNorms = 1u << 0,       // ‖K‖ per token and, unless MLA, ‖V‖
  kNeedUnitAnchor = 1u << 1,  // dot of each key with the mean of k/‖k‖, and ‖K‖
  kNeedMeanAnchor = 1u << 2,  // dot of each key with the mean of k, and ‖K‖
  kNeedKeyBounds = 1u << 3,   // least and greatest of each key element per block
  kNeedKeys = 1u << 4,        // K itself
  kNeedValues = 1u << 5,      // V itself: not with MLA
  kNeedValueNorms = 1u << 6,  // ‖V‖: not with MLA
  kNeedHost = 1u << 7,        // scores of another policy, named by the parameter "host"
  // Given by the engine: a window's queries themselves, and each signal of KVPOOL_SIGNALS.
  kNeedQueries = 1u << kSignalNeedShift,
#define KVPOOL_SIGNAL_NEED(member, Need, kind, ...) kNeed##Need = Needs{1} << (kind + kSignalNeedShift),
  KVPOOL_SIGNALS(KVPOOL_SIGNAL_NEED)
#undef KVPOOL_SIGNAL_NEED
};
inline constexpr Needs kNeedsGivenByEngine = ~Needs{0} << kSignalNeedShift;
// Queries stand in for all that a window says, and that for two other signals of the same meaning.
inline constexpr Needs kNeedsMetByQueries =
    kNeedQueries | NeedsOf(SignalShape::kWindow) | kNeedLatest | kNeedPeak;

enum class ParamType : uint8_t { kFloat, kInt, kBool, kChoice };

struct ParamFacts {
  std::string_view name;
  ParamType type = ParamType::kFloat;
  float default_value = 0;  // the index of a choice
  float min = 0;
  float max = 0;
  std::string_view choices;  // "a|b|c"; "odd" for an odd integer
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

// The ends of a sequence, in tokens and in blocks, that stay whatever their scores.
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
  // `layer` counts within the layer group, which has `layers` of them.
  uint32_t layer = 0;
  uint32_t head = 0;
  uint32_t layers = 0;
  // For policies with weights for each head: the kv heads that a layer has on all ranks, and which of them
  // this is.
  uint32_t model_heads = 0;
  uint32_t model_head = 0;
  // How many tokens shall stay; 0: scored without a budget.
  uint32_t budget_tokens = 0;
  const float* k_norm = nullptr;
  const float* v_norm = nullptr;
  const float* anchor_dot = nullptr;
  float anchor_norm = 0;
  // The records of the sequence's blocks, and where in them the bounds of this plane's keys are (records.h).
  const float* const* records = nullptr;
  uint64_t key_min_at = 0, key_max_at = 0;
  // Scores of the host policy.
  const float* host = nullptr;
  // The plane's row of each signal, `mass`, `mass_square`, …, as given. The four of a query window are computed
  // where its queries are read, and stand in for `latest` and `peak` where these are not given.
#define KVPOOL_SIGNAL_MEMBER(member, ...) const float* member = nullptr;
  KVPOOL_SIGNALS(KVPOOL_SIGNAL_MEMBER)
#undef KVPOOL_SIGNAL_MEMBER
  uint32_t window_queries = 0;
  // The number of tokens, at the sequence's end, that the window's queries belong to.
  uint32_t window_tokens = 0;
  // The window's queries, scaled: [query head of the group][query][k_head_dim]; null if only their attention
  // is given.
  const float* queries = nullptr;
  uint32_t group = 0;  // query heads that read this kv head
  const Signals* signals = nullptr;
  const KvView* kv = nullptr;
  // ScratchFloats(shape) floats for this plane alone, and behind them those of the policy's own.
  float* scratch = nullptr;

  // The least and the greatest of each key element over the block's tokens: k_head_dim floats. REQUIRES: kNeedKeyBounds.
  KVPOOL_HOST_DEVICE const float* KeyMin(uint32_t block) const { return records[block] + key_min_at; }
  KVPOOL_HOST_DEVICE const float* KeyMax(uint32_t block) const { return records[block] + key_max_at; }
  KVPOOL_HOST_DEVICE float Count(uint32_t token) const {
    return counts != nullptr ? counts[token] : static_cast<float>(tokens - token);
  }
  // PolicyFacts::scratch_floats of them, aligned to 64 bytes.
  KVPOOL_HOST_DEVICE float* own_scratch() const;
};
// Rows of `tokens` floats, and behind them two rows of each K's and V's head_dim; a multiple of 64 bytes.
inline constexpr uint32_t kScratchRows = 3;
KVPOOL_HOST_DEVICE constexpr uint64_t ScratchFloats(const KvShape& shape) {
  return (uint64_t{kScratchRows} * shape.tokens + 2 * (shape.k_head_dim + shape.v_head_dim) + 15) / 16 * 16;
}
KVPOOL_HOST_DEVICE inline float* Plane::own_scratch() const { return scratch + ScratchFloats(kv->shape); }

// Planes [first, first + count): the heads of one layer, or one of them.
struct PlaneRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

struct PolicyFacts {
  std::string_view name;
  std::string_view title;   // "PagedEviction"
  std::string_view source;  // paper and arXiv id
  std::string_view description;
  Needs needs = 0;
  std::span<const ParamFacts> params;
  // Set for a policy that builds on another's scores: the one it builds on unless told.
  std::string_view default_host;
  // The tokens of the query window stay whatever their score.
  bool protect_window = false;
  // Needs that depend on parameters, in place of `needs`.
  Needs (*needs_with)(const Params& params) = nullptr;
  // The first layers of the model that are left out where layers are reduced to one row, unless there are no
  // others.
  uint32_t (*silent_layers)(const Params& params) = nullptr;
  // The policy's default protection; none if null.
  Protection (*protect)(const Params& params, const KvShape& shape, uint32_t budget_tokens) = nullptr;
  // How many tokens a sequence is compacted to, given `budget_tokens`; the budget itself if null.
  uint32_t (*compact_to)(const Params& params, const KvShape& shape, uint32_t budget_tokens) = nullptr;
  // Whether block scores are not reduced from token scores, but the policy's own, for one layer or one plane:
  //   static void ScoreBlocks(const Team& team, const ScoreContext& context, PlaneRange planes,
  //                           uint32_t scratch_index, const Params& params, float* block_scores)
  bool (*own_blocks)(const Params& params) = nullptr;
  // How many weights there must be where `given` are given; FAILED_PRECONDITION unless the two agree. `shape`
  // has the heads of all ranks.
  uint64_t (*weight_count)(const Params& params, const KvShape& shape, uint32_t hidden_dim,
                           uint64_t given) = nullptr;
  // Scratch beyond ScratchFloats that Score works in, for each plane: Plane::own_scratch(). Bounded by head_dim and
  // parameters, not by tokens.
  uint64_t (*scratch_floats)(const Params& params, const KvShape& shape) = nullptr;

  // Multiplications of a token of one plane beyond a few for each element of its K and V: with weights, with keys of others.
  // None if null. `shape` has the heads of all ranks.
  double (*products)(const Params& params, const KvShape& shape, uint64_t weight_count) = nullptr;

  constexpr Needs NeedsOf(const Params& values) const {
    return needs_with == nullptr ? needs : needs_with(values);
  }
};

// For `weight_count` of weights in any number of equal parts, at least one: `given`, rounded up to whole ones. 0 where a part
// is empty, as those of V are in a layout without V.
constexpr uint64_t WholeParts(uint64_t given, uint64_t part) {
  if (part == 0) return 0;
  return given > part ? (given + part - 1) / part * part : part;
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_PARTS_POLICY_H_
