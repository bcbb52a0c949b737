// Expected Attention: keeps the tokens that queries to come are expected to attend, weighed by their values.
//
// Queries to come are taken for normally distributed, with mean m and covariance C for each query head, so that the mean
// of exp(q.k / sqrt d) over them is exp of
//
//   m.k / sqrt d + k'C k / (2 d)
//
// The softmax of that over the tokens behind the sinks is averaged over the query heads that read the kv head, and the
// score is (average + epsilon) * ‖V‖. Sinks score the plane's greatest + 1.
//
// The weights are [layer][query head][m, C], k_head_dim and k_head_dim * k_head_dim floats, or m alone with
// use_covariance=false; a kv head has at most 128 query heads. They are those of queries after RoPE, averaged over the positions to come: keys are scored as they
// are cached. `kvpool-lab calibrate` makes them. A GPU multiplies k_head_dim^2 numbers for each token and query head:
// this is no pass that waits for memory.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_EXPECTED_ATTENTION_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_EXPECTED_ATTENTION_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

// No model has more query heads that read one kv head.
inline constexpr uint64_t kMaxGroup = 128;

// Weights of one query head.
KVPOOL_HOST_DEVICE constexpr uint64_t QueryStatisticsFloats(bool covariance, uint32_t k_head_dim) {
  return k_head_dim + (covariance ? uint64_t{k_head_dim} * k_head_dim : 0);
}

struct ExpectedAttention {
  enum : uint32_t { kSinks, kUseCovariance, kUseVnorm, kEpsilon };
  static constexpr ParamFacts kParams[] = {
      {"sinks", ParamType::kInt, 4, 0, 1 << 20, "", "tokens at the start that stay"},
      {"use_covariance", ParamType::kBool, 1, 0, 1, "", "the weights have covariances, not only means"},
      {"use_vnorm", ParamType::kBool, 1, 0, 1, "", "the attention is multiplied by ‖V‖"},
      {"epsilon", ParamType::kFloat, 0, 0, 1e6f, "", "added to the attention before that"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "expected_attention",
      .title = "Expected Attention",
      .source = "arXiv 2510.00636; ExpectedAttentionPress of kvpress",
      .description =
          "Keeps the tokens that queries to come are expected to attend, by the calibrated mean and "
          "covariance of each query head's (kvpool-lab calibrate), times ‖V‖.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return kNeedKeys | kNeedWeights | (params.Is(kUseVnorm, 1) ? Needs{kNeedValueNorms} : 0);
      },
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        return {.first_tokens = params.Int(kSinks)};
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t {
        // The weights of as many query heads for each kv head as are given, rounded up. With covariances they have the
        // size of means of d + 1 times the heads, and are not taken for those.
        const uint64_t planes = shape.planes();
        const uint64_t means = planes * QueryStatisticsFloats(false, shape.k_head_dim);
        const uint64_t both = planes * QueryStatisticsFloats(true, shape.k_head_dim);
        const uint64_t most = kMaxGroup * (params.Is(kUseCovariance, 1) ? both : means);
        if (params.Is(kUseCovariance, 1)) return WholeParts(given < most ? given : most, both);
        return given % both == 0 ? means : WholeParts(given < most ? given : most, means);
      },
      // Each token is multiplied with all weights of its head.
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return static_cast<double>(weight_count) / shape.planes(); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t tokens = plane.tokens;
    const uint32_t first = params.Int(kSinks) < tokens ? params.Int(kSinks) : tokens;
    const uint64_t unit = QueryStatisticsFloats(params.Is(kUseCovariance, 1), plane.kv->shape.k_head_dim);
    const uint64_t planes = uint64_t{plane.layers} * plane.model_heads;
    const auto group = static_cast<uint32_t>(plane.signals->weight_count / (planes * unit));
    const float* const own =
        plane.weights + (uint64_t{plane.layer} * plane.model_heads + plane.model_head) * group * unit;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) scores[i] = 0;
    for (uint32_t g = 0; g < group; ++g) {
      WithDtype(plane.kv->dtype, LogitsOfType<Team>{team, plane, params.Is(kUseCovariance, 1), first,
                                                    own + g * unit, plane.scratch});
      team.Sync();
      AddSoftmax(team, first, tokens, group, plane.scratch, scores);
      team.Sync();
    }
    float greatest = 0;
    for (uint32_t i = first + team.id(); i < tokens; i += team.count()) {
      if (params.Is(kUseVnorm, 1)) scores[i] = (scores[i] + params[kEpsilon]) * plane.v_norm[i];
      if (IsFinite(scores[i])) greatest = GreaterOf(greatest, scores[i]);
    }
    greatest = team.Max(greatest);
    for (uint32_t i = team.id(); i < first; i += team.count()) scores[i] = greatest + 1;
  }

 private:
  template <typename Team>
  struct LogitsOfType {
    const Team& team;
    const Plane& plane;
    bool use_covariance;
    uint32_t first;
    const float* mean;
    float* logits;

    template <KvDtype dtype>
    KVPOOL_HOST_DEVICE void Run() const {
      using Storage = typename Element<dtype>::Storage;
      const KvView& kv = *plane.kv;
      const uint32_t dim = kv.shape.k_head_dim;
      const uint64_t stride = kv.k.dim_stride_bytes;
      const float root = sqrtf(static_cast<float>(dim));
      const float* const covariance = mean + dim;
      for (uint32_t t = first + team.row(); t < plane.tokens; t += team.rows()) {
        const unsigned char* const row = kv.KeyRow(plane.layer, plane.head, t);
        float product = 0, form = 0;
        for (uint32_t d = team.in_row(); d < dim; d += team.row_width()) {
          product += mean[d] * Element<dtype>::Load(*reinterpret_cast<const Storage*>(row + d * stride));
        }
        // All lanes go around equally often, since they multiply together.
        for (uint32_t base = 0; use_covariance && base < dim; base += team.row_width()) {
          const uint32_t left = dim - base, d = base + team.in_row();
          const float with_row =
              team.template ProductWithOwn<dtype>(row, stride, dim, covariance + uint64_t{base} * dim,
                                                  left < team.row_width() ? left : team.row_width());
          if (d < dim) {
            form += with_row * Element<dtype>::Load(*reinterpret_cast<const Storage*>(row + d * stride));
          }
        }
        const float logit = team.RowSum(product / root + form / static_cast<float>(2 * dim));
        if (team.in_row() == 0) logits[t] = logit;
      }
    }
  };

  // Adds the softmax of logits[first, tokens) over `group`. One that is not finite has no part in it, and makes the
  // token's score NaN.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void AddSoftmax(const Team& team, uint32_t first, uint32_t tokens, uint32_t group,
                                            const float* logits, float* scores) {
    float greatest = -INFINITY;
    for (uint32_t i = first + team.id(); i < tokens; i += team.count()) {
      if (IsFinite(logits[i])) greatest = GreaterOf(greatest, logits[i]);
    }
    greatest = team.Max(greatest);
    double sum = 0;
    for (uint32_t i = first + team.id(); i < tokens; i += team.count()) {
      if (IsFinite(logits[i])) sum += double{expf(logits[i] - greatest)};
    }
    sum = team.Sum(sum) * group;
    for (uint32_t i = first + team.id(); i < tokens; i += team.count()) {
      scores[i] += IsFinite(logits[i]) ? static_cast<float>(double{expf(logits[i] - greatest)} / sum) : NAN;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_EXPECTED_ATTENTION_H_
