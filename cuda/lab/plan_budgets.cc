#include "cuda/lab/plan_budgets.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cuda/scorers/budgets.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

// Numbers by name: from the command line, else from the file.
class Numbers {
 public:
  Numbers(const Tensors& tensors, const Options& options) : tensors_(tensors), options_(options) {}

  absl::StatusOr<double> Get(const std::vector<const char*>& names, std::optional<double> fallback) const {
    for (const char* name : names) {
      for (const auto& [key, value] : options_.settings) {
        double number;
        if (key != name) continue;
        if (absl::SimpleAtod(value, &number) && std::isfinite(number)) return number;
        return absl::InvalidArgumentError(absl::StrCat("parameter ", key, ": \"", value, "\" is no number"));
      }
      const Tensor* const tensor = tensors_.Find(name);
      if (tensor != nullptr && tensor->values.size() == 1 && std::isfinite(tensor->values[0])) {
        return tensor->values[0];
      }
    }
    if (fallback.has_value()) return *fallback;
    return absl::InvalidArgumentError(absl::StrCat(names.front(), " is needed, in the input or as --param"));
  }

  absl::StatusOr<uint64_t> GetWhole(const std::vector<const char*>& names, std::optional<double> fallback,
                                    uint64_t max) const {
    ASSIGN_OR_RETURN(const double number, Get(names, fallback));
    if (number >= 0 && number <= static_cast<double>(max) && number == std::floor(number)) {
      return static_cast<uint64_t>(number);
    }
    return absl::InvalidArgumentError(
        absl::StrCat(names.front(), " is ", number, ", must be a whole number from 0 to ", max));
  }

  // The mean of the layers; 0: not given.
  absl::StatusOr<uint64_t> Budget() const {
    if (options_.budget_tokens != 0) return options_.budget_tokens;
    return GetWhole({"budget", "cap", "avg", "C"}, 0, uint64_t{1} << 32);
  }

 private:
  const Tensors& tensors_;
  const Options& options_;
};

absl::Status CheckBudget(uint64_t budget) {
  if (budget > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("no budget: give --budget TOKENS, the mean per layer; 1 or more");
}

absl::StatusOr<Budgets> Uniform(const Numbers& numbers) {
  ASSIGN_OR_RETURN(const uint64_t layers, numbers.GetWhole({"layers"}, {}, kMaxLayers));
  ASSIGN_OR_RETURN(const uint64_t budget, numbers.Budget());
  RETURN_IF_ERROR(CheckBudget(budget));
  Budgets budgets{.tokens = std::vector<uint64_t>(layers)};
  RETURN_IF_ERROR(scorers::UniformBudgets(budget, absl::MakeSpan(budgets.tokens)));
  return budgets;
}

absl::StatusOr<Budgets> Pyramid(const Numbers& numbers) {
  constexpr uint64_t kMost = uint64_t{1} << 32;
  scorers::PyramidOptions options;
  ASSIGN_OR_RETURN(const uint64_t layers, numbers.GetWhole({"layers"}, {}, kMaxLayers));
  ASSIGN_OR_RETURN(options.capacity_tokens, numbers.Budget());
  RETURN_IF_ERROR(CheckBudget(options.capacity_tokens));
  ASSIGN_OR_RETURN(options.window_tokens, numbers.GetWhole({"window", "win"}, 64, kMost));
  ASSIGN_OR_RETURN(options.sequence_tokens, numbers.GetWhole({"tokens", "qlen"}, {}, kMost));
  ASSIGN_OR_RETURN(options.beta, numbers.GetWhole({"beta"}, 20, kMost));
  Budgets budgets{.tokens = std::vector<uint64_t>(layers)};
  RETURN_IF_ERROR(scorers::PyramidBudgets(options, absl::MakeSpan(budgets.tokens)));
  return budgets;
}

// The entropy and variance of each layer's attention, and the number of tokens.
absl::StatusOr<std::vector<scorers::AttentionSpread>> SpreadsOf(const Tensors& tensors, uint64_t* tokens) {
  const Tensor* attention = tensors.Find("attention");
  if (attention == nullptr) attention = tensors.Find("attn");
  if (attention == nullptr) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem, Problem::Make(tensors, {}));
    Options options{.policy = "cake"};
    ASSIGN_OR_RETURN(const scorers::BoundPolicy policy, BindFor(options, *problem));
    ASSIGN_OR_RETURN(Scores scores, Score(*problem, policy, options));
    const uint32_t all = problem->kv().shape.tokens;
    *tokens = all - std::min(all, problem->signals().window.queries);
    return std::move(scores.spreads);
  }
  const std::vector<uint64_t>& shape = attention->shape;
  if (shape.size() != 3 && shape.size() != 4) {
    return absl::InvalidArgumentError(
        "attention must be [layer][query][token] or [layer][head][query][token], of tokens before the "
        "window");
  }
  const uint64_t heads = shape.size() == 4 ? shape[1] : 1;
  const uint64_t rows = shape[shape.size() - 2];
  *tokens = shape.back();
  std::vector<scorers::AttentionSpread> spreads(shape[0]);
  for (uint64_t plane = 0; plane < shape[0] * heads; ++plane) {
    scorers::AddAttentionSpread(
        absl::MakeConstSpan(attention->values).subspan(plane * rows * *tokens, rows * *tokens), rows, *tokens,
        &spreads[plane / heads]);
  }
  return spreads;
}

absl::StatusOr<Budgets> Cake(const Tensors& tensors, const Numbers& numbers) {
  ASSIGN_OR_RETURN(const double tau1, numbers.Get({"tau1"}, 1));
  ASSIGN_OR_RETURN(const double tau2, numbers.Get({"tau2"}, 1));
  if (!(tau1 > 0 && tau2 > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tau1 and tau2 are ", tau1, " and ", tau2, ", must be above 0"));
  }
  uint64_t tokens = 0;
  ASSIGN_OR_RETURN(const std::vector<scorers::AttentionSpread> spreads, SpreadsOf(tensors, &tokens));
  Budgets budgets;
  for (const scorers::AttentionSpread& spread : spreads) {
    budgets.preferences.push_back(scorers::CakePreference(spread, tau1, tau2));
  }
  ASSIGN_OR_RETURN(const uint64_t budget, numbers.Budget());
  if (budget == 0) return budgets;
  const uint64_t total = budget * spreads.size();
  budgets.shares.resize(spreads.size());
  budgets.tokens.resize(spreads.size());
  RETURN_IF_ERROR(
      scorers::CakeShares(budgets.preferences, static_cast<double>(total), absl::MakeSpan(budgets.shares)));
  RETURN_IF_ERROR(scorers::CakeBudgets(budgets.preferences, total, tokens, absl::MakeSpan(budgets.tokens)));
  return budgets;
}

absl::StatusOr<const Tensor*> ListOf(const Tensors& tensors, const char* name) {
  const Tensor* const tensor = tensors.Find(name);
  if (tensor != nullptr && tensor->shape.size() == 1) return tensor;
  return absl::InvalidArgumentError(absl::StrCat(name, " [layer] is needed in the input"));
}

// The attention that each token received in all, from attention [layer][query][token] or
// [layer][head][query][token].
absl::StatusOr<std::vector<double>> DensityOf(const Tensor& attention) {
  const std::vector<uint64_t>& shape = attention.shape;
  if (shape.size() != 3 && shape.size() != 4) {
    return absl::InvalidArgumentError(
        "attention must be [layer][query][token] or [layer][head][query][token]");
  }
  const uint64_t heads = shape.size() == 4 ? shape[1] : 1, tokens = shape.back();
  const uint64_t rows = shape[shape.size() - 2];
  std::vector<double> sums(shape[0] * heads * tokens), density(shape[0]);
  for (uint64_t i = 0; i < attention.values.size(); ++i) {
    sums[i / (rows * tokens) * tokens + i % tokens] += attention.values[i];
  }
  RETURN_IF_ERROR(scorers::D2oDensity(sums, shape[0], heads, absl::MakeSpan(density)));
  return density;
}

absl::StatusOr<Budgets> D2o(const Tensors& tensors, const Numbers& numbers) {
  const Tensor* attention = tensors.Find("attention");
  if (attention == nullptr) attention = tensors.Find("attn");
  std::vector<double> variance;
  if (attention != nullptr && tensors.Find("normalised_variance") == nullptr) {
    ASSIGN_OR_RETURN(variance, DensityOf(*attention));
  } else {
    ASSIGN_OR_RETURN(const Tensor* given, ListOf(tensors, "normalised_variance"));
    variance = given->values;
  }
  ASSIGN_OR_RETURN(const double rho, numbers.Get({"rho"}, 0.2));
  Budgets budgets{.shares = std::vector<double>(variance.size())};
  RETURN_IF_ERROR(scorers::D2oRatios(variance, rho, absl::MakeSpan(budgets.shares)));
  ASSIGN_OR_RETURN(const uint64_t budget, numbers.Budget());
  if (budget == 0) return budgets;
  budgets.tokens.resize(variance.size());
  RETURN_IF_ERROR(scorers::CakeBudgets(budgets.shares, budget * variance.size(), uint64_t{1} << 32,
                                       absl::MakeSpan(budgets.tokens)));
  return budgets;
}

absl::StatusOr<Budgets> Epicache(const Tensors& tensors, const Numbers& numbers) {
  ASSIGN_OR_RETURN(const Tensor* scores, ListOf(tensors, "scores"));
  ASSIGN_OR_RETURN(const uint64_t average, numbers.Budget());
  RETURN_IF_ERROR(CheckBudget(average));
  ASSIGN_OR_RETURN(const double power, numbers.Get({"power"}, 2));
  const size_t layers = scores->values.size();
  Budgets budgets{.tokens = std::vector<uint64_t>(layers), .as_authors = std::vector<uint64_t>(layers)};
  scorers::EpicacheOptions options{.average_tokens = static_cast<double>(average), .power = power};
  RETURN_IF_ERROR(scorers::EpicacheBudgets(scores->values, options, absl::MakeSpan(budgets.tokens)));
  options.renormalise = false;
  RETURN_IF_ERROR(scorers::EpicacheBudgets(scores->values, options, absl::MakeSpan(budgets.as_authors)));
  return budgets;
}

}  // namespace

absl::StatusOr<Budgets> PlanBudgets(const Tensors& tensors, const Options& options) {
  const Numbers numbers(tensors, options);
  if (options.policy == "uniform") return Uniform(numbers);
  if (options.policy == "pyramid" || options.policy == "pyramidkv") return Pyramid(numbers);
  if (options.policy == "cake") return Cake(tensors, numbers);
  if (options.policy == "d2o") return D2o(tensors, numbers);
  if (options.policy == "epicache") return Epicache(tensors, numbers);
  return absl::InvalidArgumentError(
      absl::StrCat("budgets by \"", options.policy, "\" are unknown; there are: ", kBudgetPolicies));
}

}  // namespace kvpool::lab
