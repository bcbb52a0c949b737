// The number of tokens that each layer keeps, for layouts with one layer group per block. All functions fill
// budgets[layer]; they run on the host, on some hundred numbers.
#ifndef KVPOOL_CUDA_SCORERS_BUDGETS_H_
#define KVPOOL_CUDA_SCORERS_BUDGETS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace kvpool::scorers {

// `capacity_tokens` for every layer.
absl::Status UniformBudgets(uint64_t capacity_tokens, absl::Span<uint64_t> budgets);

// PyramidKV (arXiv 2406.02069): budgets that fall arithmetically over layers. As in the authors' code
// division is that of integers, and budgets are without the window: layer l keeps budgets[l] +
// window_tokens tokens.
struct PyramidOptions {
  uint64_t capacity_tokens = 0;  // mean of the layers, window included
  uint64_t window_tokens = 64;
  uint64_t sequence_tokens = 0;
  uint64_t beta = 20;
};
absl::Status PyramidBudgets(const PyramidOptions& options, absl::Span<uint64_t> budgets);

// How the attention A of a query window is spread in one layer (CAKE, arXiv 2503.12491): its entropy
// -sum A ln(A + 1e-10), and the sum over keys and heads of its unbiased variance over the window's queries.
struct AttentionSpread {
  double entropy = 0;
  double variance = 0;
};
// Adds one head's `attention`, [rows][keys], to *spread.
void AddAttentionSpread(absl::Span<const double> attention, uint64_t rows, uint64_t keys,
                        AttentionSpread* spread);
// entropy^(1/tau1) * variance^(1/tau2).
double CakePreference(const AttentionSpread& spread, double tau1, double tau2);
// shares[layer] = preference / sum of preferences * total_tokens: budgets before rounding.
absl::Status CakeShares(absl::Span<const double> preferences, double total_tokens, absl::Span<double> shares);
// CakeShares rounded, and clipped at most_tokens_per_layer, the sequence's length; the difference is spread
// evenly over the other layers. The sum is total_tokens, unless all layers are clipped.
absl::Status CakeBudgets(absl::Span<const double> preferences, uint64_t total_tokens,
                         uint64_t most_tokens_per_layer, absl::Span<uint64_t> budgets);

// D2O (arXiv 2406.13035): ratio = clip(softmax(-F) * layers * rho, 0.01, 1), F being a layer's normalised
// variance of attention density.
//
// D2oDensity computes F from the prefill's attention; column_sums [layer][head][token] is the attention that
// each token received from all queries. Of each head it takes the unbiased variance over tokens, brings these
// to 0 to 1 over the heads of all layers, and takes the mean over a layer's heads. (The authors' code
// normalises over the heads of one layer, which makes all layers with one head alike.)
absl::Status D2oDensity(absl::Span<const double> column_sums, uint64_t layers, uint64_t heads,
                        absl::Span<double> normalised_variance);
// The same from the heads' variances, layer after layer; `heads` is the number of heads of each layer.
absl::Status D2oNormalise(absl::Span<const double> variances, absl::Span<const uint32_t> heads,
                          absl::Span<double> normalised_variance);
absl::Status D2oRatios(absl::Span<const double> normalised_variance, double rho, absl::Span<double> ratios);

// EpiCache (arXiv 2509.17396): w = (1 - minmax(sensitivity))^power, budget = max(average * layers * w / sum
// w, average / 4). In the authors' code the floor raises the sum above average * layers; `renormalise` brings
// it back.
struct EpicacheOptions {
  double average_tokens = 0;
  double power = 2;
  bool renormalise = true;
};
absl::Status EpicacheBudgets(absl::Span<const double> sensitivity, const EpicacheOptions& options,
                             absl::Span<uint64_t> budgets);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_BUDGETS_H_
