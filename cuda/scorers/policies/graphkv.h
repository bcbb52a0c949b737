// GraphKV: a token whose key resembles an important token's key matters less.
//
// Host scores are raised to 0 or more. Then the most important token is taken as a source, again and again:
// its own score is fixed, and every other token's, sources aside, is multiplied by 1 - relu(cos(k, source)).
// mode=all takes all sources at once, for comparison: two duplicates then wipe each other out.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_GRAPHKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_GRAPHKV_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/host_scores.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Graphkv {
  enum : uint32_t { kHost, kSources, kRounds, kMode };
  static constexpr ParamFacts kParams[] = {
      {"host", ParamType::kChoice, 0, 0, 0, "",
       "the policy whose scores spread; its parameters as host.NAME"},
      {"sources", ParamType::kInt, 32, 1, 65536, "", "tokens whose neighbours decay, each round"},
      {"rounds", ParamType::kInt, 1, 1, 64, "", "how often"},
      {"mode", ParamType::kChoice, 0, 0, 1, "sequential|all", "sources one by one, or the top ones at once"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "graphkv",
      .title = "GraphKV",
      .source = "arXiv 2509.00388, EMNLP 2025",
      .description =
          "Another policy's scores, decayed near the most important tokens by the cosine of keys, so that "
          "what stays is important and diverse.",
      .needs = kNeedHost | kNeedKeys | kNeedNorms,
      .params = kParams,
      .default_host = "snapkv",
      .products =
          [](const Params& params, const KvShape& shape, uint64_t weight_count) {
            const uint32_t sources =
                params.Int(kSources) < shape.tokens ? params.Int(kSources) : shape.tokens;
            return double{params[kRounds]} * sources * shape.k_head_dim;
          },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    CopyNonNegative(team, plane.host, plane.tokens, scores);
    float* const is_source = plane.scratch;
    float* const before = plane.scratch + plane.tokens;
    float* const source_key = plane.scratch + uint64_t{kScratchRows} * plane.tokens;
    const bool sequential = params.Is(kMode, 0);
    for (uint32_t round = 0; round < params.Int(kRounds); ++round) {
      for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
        is_source[i] = 0;
        before[i] = scores[i];
      }
      team.Sync();
      for (uint32_t taken = 0; taken < params.Int(kSources) && taken < plane.tokens; ++taken) {
        const uint32_t source = Best(team, plane.tokens, is_source, sequential ? scores : before);
        if (source >= plane.tokens) break;
        team.Sync();
        if (team.id() == 0) is_source[source] = 1;
        LoadKey(team, plane, source, source_key);
        team.Sync();
        Decay(team, plane, source, source_key, sequential ? is_source : nullptr, scores);
        team.Sync();
      }
    }
  }

 private:
  // The token of the highest score that is no source yet, the oldest of several; plane.tokens if there
  // is none.
  template <typename Team>
  KVPOOL_HOST_DEVICE static uint32_t Best(const Team& team, uint32_t tokens, const float* is_source,
                                          const float* scores) {
    float best = -INFINITY;
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      if (is_source[i] == 0 && scores[i] > best) best = scores[i];
    }
    best = team.Max(best);
    // Indices below 2^24 are exact as floats; PlanScore refuses longer sequences.
    float first = static_cast<float>(tokens);
    for (uint32_t i = team.id(); i < tokens; i += team.count()) {
      if (is_source[i] == 0 && scores[i] == best && static_cast<float>(i) < first)
        first = static_cast<float>(i);
    }
    return static_cast<uint32_t>(team.Min(first));
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void LoadKey(const Team& team, const Plane& plane, uint32_t token, float* key) {
    const unsigned char* const row = plane.kv->KeyRow(plane.layer, plane.head, token);
    for (uint32_t d = team.id(); d < plane.kv->k.head_dim; d += team.count()) {
      key[d] = LoadElement(row + d * plane.kv->k.dim_stride_bytes, plane.kv->dtype);
    }
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Decay(const Team& team, const Plane& plane, uint32_t source,
                                       const float* source_key, const float* fixed, float* scores) {
    for (uint32_t t = team.row(); t < plane.tokens; t += team.rows()) {
      if (t == source || (fixed != nullptr && fixed[t] != 0)) continue;
      const float dot = SumOverRow<RowOp::kProduct>(team, plane.kv->KeyRow(plane.layer, plane.head, t),
                                                    plane.kv->k, plane.kv->dtype, source_key);
      const float lengths = plane.k_norm[t] * plane.k_norm[source];
      const float cosine = lengths > 0 ? dot / lengths : 0;
      if (team.in_row() == 0 && cosine > 0) scores[t] *= cosine < 1 ? 1 - cosine : 0;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_GRAPHKV_H_
