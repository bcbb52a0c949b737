// A sequence from a file, as views that scorers take.
//
//   name (alternative)       shape
//   K, V                     [token][dim], [token][head][dim], [layer][token][head][dim]
//   clusters                 [block][token][dim]: K in blocks (with q)
//   queries (q)              [dim], [query][dim], [query][head][dim], [layer][query][head][dim]
//   attention (attn)         [query][token], [layer][query][token], [layer][head][query][token]: the rows of
//                            a window of queries
//   mass (alpha), …          [token], [head][token], [layer][head][token]: each kToken or kWindow signal of
//                            cuda/scorers/parts/signals.h by its name
//   activations, t           for each token the steps at which it was active, and now: they give
//                            last_attended, interval and hits
//   hidden                   [token][dim], [layer][token][dim]
//   weights                  any; or W1, b1, w2, b2 of learned_mlp
//   budget_curve             [layer][head], [99][layer][head]: the share of its tokens that each head loses; of 99, those of
//                            budgets with which 1 % to 99 % leave
//   tokens_per_block (B), budget (C), scale, now
//
// Where attention rows are given, mass, mass_square, latest and peak are computed from them unless given too.
#ifndef KVPOOL_CUDA_LAB_PROBLEM_H_
#define KVPOOL_CUDA_LAB_PROBLEM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/lab/tensor.h"
#include "cuda/scorers/parts/kv_view.h"
#include "cuda/scorers/parts/signals.h"

namespace kvpool::lab {

// The views point into buffers that the problem owns.
class Problem {
 public:
  struct Overrides {
    uint32_t tokens_per_block = 0;  // 0: as in the file, else 16
  };
  static absl::StatusOr<std::unique_ptr<Problem>> Make(const Tensors& tensors, const Overrides& overrides);

  const scorers::KvView& kv() const { return kv_; }
  const scorers::Signals& signals() const { return signals_; }
  bool has_keys() const { return has_keys_; }
  uint32_t budget_tokens() const { return budget_tokens_; }  // 0: the file has none
  const std::vector<float>& budget_curve() const { return budget_curve_; }
  // [layer][head]: the shares for a budget with which the share `leaving` leaves. REQUIRES: there is a curve.
  absl::Span<const float> BudgetCurveAt(double leaving) const;

 private:
  Problem() = default;
  absl::Status FindShape(const Tensors& tensors, const Overrides& overrides);
  absl::Status TakeKv(const Tensors& tensors);
  absl::Status TakeQueries(const Tensors& tensors);
  absl::Status TakeAttention(const Tensors& tensors);
  absl::Status TakeSignals(const Tensors& tensors);
  absl::Status TakeActivations(const Tensors& tensors);
  absl::Status TakeHiddenAndWeights(const Tensors& tensors);
  absl::Status TakeBudgetCurve(const Tensors& tensors);
  std::vector<float>* NewBuffer(size_t floats);

  std::vector<std::unique_ptr<std::vector<float>>> buffers_;
  std::vector<uint64_t> block_addresses_;
  scorers::KvView kv_;
  scorers::Signals signals_;
  uint32_t budget_tokens_ = 0;
  std::vector<float> budget_curve_;
  bool has_keys_ = false;
};

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_PROBLEM_H_
