// SnapKV: keeps the tokens that the last prompt queries attend, with their neighbours, and the window itself.
//
// The score is softmax(Q K / sqrt d), causal inside the window: its mean over the window's queries and over
// the GQA group, pooled over tokens.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_SNAPKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_SNAPKV_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/pooling.h"

namespace kvpool::scorers {

struct Snapkv {
  enum : uint32_t { kPooling, kKernel };
  static constexpr ParamFacts kParams[] = {
      {"pool", ParamType::kChoice, 0, 0, 2, "avg|max|none", "how neighbours are pooled"},
      {"kernel", ParamType::kInt, 5, 1, 255, "odd", "tokens pooled"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "snapkv",
      .title = "SnapKV",
      .source = "arXiv 2404.14469",
      .description =
          "Once after prefill: keeps what a window of the last prompt queries attends, pooled over "
          "neighbouring tokens so that spans stay whole, and the window itself.",
      .needs = kNeedWindowMean,
      .params = kParams,
      .protect_window = true,
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    PoolBeforeWindow(team, static_cast<Pooling>(params.Int(kPooling)), params.Int(kKernel), plane.window_mean,
                     plane.window_tokens, plane.tokens, scores);
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_SNAPKV_H_
