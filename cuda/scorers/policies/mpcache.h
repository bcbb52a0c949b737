// MPCache: static classes from the prompt's last queries, and a bound per block for the newest query.
//
// stage=static: three classes by the mean attention of the window.
//
//   class   tokens                   score          meaning
//   UIA     lowest `discard` share   below 1        leaves at once
//   IC      the others               1 to below 2   candidate
//   IA      highest `keep` share     2 and more     always stays
//
// stage=dynamic: every token has its block's bound. A block's keys lie element by element between its key_min
// and its key_max, so that q.k of any of them is at most sum max(q key_min, q key_max). bound=linear takes a
// mix of the two in place of the maximum, which needs no comparison.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_MPCACHE_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_MPCACHE_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Mpcache {
  enum : uint32_t { kStage, kDiscard, kKeep, kBound, kMix, kCoarse, kCoarseKeep };
  static constexpr ParamFacts kParams[] = {
      {"stage", ParamType::kChoice, 0, 0, 1, "static|dynamic",
       "classes of a prompt, or bounds for the newest query"},
      {"discard", ParamType::kFloat, 0.6f, 0, 1, "", "share of tokens that are UIA"},
      {"keep", ParamType::kFloat, 0.1f, 0, 1, "", "share of tokens that are IA"},
      {"bound", ParamType::kChoice, 0, 0, 1, "upper|linear", "of a block"},
      {"mix", ParamType::kFloat, 0.6f, 0, 1, "", "of the linear bound: share of the greatest"},
      {"coarse", ParamType::kInt, 1, 1, 4096, "", "blocks of a big cluster; 1: one level"},
      {"coarse_keep", ParamType::kFloat, 0.5f, 0, 1, "", "share of big clusters whose blocks are looked at"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "mpcache",
      .title = "MPCache",
      .source = "arXiv 2501.06807, NeurIPS 2025",
      .description =
          "Static: three classes by the attention of the prompt's last queries (UIA leaves, IA stays, IC are "
          "candidates). Dynamic: an upper bound of the newest query's logits per block, from each block's "
          "least and greatest key elements. The paper's last 20 % of a prompt are at most the 1,024 queries "
          "of a window, and layers share no choice of blocks.",
      .params = kParams,
      .needs_with = [](const Params& params) -> Needs {
        return params.Is(kStage, 0) ? kNeedWindowMean : kNeedQueries | kNeedKeyBounds;
      },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    if (params.Is(kStage, 0)) {
      ScoreClasses(team, plane, params, scores);
    } else {
      ScoreBounds(team, plane, params, scores);
    }
  }

 private:
  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreClasses(const Team& team, const Plane& plane, const Params& params,
                                              float* scores) {
    const uint32_t n = plane.tokens;
    const uint32_t discarded = static_cast<uint32_t>(params[kDiscard] * static_cast<float>(n));
    const uint32_t kept = static_cast<uint32_t>(params[kKeep] * static_cast<float>(n));
    const auto key = [&](uint32_t i) { return OrderOf(plane.window_mean[i], i); };
    const uint64_t first_candidate = discarded < n ? KthLowest(team, n, discarded, key) : ~uint64_t{0};
    const uint64_t first_kept = kept > 0 && kept <= n ? KthLowest(team, n, n - kept, key) : ~uint64_t{0};
    for (uint32_t i = team.id(); i < n; i += team.count()) {
      const float attention = plane.window_mean[i];
      scores[i] = attention + (key(i) < first_candidate ? 0.0f : key(i) < first_kept ? 1.0f : 2.0f);
    }
  }

  // The bound over blocks [first_block, end_block), the mean over the group's newest queries.
  KVPOOL_HOST_DEVICE static float Bound(const Plane& plane, const Params& params, uint32_t first_block,
                                        uint32_t end_block) {
    const uint32_t dim = plane.kv->k.head_dim;
    double bound = 0;
    for (uint32_t g = 0; g < plane.group; ++g) {
      const float* const query =
          plane.queries + (uint64_t{g} * plane.window_queries + plane.window_queries - 1) * dim;
      for (uint32_t d = 0; d < dim; ++d) {
        float least = INFINITY, greatest = -INFINITY;
        for (uint32_t block = first_block; block < end_block; ++block) {
          least = LesserOf(least, plane.KeyMin(block)[d]);
          greatest = GreaterOf(greatest, plane.KeyMax(block)[d]);
        }
        const float high = params.Is(kBound, 0)
                               ? GreaterOf(query[d] * greatest, query[d] * least)
                               : query[d] * (params[kMix] * greatest + (1 - params[kMix]) * least);
        bound += double{high};
      }
    }
    return static_cast<float>(bound / plane.group);
  }

  template <typename Team>
  KVPOOL_HOST_DEVICE static void ScoreBounds(const Team& team, const Plane& plane, const Params& params,
                                             float* scores) {
    const uint32_t blocks = plane.kv->shape.blocks();
    const uint32_t coarse = params.Int(kCoarse);
    const uint32_t clusters = (blocks + coarse - 1) / coarse;
    const uint32_t looked_at =
        clusters - static_cast<uint32_t>(static_cast<float>(clusters) * (1 - params[kCoarseKeep]));
    float* const of_cluster = plane.scratch;
    uint64_t first_winner = 0;
    if (coarse > 1) {
      for (uint32_t i = team.id(); i < clusters; i += team.count()) {
        const uint32_t end = (i + 1) * coarse < blocks ? (i + 1) * coarse : blocks;
        of_cluster[i] = Bound(plane, params, i * coarse, end);
      }
      team.Sync();
      const auto key = [&](uint32_t i) { return OrderOf(of_cluster[i], i); };
      first_winner = looked_at > 0 ? KthLowest(team, clusters, clusters - looked_at, key) : ~uint64_t{0};
    }
    for (uint32_t block = team.id(); block < blocks; block += team.count()) {
      const bool lost = coarse > 1 && OrderOf(of_cluster[block / coarse], block / coarse) < first_winner;
      const float bound = lost ? -3.0e38f : Bound(plane, params, block, block + 1);
      const uint32_t first = block * plane.tokens_per_block;
      for (uint32_t t = 0; t < plane.kv->shape.TokensOf(block); ++t) scores[first + t] = bound;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_MPCACHE_H_
