// Attention-Gate: a learned gate decides per head and token, from hidden states, whether to cache it at all.
//
//   source=flags   the engine's gate: `keep` is 0, 1 or a probability
//   source=gate    sigmoid(w.x + u.mean(x) + b) over the layer's hidden states x, whose mean over the
//                  sequence is the global context; weights [layer][kv head][w, u, b], 2 * hidden_dim + 1 each
//
// The paper's gate is an attention layer before the sigmoid, and works before K and V are cached: an engine that has it
// gives its flags. With output=flag the score is 1 above tau and else 0.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_ATTENTION_GATE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_ATTENTION_GATE_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/token_network.h"

namespace kvpool::scorers {

struct AttentionGate {
  enum : uint32_t { kSource, kTau, kOutput };
  static constexpr ParamFacts kParams[] = {
      {"source", ParamType::kChoice, 0, 0, 1, "flags|gate",
       "the engine's flags, or a gate over hidden states"},
      {"tau", ParamType::kFloat, 0.5f, 0, 1, "", "a token above it is kept"},
      {"output", ParamType::kChoice, 0, 0, 1, "probability|flag", "the score"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "attention_gate",
      .title = "Attention-Gate",
      .source = "arXiv 2410.12876",
      .description =
          "A learned gate per head: the engine's keep flags, or a linear gate over hidden states and their "
          "mean with weights from a file. The paper's gate is an attention layer of its own and decides "
          "before a token is cached: that is the engine's to do, which gives flags.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return params.Is(kSource, 0) ? kNeedKeep : kNeedHidden | kNeedWeights;
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t {
        return params.Is(kSource, 0) ? given : uint64_t{shape.planes()} * (2 * uint64_t{hidden_dim} + 1);
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    if (params.Is(kSource, 0)) {
      for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) scores[i] = plane.keep[i];
    } else {
      ScoreGate(team, plane, scores);
    }
    if (params.Is(kOutput, 0)) return;
    team.Sync();
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      scores[i] = scores[i] != scores[i] ? scores[i] : scores[i] > params[kTau] ? 1 : 0;
    }
  }

 private:
  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreGate(const Team& team, const Plane& plane, float* scores) {
    const uint32_t dim = plane.signals->hidden_dim;
    const float* const hidden = plane.hidden;
    const float* const own = plane.weights + (uint64_t{plane.layer} * plane.model_heads + plane.model_head) *
                                                 (2 * uint64_t{dim} + 1);
    double context = 0;
    for (uint64_t i = team.id(); i < uint64_t{plane.tokens} * dim; i += team.count()) {
      context += double{hidden[i]} * double{own[dim + i % dim]};
    }
    context = team.Sum(context) / plane.tokens + double{own[2 * uint64_t{dim}]};
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      const auto x = [&](uint32_t d) { return hidden[uint64_t{t} * dim + d]; };
      const float logit = ProductOf(team, own, x, dim);
      if (team.in_row() == 0) scores[t] = static_cast<float>(1 / (1 + exp(-(double{logit} + context))));
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_ATTENTION_GATE_H_
