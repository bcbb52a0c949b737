// A baseline: a token's score depends on the seed and its index alone, and is the same in all heads
// and layers.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_RANDOM_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_RANDOM_H_

#include <cstdint>

#include "cuda/base/stamp.h"
#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Random {
  enum : uint32_t { kSeed };
  static constexpr ParamFacts kParams[] = {
      {"seed", ParamType::kInt, 0, 0, 1 << 24, "", "of the sequence of scores"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "random",
      .title = "Random",
      .source = "baseline",
      .description = "Seeded random scores, the same for all heads and layers: what any policy must beat.",
      .params = kParams,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    for (uint32_t i = team.id(); i < plane.tokens; i += team.count()) {
      const uint64_t bits = MixBits(MixBits(static_cast<uint64_t>(params[kSeed])) + i + 1);
      scores[i] = static_cast<float>(bits >> 40) * 0x1p-24f;
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_RANDOM_H_
