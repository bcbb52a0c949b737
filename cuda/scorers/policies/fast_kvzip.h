// Fast KVzip: KVzip's score of a token, foreseen from hidden states by a small gate for each layer: the share that the
// token's key would have of the attention of its own queries, against keys that stand for the rest of any sequence.
//
//   q_g    = query_norm * Q_g x + c_g, after division by its root mean square, for each query head g of the kv head
//   k      = key_norm * K x, likewise
//   score  = mean over g of 1 / (1 + sum_s exp(base_s . q_g / sqrt e - (k . q_g / sqrt e + b_g)))
//
// x is what enters the layer's attention, behind its first norm. e is the gate's dim, at most 16, and there are `bases`
// keys base_s. The weights are those of the authors' layers one behind the other, each in the order of its state_dict:
// base [kv head][bases][e], b [kv head][query head], Q [kv head][query head][e][hidden_dim], c [kv head][query head][e],
// K [kv head][e][hidden_dim], query_norm [e], key_norm [e]. (arXiv 2601.17668; kvpress's FastKVzipPress.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_FAST_KVZIP_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_FAST_KVZIP_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/token_network.h"

namespace kvpool::scorers {

// Weights of a layer's gate beside those of its query heads, and those of a query head, with vectors of `dim` elements.
KVPOOL_HOST_DEVICE constexpr uint64_t GateFloats(uint64_t dim, uint64_t bases, uint64_t heads,
                                                 uint64_t hidden_dim) {
  return heads * dim * (bases + hidden_dim) + 2 * dim;
}
KVPOOL_HOST_DEVICE constexpr uint64_t GateFloatsOfQueryHead(uint64_t dim, uint64_t hidden_dim) {
  return 1 + dim * (hidden_dim + 1);
}

struct FastKvzip {
  enum : uint32_t { kDim, kBases, kSinks, kRecent };
  // A lane of the host holds a whole vector of the gate.
  static constexpr uint32_t kMostDim = 16;
  static constexpr ParamFacts kParams[] = {
      {"dim", ParamType::kInt, kMostDim, 1, kMostDim, "", "elements of the gate's queries and keys"},
      {"bases", ParamType::kInt, 16, 0, 64, "", "keys of the gate that a token's is compared with"},
      {"sinks", ParamType::kInt, 4, 0, 1 << 20, "", "tokens at the start that stay"},
      {"recent", ParamType::kInt, -1, -1, 1 << 20, "",
       "most recent tokens that stay, at most half the budget; -1: 2 % of less than 32,000, else 4,096"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "fast_kvzip",
      .title = "Fast KVzip",
      .source = "arXiv 2601.17668; FastKVzipPress of kvpress",
      .description =
          "Keeps what KVzip would, as a small gate for each layer foresees it from hidden states behind the "
          "layer's first norm, with weights from a file; sinks and a recent window.",
      .needs = kNeedHidden | kNeedWeights,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        const uint32_t share = shape.tokens < 32000 ? shape.tokens / 50 : 4096;
        const uint32_t recent = params[kRecent] < 0 ? (share > 1 ? share : 1) : params.Int(kRecent);
        return {.first_tokens = params.Int(kSinks),
                .last_tokens = recent < budget_tokens / 2 ? recent : budget_tokens / 2};
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim,
                         uint64_t given) -> uint64_t {
        // Those of the least number of query heads that makes it `given` or more.
        constexpr uint64_t kMostGroup = 128;
        const uint64_t fixed = GateFloats(params.Int(kDim), params.Int(kBases), shape.kv_heads, hidden_dim);
        const uint64_t one = shape.kv_heads * GateFloatsOfQueryHead(params.Int(kDim), hidden_dim);
        const uint64_t of_layer = (given + shape.layers - 1) / shape.layers;
        const uint64_t group = of_layer > fixed + one ? (of_layer - fixed + one - 1) / one : 1;
        return shape.layers * (fixed + (group < kMostGroup ? group : kMostGroup) * one);
      },
      // Each token is multiplied with the weights of its head.
      .products = [](const Params& params, const KvShape& shape,
                     uint64_t weight_count) { return static_cast<double>(weight_count) / shape.planes(); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t hidden_dim = plane.signals->hidden_dim, dim = params.Int(kDim), bases = params.Int(kBases);
    const uint64_t heads = plane.model_heads, head = plane.model_head;
    const uint64_t of_layer = plane.signals->weight_count / plane.layers;
    const auto group = static_cast<uint32_t>((of_layer - GateFloats(dim, bases, heads, hidden_dim)) /
                                             (heads * GateFloatsOfQueryHead(dim, hidden_dim)));
    const float* const base = plane.weights + plane.layer * of_layer;
    const float* const b = base + heads * bases * dim;
    const float* const q = b + heads * group;
    const float* const c = q + heads * group * dim * hidden_dim;
    const float* const k = c + heads * group * dim;
    const float* const query_norm = k + heads * dim * hidden_dim;
    const float* const key_norm = query_norm + dim;
    const float root = sqrtf(static_cast<float>(dim));
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      const float* const x = plane.hidden + uint64_t{t} * hidden_dim;
      Parts<Team> key, query;
      Project(team, k + head * dim * hidden_dim, nullptr, key_norm, x, hidden_dim, dim, &key);
      double sum = 0;
      for (uint32_t g = 0; g < group; ++g) {
        const uint64_t of_query = head * group + g;
        Project(team, q + of_query * dim * hidden_dim, c + of_query * dim, query_norm, x, hidden_dim, dim,
                &query);
        float product = 0;
        KVPOOL_UNROLL
        for (uint32_t j = 0; j < Team::kColumns; ++j) product += key.of[j] * query.of[j];
        const float logit = team.RowSum(product) / root + b[of_query];
        float rest = 1;
        for (uint32_t s = 0; s < bases; ++s) {
          const float* const other = base + (head * bases + s) * dim;
          product = 0;
          KVPOOL_UNROLL
          for (uint32_t j = 0; j < Team::kColumns; ++j) {
            const uint32_t i = team.in_row() + j * team.row_width();
            if (i < dim) product += other[i] * query.of[j];
          }
          rest += expf(team.RowSum(product) / root - logit);
        }
        sum += double{1 / rest};
      }
      if (team.in_row() == 0) scores[t] = static_cast<float>(sum / group);
    }
  }

 private:
  // A lane's elements of a vector of the gate: in_row() + j * row_width(). Those beyond its end are 0.
  template <typename Team>
  struct Parts {
    static_assert(Team::kColumns == 1 || Team::kColumns >= kMostDim);
    float of[Team::kColumns] = {};
  };

  // rows x + offsets, divided by its root mean square, times `norm`.
  template <typename Team>
  KVPOOL_HOST_DEVICE static void Project(const Team& team, const float* rows, const float* offsets,
                                         const float* norm, const float* x, uint32_t hidden_dim, uint32_t dim,
                                         Parts<Team>* parts) {
    constexpr float kLeastSquare = 1e-6f;  // Qwen3RMSNorm adds it to the mean square.
    float square = 0;
    for (uint32_t i = 0; i < dim; ++i) {
      const float element =
          ProductOf(
              team, rows + uint64_t{i} * hidden_dim, [&](uint32_t d) { return x[d]; }, hidden_dim) +
          (offsets == nullptr ? 0 : offsets[i]);
      square += element * element;
      KVPOOL_UNROLL
      for (uint32_t j = 0; j < Team::kColumns; ++j) {
        if (i == team.in_row() + j * team.row_width()) parts->of[j] = element * norm[i];
      }
    }
    const float over = 1 / sqrtf(square / static_cast<float>(dim) + kLeastSquare);
    KVPOOL_UNROLL
    for (uint32_t j = 0; j < Team::kColumns; ++j) parts->of[j] *= over;
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_FAST_KVZIP_H_
