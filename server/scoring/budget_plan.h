// The part of PlanBudgets that needs no device: how many tokens each layer keeps, given what is
// known of the layers.
#ifndef KVPOOL_SERVER_SCORING_BUDGET_PLAN_H_
#define KVPOOL_SERVER_SCORING_BUDGET_PLAN_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cuda/scorers/budgets.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

// What the sequences of a request showed. Layers are those of the first sequence, then those of the next;
// without a sequence there are none.
struct ObservedAttention {
  absl::Span<const scorers::AttentionSpread> spreads;  // [layers]
  // The variance, over tokens, of the attention that each receives: one for each head of the first layer,
  // then of the next.
  absl::Span<const double> densities;
  absl::Span<const uint32_t> heads;  // [layers]
  uint64_t sequence_tokens = 0;      // Tokens of the longest sequence.
  uint64_t window_tokens = 0;
};

// INVALID_ARGUMENT names field or parameter, value and limits.
absl::Status PlanLayerBudgets(const v1::PlanBudgets& request, const ObservedAttention& observed,
                              v1::PlanBudgetsResult* result);

// A label of metrics: "cake", ….
std::string_view MethodName(v1::BudgetMethod method);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_BUDGET_PLAN_H_
