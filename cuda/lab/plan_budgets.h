// Plans the layers' budgets from the numbers in a file.
#ifndef KVPOOL_CUDA_LAB_PLAN_BUDGETS_H_
#define KVPOOL_CUDA_LAB_PLAN_BUDGETS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/lab/evaluate.h"
#include "cuda/lab/tensor.h"

namespace kvpool::lab {

// The policies of PlanBudgets, for help and errors.
inline constexpr char kBudgetPolicies[] = "uniform, pyramid, cake, d2o, epicache";

struct Budgets {
  std::vector<uint64_t> tokens;      // [layer]; empty if no budget was given
  std::vector<double> shares;        // cake: tokens before rounding; d2o: ratios of the sequence
  std::vector<double> preferences;   // cake
  std::vector<uint64_t> as_authors;  // epicache: tokens without renormalisation
};

//   policy    reads (alternative names)
//   uniform   layers, budget
//   pyramid   layers, budget (cap), window (win), tokens (qlen), beta
//   cake      attention [layer][query][token] or [layer][head][query][token], or K and queries; tau1, tau2,
//             budget
//   d2o       normalised_variance [layer], rho
//   epicache  scores [layer], budget (avg), power
//
// `budget` is the mean of the layers. A setting in `options` replaces the file's number of the same name.
absl::StatusOr<Budgets> PlanBudgets(const Tensors& tensors, const Options& options);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_PLAN_BUDGETS_H_
