// Requests and answers of device operations, in Python's terms.
#ifndef KVPOOL_CLIENT_PYTHON_SRC_SCORING_H_
#define KVPOOL_CLIENT_PYTHON_SRC_SCORING_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/python/src/bind.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool::python {

// A policy, its parameters and signals, and how scores are reduced: the part that Score,
// Prune and Compact share.
struct PyScorer {
  v1::Policy policy;
  v1::Signals signals;
  v1::Reductions reductions;
  std::vector<nb::object> keeps;  // Block arrays that signals name, kept alive.

  template <typename Request>
  void Fill(Request* request) const {
    *request->mutable_policy() = policy;
    *request->mutable_signals() = signals;
    *request->mutable_reductions() = reductions;
  }
};
// A Scorer, the name of a policy, or none for the default.
PyScorer ScorerOf(nb::handle scorer);

struct PyQueryWindow {
  v1::QueryWindow proto;
  nb::object keeps;
};

using TokenRanges = std::vector<std::pair<uint32_t, uint32_t>>;

struct PyProtection {
  v1::Protection proto;
};

// Tokens that stay, or leave, whatever their scores.
struct WhateverScore {
  TokenRanges protect;
  const PyProtection* protection = nullptr;  // Null: the policy's own.
  TokenRanges discard;
};

struct ScoreArguments {
  std::string scope;
  bool token_scores = false, block_scores = true, fresh = false;
  uint32_t budget_tokens = 0;
};
v1::Score ScoreRequestOf(nb::handle scorer, const ScoreArguments& arguments);

struct PruneArguments {
  std::optional<uint32_t> budget_tokens, budget_blocks;  // Exactly one is set.
  bool fresh = false, dry_run = false;
};
v1::Prune PruneRequestOf(nb::handle scorer, const PruneArguments& arguments, const WhateverScore& ranges);

// Weights and states of disposition 'less'.
struct PyLessTerms {
  v1::LessTerms proto;
  std::vector<nb::object> keeps;
};

// Terms of heads that share a budget.
struct PyAdaTerms {
  v1::AdaTerms proto;
};

struct CompactArguments {
  std::optional<uint32_t> budget_tokens;  // This or `keep` is set.
  std::optional<std::vector<uint32_t>> keep;
  std::string scope;
  bool fresh = false, keep_sources = false;
  std::string disposition;
  std::vector<float> merge_thresholds;  // Only where tokens are merged.
  float merge_smoothing = 0;
  std::vector<BlockRef> low_blocks;  // Only where tokens go on in low precision.
  uint32_t low_bits = 0;
  const PyLessTerms* less = nullptr;  // Only where they are added to a state.
  std::string heads;
  const PyAdaTerms* ada = nullptr;  // Only where heads share a budget.
};
v1::Compact CompactRequestOf(nb::handle scorer, const CompactArguments& arguments,
                             const WhateverScore& ranges);

// A BlockArray, `offset` bytes from its start on; `field` names it in errors.
v1::Data ArrayOf(const std::string& field, nb::handle array, uint64_t offset);

// A LiveSequence or a BlockTable of this session; `field` names it in errors.
v1::Sequence SequenceOf(const std::string& field, nb::handle table,
                        const std::shared_ptr<SharedSession>& session);

// Answers. Python sees scores as NumPy arrays.
struct PyScoreResult {
  v1::ScoreResult proto;
};
struct PySelectResult {
  v1::SelectResult proto;
};
struct PyPruneResult {
  v1::PruneResult proto;
};
struct PyCompactResult {
  v1::CompactResult proto;
};

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_SCORING_H_
