// CriticalKV: another policy's scores times the length that a token's value has behind the output projection.
//
//   n(t)     = ‖A v_t‖, A being the kv head's matrix in `weights`
//   s(t)     = (host(t) + epsilon) * n(t)
//   stage 1  the first_stage share of the budget goes to the greatest host(t)
//   stage 2  the rest of it to the greatest s(t)
//
// The weights are [layer][kv head][rows][v_head_dim], with any number of rows, each of which is multiplied with each
// token's value. The host has none of its own, as a request has one array of them:
//
//   norm   A                                                          n(t)
//   l1     W_o of the query heads that read the kv head, one over     the mean over them of ‖W_o v‖_1, as in the
//          the other and divided by their number: group *             paper and in kvpress
//          hidden_dim rows
//   l2     the upper triangle R of W_o = Q R, for that matrix:        sqrt(sum over them of ‖W_o v‖_2^2) / group
//          v_head_dim rows
//
// A window that the host protects takes part in stage 1 by its attention; in kvpress it takes the first places there. R
// says the 2-norm exactly in a fraction of the rows (16 MiB in place of 2 GiB for 32 layers with 8 kv heads, 32 query
// heads of 128 and a hidden_dim of 4,096); the 1-norm has no such form. (arXiv 2502.03805, algorithm 1; kvpress's
// CriticalKVPress, which has the same epsilon and first stage.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_CRITICALKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_CRITICALKV_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Criticalkv {
  enum : uint32_t { kHost, kNorm, kEpsilon, kFirstStage };
  static constexpr ParamFacts kParams[] = {
      {"host", ParamType::kChoice, 0, 0, 0, "",
       "the policy whose scores are multiplied; its parameters as host.NAME"},
      {"norm", ParamType::kChoice, 0, 0, 1, "l1|l2", "of the projected value"},
      {"epsilon", ParamType::kFloat, 1e-4f, 0, 1e6f, "", "what is added to the host's scores"},
      {"first_stage", ParamType::kFloat, 0.5f, 0, 1, "",
       "share of the budget that goes by the host's scores alone"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "criticalkv",
      .title = "CriticalKV",
      .source = "arXiv 2502.03805",
      .description =
          "Part of the budget by another policy's scores, the rest by these times the norm of the value "
          "behind the output projection, whose matrix by kv head is the weights: W_o itself for the paper's "
          "norm (l1), or its much smaller triangular factor for l2.",
      .needs = kNeedHost | kNeedValues | kNeedWeights,
      .params = kParams,
      .default_host = "snapkv",
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim, uint64_t given)
          -> uint64_t { return WholeParts(given, uint64_t{shape.planes()} * shape.v_head_dim); },
      // Each token is multiplied with all weights of its head.
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return static_cast<double>(weight_count) / shape.planes(); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    ScoreSecondStage(team, plane, params, scores);
    team.Sync();
    const uint32_t chosen = FirstStage(plane, params);
    if (chosen == 0) return;
    const auto key = [&](uint32_t i) { return OrderOf(plane.host[i], i); };
    const uint64_t first_chosen = KthLowest(team, plane.tokens, plane.tokens - chosen, key);
    float least = INFINITY, greatest = -INFINITY;
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      if (!IsFinite(scores[i])) continue;
      least = scores[i] < least ? scores[i] : least;
      greatest = scores[i] > greatest ? scores[i] : greatest;
    }
    least = team.Min(least);
    greatest = team.Max(greatest);
    // Twice the range puts all of the first stage above all of the second.
    const float above = greatest > least ? 2 * (greatest - least) : 1;
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      if (key(i) >= first_chosen) scores[i] += above;
    }
  }

 private:
  // How many tokens stay by the host's scores alone: at least one, unless no budget or no share is given.
  KVPOOL_HOST_DEVICE static uint32_t FirstStage(const Plane& plane, const Params& params) {
    if (plane.budget_tokens == 0 || params[kFirstStage] <= 0) return 0;
    const double share = double{params[kFirstStage]} * plane.budget_tokens;
    return share < 1 ? 1 : share < plane.tokens ? static_cast<uint32_t>(share) : plane.tokens;
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreSecondStage(const Team& team, const Plane& plane, const Params& params,
                                                  float* scores) {
    const KvView& kv = *plane.kv;
    const uint32_t dim = kv.v.head_dim;
    const uint64_t rows = plane.signals->weight_count / (uint64_t{plane.layers} * plane.model_heads * dim);
    const float* const own =
        plane.weights + (uint64_t{plane.layer} * plane.model_heads + plane.model_head) * rows * dim;
    const bool squares = params.Is(kNorm, 1);
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      const unsigned char* const value = kv.ValueRow(plane.layer, plane.head, t);
      double norm = 0;
      for (uint64_t r = 0; r < rows; ++r) {
        const double x = SumOverRow<RowOp::kProduct>(team, value, kv.v, kv.dtype, own + r * dim);
        norm += squares ? x * x : x < 0 ? -x : x;
      }
      if (squares) norm = sqrt(norm);
      if (team.in_row() == 0) {
        scores[t] = static_cast<float>((double{plane.host[t]} + double{params[kEpsilon]}) * norm);
      }
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_CRITICALKV_H_
