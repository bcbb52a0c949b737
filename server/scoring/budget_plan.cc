#include "server/scoring/budget_plan.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"
#include "server/wire/field_checks.h"

namespace kvpool {
namespace {

// The parameters of a method, each with its default. Known() refuses those that the method does not have.
class Parameters {
 public:
  explicit Parameters(const v1::PlanBudgets& request) : request_(request) {}

  absl::Status Known(std::initializer_list<absl::string_view> names) const {
    for (const auto& [name, value] : request_.params()) {
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "plan_budgets.params: \"", name, "\" is no parameter of ",
          std::string(MethodName(request_.method())), "; there are: ", absl::StrJoin(names, ", ")));
    }
    return absl::OkStatus();
  }
  absl::StatusOr<double> Number(const std::string& name, double low, double high, double otherwise) const {
    const auto it = request_.params().find(name);
    if (it == request_.params().end()) return otherwise;
    double value;
    if (!absl::SimpleAtod(it->second, &value) || !(value >= low && value <= high)) {
      return absl::InvalidArgumentError(absl::StrCat("plan_budgets.params: ", name, " is \"", it->second,
                                                     "\"; must be a number from ", low, " to ", high));
    }
    return value;
  }
  absl::StatusOr<uint64_t> Count(const std::string& name, uint64_t low, uint64_t high,
                                 uint64_t otherwise) const {
    const auto it = request_.params().find(name);
    if (it == request_.params().end()) return otherwise;
    uint64_t value;
    if (!absl::SimpleAtoi(it->second, &value) || value < low || value > high) {
      return absl::InvalidArgumentError(absl::StrCat("plan_budgets.params: ", name, " is \"", it->second,
                                                     "\"; must be a whole number from ", low, " to ", high));
    }
    return value;
  }

 private:
  const v1::PlanBudgets& request_;
};

// How many statistics a method takes for each layer; 0: none.
uint32_t StatisticsPerLayer(v1::BudgetMethod method) {
  switch (method) {
    case v1::BUDGET_METHOD_CAKE:
      return 2;
    case v1::BUDGET_METHOD_D2O:
    case v1::BUDGET_METHOD_EPICACHE:
      return 1;
    default:
      return 0;
  }
}

absl::StatusOr<uint32_t> LayersOf(const v1::PlanBudgets& request, const ObservedAttention& observed) {
  const std::string method(MethodName(request.method()));
  const uint32_t per_layer = StatisticsPerLayer(request.method());
  const size_t given = request.statistics_size();
  size_t layers = request.layers();
  if (!observed.spreads.empty()) {
    layers = observed.spreads.size();
  } else if (per_layer > 0 && layers == 0) {
    layers = given / per_layer;
  }
  if (per_layer == 0 && given > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan_budgets.statistics has ", given, " entries; ", method, " takes none"));
  }
  if (per_layer > 0 && observed.spreads.empty() && given != layers * per_layer) {
    return absl::InvalidArgumentError(absl::StrCat("plan_budgets.statistics has ", given, " entries; ",
                                                   method, " takes ", per_layer, " for each of ", layers,
                                                   " layers"));
  }
  if (request.layers() != 0 && request.layers() != layers) {
    return absl::InvalidArgumentError(absl::StrCat("plan_budgets.layers is ", request.layers(),
                                                   "; the sequences have ", layers, " layers"));
  }
  RETURN_IF_ERROR(CheckRange("plan_budgets.layers", layers, 1, kMaxLayers));
  return static_cast<uint32_t>(layers);
}

struct Plan {
  std::vector<uint64_t> budgets;
  std::vector<double> weights;
};

absl::Status PlanPyramid(const v1::PlanBudgets& request, const ObservedAttention& observed, Plan* plan) {
  const Parameters params(request);
  RETURN_IF_ERROR(params.Known({"beta", "window_tokens", "sequence_tokens"}));
  scorers::PyramidOptions options{.capacity_tokens = request.tokens_per_layer()};
  ASSIGN_OR_RETURN(options.beta, params.Count("beta", 1, 1 << 20, options.beta));
  ASSIGN_OR_RETURN(options.window_tokens,
                   params.Count("window_tokens", 0, kMaxLayerTokens, options.window_tokens));
  const uint64_t seen = observed.sequence_tokens == 0 ? kMaxLayerTokens : observed.sequence_tokens;
  ASSIGN_OR_RETURN(options.sequence_tokens, params.Count("sequence_tokens", 1, kMaxLayerTokens, seen));
  RETURN_IF_ERROR(scorers::PyramidBudgets(options, absl::MakeSpan(plan->budgets)));
  for (uint64_t& budget : plan->budgets) budget += options.window_tokens;
  return absl::OkStatus();
}

absl::Status PlanCake(const v1::PlanBudgets& request, const ObservedAttention& observed, Plan* plan) {
  const Parameters params(request);
  RETURN_IF_ERROR(params.Known({"tau1", "tau2", "window_tokens", "sequence_tokens"}));
  ASSIGN_OR_RETURN(const double tau1, params.Number("tau1", 0.01, 100, 1));
  ASSIGN_OR_RETURN(const double tau2, params.Number("tau2", 0.01, 100, 1));
  ASSIGN_OR_RETURN(const uint64_t window,
                   params.Count("window_tokens", 0, kMaxLayerTokens, observed.window_tokens));
  const uint64_t seen = observed.sequence_tokens == 0 ? kMaxLayerTokens : observed.sequence_tokens;
  ASSIGN_OR_RETURN(const uint64_t tokens, params.Count("sequence_tokens", 1, kMaxLayerTokens, seen));
  if (window >= request.tokens_per_layer() || window >= tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan_budgets.params: window_tokens is ", window, "; must be below tokens_per_layer, ",
                     request.tokens_per_layer(), ", and below the ", tokens, " tokens of the sequence"));
  }
  const size_t layers = plan->budgets.size();
  for (size_t layer = 0; layer < layers; ++layer) {
    const scorers::AttentionSpread spread =
        observed.spreads.empty()
            ? scorers::AttentionSpread{.entropy = request.statistics(static_cast<int>(layer)),
                                       .variance = request.statistics(static_cast<int>(layers + layer))}
            : observed.spreads[layer];
    plan->weights.push_back(scorers::CakePreference(spread, tau1, tau2));
  }
  RETURN_IF_ERROR(scorers::CakeBudgets(plan->weights, (request.tokens_per_layer() - window) * layers,
                                       tokens - window, absl::MakeSpan(plan->budgets)));
  for (uint64_t& budget : plan->budgets) budget += window;
  return absl::OkStatus();
}

absl::Status PlanD2o(const v1::PlanBudgets& request, const ObservedAttention& observed, Plan* plan) {
  const Parameters params(request);
  RETURN_IF_ERROR(params.Known({"sequence_tokens"}));
  ASSIGN_OR_RETURN(const uint64_t tokens,
                   params.Count("sequence_tokens", 1, kMaxLayerTokens, observed.sequence_tokens));
  if (tokens == 0) {
    return absl::InvalidArgumentError("plan_budgets.params: sequence_tokens is missing; d2o needs it");
  }
  plan->weights.resize(plan->budgets.size());
  const double rho =
      std::min(1.0, static_cast<double>(request.tokens_per_layer()) / static_cast<double>(tokens));
  std::vector<double> variances(request.statistics().begin(), request.statistics().end());
  if (!observed.densities.empty()) {
    variances.resize(plan->budgets.size());
    RETURN_IF_ERROR(scorers::D2oNormalise(observed.densities, observed.heads, absl::MakeSpan(variances)));
  }
  RETURN_IF_ERROR(scorers::D2oRatios(variances, rho, absl::MakeSpan(plan->weights)));
  // Clipping changes the sum, and what was asked for is all that the pool has.
  const uint64_t total = std::min(request.tokens_per_layer(), tokens) * plan->budgets.size();
  return scorers::CakeBudgets(plan->weights, total, tokens, absl::MakeSpan(plan->budgets));
}

absl::Status PlanEpicache(const v1::PlanBudgets& request, Plan* plan) {
  const Parameters params(request);
  RETURN_IF_ERROR(params.Known({"power", "renormalise"}));
  scorers::EpicacheOptions options{.average_tokens = static_cast<double>(request.tokens_per_layer())};
  ASSIGN_OR_RETURN(options.power, params.Number("power", 0, 64, options.power));
  ASSIGN_OR_RETURN(const uint64_t renormalise, params.Count("renormalise", 0, 1, 1));
  options.renormalise = renormalise == 1;
  plan->weights.assign(request.statistics().begin(), request.statistics().end());
  return scorers::EpicacheBudgets(plan->weights, options, absl::MakeSpan(plan->budgets));
}

absl::Status PlanBy(const v1::PlanBudgets& request, const ObservedAttention& observed, Plan* plan) {
  switch (request.method()) {
    case v1::BUDGET_METHOD_UNIFORM:
      RETURN_IF_ERROR(Parameters(request).Known({}));
      return scorers::UniformBudgets(request.tokens_per_layer(), absl::MakeSpan(plan->budgets));
    case v1::BUDGET_METHOD_PYRAMID:
      return PlanPyramid(request, observed, plan);
    case v1::BUDGET_METHOD_CAKE:
      return PlanCake(request, observed, plan);
    case v1::BUDGET_METHOD_D2O:
      return PlanD2o(request, observed, plan);
    case v1::BUDGET_METHOD_EPICACHE:
      return PlanEpicache(request, plan);
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("plan_budgets.method is ", static_cast<int>(request.method()), "; must be 1 to 5"));
  }
}

}  // namespace

absl::Status PlanLayerBudgets(const v1::PlanBudgets& request, const ObservedAttention& observed,
                              v1::PlanBudgetsResult* result) {
  RETURN_IF_ERROR(
      CheckRange("plan_budgets.tokens_per_layer", request.tokens_per_layer(), 1, kMaxLayerTokens));
  ASSIGN_OR_RETURN(const uint32_t layers, LayersOf(request, observed));
  for (const double statistic : request.statistics()) {
    if (!std::isfinite(statistic)) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan_budgets.statistics has ", statistic, "; must be finite"));
    }
  }
  Plan plan;
  plan.budgets.resize(layers);
  RETURN_IF_ERROR(PlanBy(request, observed, &plan));
  result->mutable_budget_tokens()->Add(plan.budgets.begin(), plan.budgets.end());
  result->mutable_weights()->Add(plan.weights.begin(), plan.weights.end());
  return absl::OkStatus();
}

std::string_view MethodName(v1::BudgetMethod method) {
  switch (method) {
    case v1::BUDGET_METHOD_UNIFORM:
      return "uniform";
    case v1::BUDGET_METHOD_PYRAMID:
      return "pyramid";
    case v1::BUDGET_METHOD_CAKE:
      return "cake";
    case v1::BUDGET_METHOD_D2O:
      return "d2o";
    case v1::BUDGET_METHOD_EPICACHE:
      return "epicache";
    default:
      return "none";
  }
}

}  // namespace kvpool
