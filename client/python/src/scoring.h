// What a policy is told, in Python: Scorer, Signal, QueryWindow, BlockArray.
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

// A policy, its parameters and signals, and how scores are reduced: the part that Score, Prune and Compact share.
struct PyScorer {
  v1::Policy policy;
  v1::Signals signals;
  v1::Reductions reductions;
  std::vector<nb::object> keeps;  // Block arrays that signals name.

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

// Prune and Compact say alike what stays whatever its score.
template <typename Request>
void Protect(const TokenRanges& ranges, const PyProtection* protection, Request* request) {
  for (const auto& [begin, end] : ranges) {
    v1::TokenRange& range = *request->add_protect();
    range.set_begin(begin);
    range.set_end(end);
  }
  if (protection != nullptr) *request->mutable_protection() = protection->proto;
}

struct ScoreArguments {
  std::string scope;
  bool token_scores = false, block_scores = true, fresh = false;
  uint32_t budget_tokens = 0;
};
v1::Score ScoreRequestOf(nb::handle scorer, const ScoreArguments& arguments);

// The answer, with scores as NumPy arrays.
struct PyScoreResult {
  v1::ScoreResult proto;
};

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_SCORING_H_
