#include "cuda/scorers/budgets.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool::scorers {
namespace {

absl::Status CheckTokens(const char* field, uint64_t tokens) {
  if (tokens <= kMaxLayerTokens) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", tokens, ", at most ", kMaxLayerTokens));
}

absl::Status CheckNumbers(const char* field, absl::Span<const double> values, double least) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i]) && values[i] >= least) continue;
    return absl::InvalidArgumentError(absl::StrCat(field, " of layer ", i, " is ", values[i], ", must be ",
                                                   least == 0 ? "0 or more" : "a finite number"));
  }
  return absl::OkStatus();
}

absl::Status CheckLayers(const char* field, size_t values, size_t budgets) {
  if (budgets > 0 && values == budgets) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(values, " of ", field, " for ", budgets, " layers"));
}

// Adds `residue` to the budgets, or takes it off: layers in order get equal shares, round after round, within
// [least, most], until nothing is left or no layer can take more.
void SpreadResidue(int64_t residue, uint64_t least, uint64_t most, absl::Span<uint64_t> budgets) {
  while (residue != 0) {
    size_t open = 0;
    for (const uint64_t budget : budgets) open += residue > 0 ? budget < most : budget > least;
    if (open == 0) return;
    const int64_t share = std::max<int64_t>(1, std::abs(residue) / static_cast<int64_t>(open));
    for (uint64_t& budget : budgets) {
      if (residue == 0) return;
      const int64_t room =
          residue > 0 ? static_cast<int64_t>(most - budget) : static_cast<int64_t>(budget - least);
      const int64_t step = std::min({share, std::max<int64_t>(room, 0), std::abs(residue)});
      budget = residue > 0 ? budget + static_cast<uint64_t>(step) : budget - static_cast<uint64_t>(step);
      residue -= residue > 0 ? step : -step;
    }
  }
}

int64_t Residue(uint64_t total, absl::Span<const uint64_t> budgets) {
  return static_cast<int64_t>(total) -
         static_cast<int64_t>(std::accumulate(budgets.begin(), budgets.end(), uint64_t{0}));
}

}  // namespace

absl::Status UniformBudgets(uint64_t capacity_tokens, absl::Span<uint64_t> budgets) {
  RETURN_IF_ERROR(CheckTokens("capacity_tokens", capacity_tokens));
  std::fill(budgets.begin(), budgets.end(), capacity_tokens);
  return absl::OkStatus();
}

absl::Status PyramidBudgets(const PyramidOptions& options, absl::Span<uint64_t> budgets) {
  RETURN_IF_ERROR(CheckTokens("capacity_tokens", options.capacity_tokens));
  if (options.beta == 0) return absl::InvalidArgumentError("beta is 0, must be 1 or more");
  if (options.window_tokens >= options.capacity_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("window_tokens is ", options.window_tokens,
                                                   ", must be below capacity_tokens, ",
                                                   options.capacity_tokens));
  }
  if (budgets.empty()) return absl::InvalidArgumentError("no layers");
  const uint64_t middle = options.capacity_tokens - options.window_tokens;
  const uint64_t before_window =
      options.sequence_tokens - std::min(options.sequence_tokens, options.window_tokens);
  if (options.sequence_tokens < 2 * middle || budgets.size() == 1) {
    // The authors' code falls back to SnapKV's budget, which is at most the tokens before the window.
    std::fill(budgets.begin(), budgets.end(), std::min(middle, before_window));
    return absl::OkStatus();
  }
  uint64_t least = middle / options.beta;
  uint64_t most = 2 * middle - least;
  if (most >= before_window) {
    most = before_window;
    least = 2 * middle - most;
  }
  const uint64_t step = (most - std::min(most, least)) / (budgets.size() - 1);
  for (size_t layer = 0; layer < budgets.size(); ++layer) budgets[layer] = most - layer * step;
  return absl::OkStatus();
}

void AddAttentionSpread(absl::Span<const double> attention, uint64_t rows, uint64_t keys,
                        AttentionSpread* spread) {
  for (uint64_t key = 0; key < keys; ++key) {
    double mean = 0, squares = 0;
    for (uint64_t row = 0; row < rows; ++row) {
      const double a = attention[row * keys + key];
      const double delta = a - mean;
      mean += delta / static_cast<double>(row + 1);
      squares += delta * (a - mean);
      spread->entropy -= a * std::log(a + 1e-10);
    }
    if (rows > 1) spread->variance += squares / static_cast<double>(rows - 1);
  }
}

double CakePreference(const AttentionSpread& spread, double tau1, double tau2) {
  return std::pow(std::max(spread.entropy, 0.0), 1 / tau1) *
         std::pow(std::max(spread.variance, 0.0), 1 / tau2);
}

absl::Status CakeShares(absl::Span<const double> preferences, double total_tokens,
                        absl::Span<double> shares) {
  RETURN_IF_ERROR(CheckLayers("preferences", preferences.size(), shares.size()));
  RETURN_IF_ERROR(CheckNumbers("preference", preferences, 0));
  const double sum = std::accumulate(preferences.begin(), preferences.end(), 0.0);
  for (size_t layer = 0; layer < shares.size(); ++layer) {
    // Without any preference all layers get the same.
    const double share = sum > 0 ? preferences[layer] / sum : 1.0 / static_cast<double>(shares.size());
    shares[layer] = share * total_tokens;
  }
  return absl::OkStatus();
}

absl::Status CakeBudgets(absl::Span<const double> preferences, uint64_t total_tokens,
                         uint64_t most_tokens_per_layer, absl::Span<uint64_t> budgets) {
  RETURN_IF_ERROR(CheckTokens("total_tokens", total_tokens));
  std::vector<double> shares(budgets.size());
  RETURN_IF_ERROR(CakeShares(preferences, static_cast<double>(total_tokens), absl::MakeSpan(shares)));
  for (size_t layer = 0; layer < budgets.size(); ++layer) {
    budgets[layer] = std::min(most_tokens_per_layer, static_cast<uint64_t>(shares[layer]));
  }
  SpreadResidue(Residue(total_tokens, budgets), 0, most_tokens_per_layer, budgets);
  return absl::OkStatus();
}

absl::Status D2oDensity(absl::Span<const double> column_sums, uint64_t layers, uint64_t heads,
                        absl::Span<double> normalised_variance) {
  RETURN_IF_ERROR(CheckLayers("layers", layers, normalised_variance.size()));
  const uint64_t planes = layers * heads, tokens = planes == 0 ? 0 : column_sums.size() / planes;
  if (tokens < 2 || tokens * planes != column_sums.size()) {
    return absl::InvalidArgumentError(absl::StrCat(column_sums.size(), " column sums of ", layers,
                                                   " layers and ", heads,
                                                   " heads, must be those of 2 tokens or more"));
  }
  std::vector<double> variances(planes);
  for (uint64_t plane = 0; plane < planes; ++plane) {
    const absl::Span<const double> sums = column_sums.subspan(plane * tokens, tokens);
    const double mean = std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(tokens);
    for (const double sum : sums)
      variances[plane] += (sum - mean) * (sum - mean) / static_cast<double>(tokens - 1);
    if (!std::isfinite(variances[plane])) {
      return absl::InvalidArgumentError(
          absl::StrCat("column sums of layer ", plane / heads, " are not finite"));
    }
  }
  return D2oNormalise(variances, std::vector<uint32_t>(layers, static_cast<uint32_t>(heads)),
                      normalised_variance);
}

absl::Status D2oNormalise(absl::Span<const double> variances, absl::Span<const uint32_t> heads,
                          absl::Span<double> normalised_variance) {
  RETURN_IF_ERROR(CheckLayers("layers", heads.size(), normalised_variance.size()));
  if (std::accumulate(heads.begin(), heads.end(), uint64_t{0}) != variances.size() || variances.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(variances.size(), " variances, not one a head"));
  }
  const auto [least, most] = std::minmax_element(variances.begin(), variances.end());
  const double range = *most - *least;
  const double* variance = variances.data();
  for (size_t layer = 0; layer < heads.size(); ++layer) {
    double sum = 0;
    for (uint32_t head = 0; head < heads[layer]; ++head) {
      sum += range > 0 ? (*variance++ - *least) / range : 0;
    }
    normalised_variance[layer] = sum / heads[layer];
  }
  return absl::OkStatus();
}

absl::Status D2oRatios(absl::Span<const double> normalised_variance, double rho, absl::Span<double> ratios) {
  RETURN_IF_ERROR(CheckLayers("variances", normalised_variance.size(), ratios.size()));
  RETURN_IF_ERROR(CheckNumbers("normalised_variance", normalised_variance, -HUGE_VAL));
  if (!(rho > 0 && rho <= 1))
    return absl::InvalidArgumentError(absl::StrCat("rho is ", rho, ", must be in (0, 1]"));
  const double least = *std::min_element(normalised_variance.begin(), normalised_variance.end());
  double sum = 0;
  for (size_t layer = 0; layer < ratios.size(); ++layer) {
    ratios[layer] = std::exp(least - normalised_variance[layer]);
    sum += ratios[layer];
  }
  const double layers = static_cast<double>(ratios.size());
  for (double& ratio : ratios) ratio = std::clamp(ratio / sum * layers * rho, 0.01, 1.0);
  return absl::OkStatus();
}

absl::Status EpicacheBudgets(absl::Span<const double> sensitivity, const EpicacheOptions& options,
                             absl::Span<uint64_t> budgets) {
  RETURN_IF_ERROR(CheckLayers("sensitivities", sensitivity.size(), budgets.size()));
  RETURN_IF_ERROR(CheckNumbers("sensitivity", sensitivity, -HUGE_VAL));
  if (!(options.average_tokens >= 1 && options.average_tokens <= static_cast<double>(kMaxLayerTokens))) {
    return absl::InvalidArgumentError(
        absl::StrCat("average_tokens is ", options.average_tokens, ", must be 1 to ", kMaxLayerTokens));
  }
  if (!(options.power >= 0 && options.power <= 64)) {
    return absl::InvalidArgumentError(absl::StrCat("power is ", options.power, ", must be 0 to 64"));
  }
  const double least = *std::min_element(sensitivity.begin(), sensitivity.end());
  const double range = *std::max_element(sensitivity.begin(), sensitivity.end()) - least;
  double sum = 0;
  const auto weight = [&](size_t layer) {
    return range == 0 ? 1.0 : std::pow(1 - (sensitivity[layer] - least) / range, options.power);
  };
  for (size_t layer = 0; layer < budgets.size(); ++layer) sum += weight(layer);
  const double total = options.average_tokens * static_cast<double>(budgets.size());
  const uint64_t floor = static_cast<uint64_t>(options.average_tokens / 4);
  for (size_t layer = 0; layer < budgets.size(); ++layer) {
    budgets[layer] = std::max(floor, static_cast<uint64_t>(total * weight(layer) / sum));
  }
  if (!options.renormalise) return absl::OkStatus();
  // The layers above the floor pay in proportion for those that it raised; then the rounding error is spread.
  double above = 0;
  for (const uint64_t budget : budgets) above += static_cast<double>(budget - floor);
  const double left = total - static_cast<double>(floor) * static_cast<double>(budgets.size());
  for (uint64_t& budget : budgets) {
    if (above > 0) budget = floor + static_cast<uint64_t>(static_cast<double>(budget - floor) * left / above);
  }
  SpreadResidue(Residue(static_cast<uint64_t>(total), budgets), floor, static_cast<uint64_t>(total), budgets);
  return absl::OkStatus();
}

}  // namespace kvpool::scorers
