// How many tokens each layer keeps, for layouts with one layer group per block. Host side: some hundred numbers.
//
// All fill budgets[layer]; those marked "exact" sum to what was asked.
#ifndef KVPOOL_CUDA_SCORERS_BUDGETS_H_
#define KVPOOL_CUDA_SCORERS_BUDGETS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace kvpool::scorers {

// `capacity` tokens each.
absl::Status UniformBudgets(uint64_t capacity_tokens, absl::Span<uint64_t> budgets);

// PyramidKV (arXiv 2406.02069): an arithmetic pyramid over layers. As its authors' code, integer division and
// without the window: layer l keeps budgets[l] + window tokens.
struct PyramidOptions {
  uint64_t capacity_tokens = 0;  // Mean per layer, window included.
  uint64_t window_tokens = 64;
  uint64_t sequence_tokens = 0;
  uint64_t beta = 20;
};
absl::Status PyramidBudgets(const PyramidOptions& options, absl::Span<uint64_t> budgets);

// What the attention of a query window says of one layer (CAKE, arXiv 2503.12491): its entropy
// -sum A ln(A + 1e-10), and the sum over keys and heads of the unbiased variance over the window.
struct AttentionSpread {
  double entropy = 0;
  double variance = 0;
};
// `attention` is [rows][keys] of one head; adds to *spread.
void AddAttentionSpread(absl::Span<const double> attention, uint64_t rows, uint64_t keys,
                        AttentionSpread* spread);
// entropy^(1/tau1) * variance^(1/tau2).
double CakePreference(const AttentionSpread& spread, double tau1, double tau2);
// preference / sum * total, before rounding.
absl::Status CakeShares(absl::Span<const double> preferences, double total_tokens, absl::Span<double> shares);
// Exact, unless every layer is at `most_tokens_a_layer` (a sequence has no more): clipped there, the excess and
// what rounding leaves spread evenly over the others.
absl::Status CakeBudgets(absl::Span<const double> preferences, uint64_t total_tokens,
                         uint64_t most_tokens_a_layer, absl::Span<uint64_t> budgets);

// D2O (arXiv 2406.13035): clip(softmax(-F) * layers * rho, 0.01, 1), F a layer's normalised variance of attention
// density.
//
// F of each layer out of the prefill's attention: `column_sums` [layer][head][token], what each token received in all. Per
// head their unbiased variance over tokens; brought to 0 to 1 over the heads of all layers (authors' code: over those of one
// layer, which says nothing of a layer with one head); the mean over a layer's heads.
absl::Status D2oDensity(absl::Span<const double> column_sums, uint64_t layers, uint64_t heads,
                        absl::Span<double> normalised_variance);
// The same from the variance of each head; `heads` of each layer, one layer after the other.
absl::Status D2oNormalise(absl::Span<const double> variances, absl::Span<const uint32_t> heads,
                          absl::Span<double> normalised_variance);
absl::Status D2oRatios(absl::Span<const double> normalised_variance, double rho, absl::Span<double> ratios);

// EpiCache (arXiv 2509.17396): w = (1 - minmax(sensitivity))^power, budget = average * layers * w / sum w, at
// least average / 4. The authors' code leaves the sum above the pool after that floor; `renormalise` makes it
// exact.
struct EpicacheOptions {
  double average_tokens = 0;
  double power = 2;
  bool renormalise = true;
};
absl::Status EpicacheBudgets(absl::Span<const double> sensitivity, const EpicacheOptions& options,
                             absl::Span<uint64_t> budgets);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_BUDGETS_H_
