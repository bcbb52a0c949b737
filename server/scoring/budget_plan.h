// PlanBudgets without the device: from what is known of layers to how many tokens each keeps.
#ifndef KVPOOL_SERVER_SCORING_BUDGET_PLAN_H_
#define KVPOOL_SERVER_SCORING_BUDGET_PLAN_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cuda/scorers/budgets.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

// What the sequences of a request said.
struct ObservedAttention {
  absl::Span<const scorers::AttentionSpread>
      spreads;  // By layer, of all sequences in order. Empty: none were given.
  absl::Span<const double>
      densities;  // By layer and head: variances over tokens of the attention they receive.
  absl::Span<const uint32_t> heads;  // Of each layer.
  uint64_t sequence_tokens = 0;      // Of the longest.
  uint64_t window_tokens = 0;
};

// INVALID_ARGUMENT names field or parameter, value and limits.
absl::Status PlanLayerBudgets(const v1::PlanBudgets& request, const ObservedAttention& observed,
                              v1::PlanBudgetsResult* result);

// "cake", …: a label of metrics.
std::string_view MethodName(v1::BudgetMethod method);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_BUDGET_PLAN_H_
