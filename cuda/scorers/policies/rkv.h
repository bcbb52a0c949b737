// R-KV: keeps what a window of queries attends and what is not said again.
//
//   score(t)  = lambda * A(t) - (1 - lambda) * R(t)
//   A         the greatest of `kernel` neighbours' attention, which is the mean over the window's queries of the softmax,
//             over the tokens before the window, of the greatest logit of the query heads that read the kv head
//   R         softmax over all tokens of (sum over i != t of cos(k_i, k_t), without those i whose newest alike is t) / tokens
//
// The newest alike of i is the last token whose key's cosine with k_i is above the threshold, and the sequence's first
// token where there is none, as the authors' code has it. So the newest of many like tokens counts as less redundant than
// the others. The sum of cosines is one product with the sum of the keys over their norms. The newest alike takes every
// pair of tokens: it is looked for among the last `search` tokens, which the authors' budgets do not exceed. The
// window's tokens stay; A is 0 there. (arXiv 2505.24133, section 3; the authors' R1KV with retain_direction=last.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_RKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_RKV_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/pooling.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Rkv {
  enum : uint32_t { kLambda, kKernel, kThreshold, kSearch };
  // A team has no more row teams, each of which looks for the alike of one token.
  static constexpr uint32_t kRowTeams = 32;
  static constexpr ParamFacts kParams[] = {
      {"lambda", ParamType::kFloat, 0.07f, 0, 1, "", "weight of the attention"},
      {"kernel", ParamType::kInt, 7, 1, 255, "odd", "tokens whose greatest attention counts"},
      {"threshold", ParamType::kFloat, 0.5f, -1, 1, "", "cosine above which two keys are alike"},
      {"search", ParamType::kInt, 4096, 1, 8192, "",
       "last tokens among which the newest alike is looked for"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "rkv",
      .title = "R-KV",
      .source = "arXiv 2505.24133",
      .description =
          "For reasoning models, each time their output has filled the budget: keeps what a window of the "
          "last queries "
          "attends and drops keys that are like many others, the newest of which stays likelier.",
      .needs = kNeedQueries | kNeedUnitAnchor | kNeedKeys,
      .params = kParams,
      .protect_window = true,
      .scratch_floats = [](const Params& params, const KvShape& shape) -> uint64_t {
        return uint64_t{kRowTeams} * shape.k_head_dim;
      },
      .products =
          [](const Params& params, const KvShape& shape, uint64_t weight_count) {
            const uint32_t searched = params.Int(kSearch) < shape.tokens ? params.Int(kSearch) : shape.tokens;
            return 1.0 * searched * shape.k_head_dim;
          },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t tokens = plane.tokens;
    const uint32_t before = tokens > plane.window_tokens ? tokens - plane.window_tokens : 0;
    float* const attended = plane.scratch;
    float* const pooled = plane.scratch + tokens;
    ScoreRedundancy(team, plane, params, scores);
    SoftMax(team, tokens, scores);
    Attend(team, plane, before, attended);
    Pool(team, Pooling::kMax, params.Int(kKernel), attended, before, pooled);
    team.Sync();
    const float lambda = params[kLambda];
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      scores[i] = (i < before ? lambda * pooled[i] : 0) - (1 - lambda) * scores[i];
    }
  }

 private:
  // The product of a token's key with `x`, by a row team, each lane of which gets it.
  template <typename Team>
  KVPOOL_HOST_DEVICE static float KeyProduct(const Team& team, const Plane& plane, uint32_t token,
                                             const float* x) {
    const KvView& kv = *plane.kv;
    return SumOverRow<RowOp::kProduct>(team, kv.KeyRow(plane.layer, plane.head, token), kv.k, kv.dtype, x);
  }
  // The authors divide by the norm plus this.
  KVPOOL_HOST_DEVICE static float OverNorm(const Plane& plane, uint32_t token) {
    return 1 / (plane.k_norm[token] + 1e-8f);
  }

  // scores[t] = the mean of the cosines with t that count; NaN for a key whose norm is not finite.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreRedundancy(const Team& team, const Plane& plane, const Params& params,
                                                 float* scores) {
    const uint32_t tokens = plane.tokens;
    const uint32_t search = params.Int(kSearch) < tokens ? params.Int(kSearch) : tokens;
    float* const alike = plane.scratch;
    float* const cosines = plane.scratch + tokens;
    FindAlikes(team, plane, params[kThreshold], search, alike, cosines);
    uint32_t directed = 0;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) directed += HasDirection(plane.k_norm[i]);
    directed = team.Count(directed);
    for (uint32_t t = team.id(); t < tokens; t += team.count()) {
      const float norm = plane.k_norm[t];
      double sum = norm > 0 ? double{plane.anchor_dot[t]} * directed / double{norm} - 1 : 0;
      for (uint32_t i = 0; i < tokens && (t == 0 || t >= tokens - search); ++i) {
        if (alike[i] == static_cast<float>(t)) sum -= double{cosines[i]};
      }
      scores[t] = IsFinite(norm) ? static_cast<float>(sum / tokens) : NAN;
    }
    team.Sync();
  }

  // alike[i] = the newest alike of i, cosines[i] = its cosine with i: 0 where it is i itself, or where i has no direction.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void FindAlikes(const Team& team, const Plane& plane, float threshold,
                                            uint32_t search, float* alike, float* cosines) {
    const KvView& kv = *plane.kv;
    const uint32_t tokens = plane.tokens, dim = kv.shape.k_head_dim;
    float* const unit = plane.own_scratch() + uint64_t{team.row()} * dim;
    for (uint32_t first = 0; first < tokens; first += team.rows()) {
      const uint32_t own = first + team.row();
      const bool directed = own < tokens && HasDirection(plane.k_norm[own]);
      team.Sync();
      if (directed) {
        const unsigned char* const row = kv.KeyRow(plane.layer, plane.head, own);
        const float over = OverNorm(plane, own);
        for (uint32_t d = team.in_row(); d < dim; d += team.row_width()) {
          unit[d] = LoadElement(row + d * kv.k.dim_stride_bytes, kv.dtype) * over;
        }
      }
      team.Sync();
      uint32_t found = 0;
      float cosine = 0;
      for (uint32_t back = 0; back <= search && directed; ++back) {
        const uint32_t other = back < search ? tokens - 1 - back : 0;
        if (other == own) continue;
        const float x = KeyProduct(team, plane, other, unit) * OverNorm(plane, other);
        if (back < search && !(x > threshold)) continue;
        found = other;
        cosine = x;
        break;
      }
      if (own >= tokens || team.in_row() != 0) continue;
      alike[own] = static_cast<float>(found);
      cosines[own] = cosine;
    }
    team.Sync();
  }

  // attended[t] for the tokens before the window. A lane has the softmax of one query at a time.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void Attend(const Team& team, const Plane& plane, uint32_t before,
                                        float* attended) {
    const uint32_t queries = plane.window_queries, width = team.row_width(), dim = plane.kv->shape.k_head_dim;
    for (uint32_t t = team.row(); t < before; t += team.rows()) {
      if (team.in_row() == 0) attended[t] = 0;
    }
    for (uint32_t base = 0; base < queries; base += width) {
      const uint32_t end = queries - base < width ? queries : base + width;
      float greatest = -INFINITY;
      double sum = 0;
      // One loop for the greatest logit, the sum and the shares: a GPU's code has the product once.
      for (uint32_t pass = 0; pass < 3; ++pass) {
        for (uint32_t t = team.row(); t < before; t += team.rows()) {
          float logit = NAN;
          for (uint32_t w = base; w < end; ++w) {
            float of_heads = -INFINITY;
            for (uint32_t g = 0; g < plane.group; ++g) {
              const float* const query = plane.queries + (uint64_t{g} * queries + w) * dim;
              of_heads = GreaterOf(of_heads, KeyProduct(team, plane, t, query));
            }
            if (team.in_row() == w - base) logit = of_heads;
          }
          const bool counts = IsFinite(logit);
          if (pass == 0 && counts) greatest = GreaterOf(greatest, logit);
          if (pass == 1 && counts) sum += double{expf(logit - greatest)};
          if (pass < 2) continue;
          const float share = counts ? static_cast<float>(double{expf(logit - greatest)} / sum) : 0;
          const float shares = team.RowSum(share);
          if (team.in_row() == 0) attended[t] += shares / static_cast<float>(queries);
        }
        if (pass == 0) greatest = team.GreatestOfRows(greatest);
        if (pass == 1) sum = team.SumOfRows(sum);
      }
    }
    team.Sync();
  }

  // NaN has no part in the sum and stays.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void SoftMax(const Team& team, uint32_t tokens, float* values) {
    float greatest = -INFINITY;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      if (IsFinite(values[i])) greatest = GreaterOf(greatest, values[i]);
    }
    greatest = team.Max(greatest);
    double sum = 0;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      if (IsFinite(values[i])) sum += double{expf(values[i] - greatest)};
    }
    sum = team.Sum(sum);
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      values[i] = static_cast<float>(double{expf(values[i] - greatest)} / sum);
    }
    team.Sync();
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_RKV_H_
