// ChunkKV: another policy's scores as means over chunks of neighbouring tokens, so that spans of text stay whole.
//
// Every token of a chunk has the mean of the host's scores in it; the last chunk is as long as what is left. The mean
// over the heads of a layer comes after that, and is the same as before it. Of the chunk at the budget's edge the newest
// tokens stay: a budget of whole chunks cuts none, unless the last, shorter one stays. A sequence shorter than a chunk
// keeps the host's scores, as in kvpress. (ChunkKV, arXiv 2502.00299, section 3.2.)
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_CHUNKKV_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_CHUNKKV_H_

#include <cstdint>

#include "cuda/scorers/parts/policy.h"

namespace kvpool::scorers {

struct Chunkkv {
  enum : uint32_t { kHost, kChunkLength };
  static constexpr ParamFacts kParams[] = {
      {"host", ParamType::kChoice, 0, 0, 0, "",
       "the policy whose scores are averaged; its parameters as host.NAME"},
      {"chunk_length", ParamType::kInt, 20, 1, 65536, "", "tokens of a chunk"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "chunkkv",
      .title = "ChunkKV",
      .source = "arXiv 2502.00299, NeurIPS 2025",
      .description =
          "Another policy's scores as means over chunks of neighbouring tokens, so that spans of text stay "
          "whole. Of the chunk at the budget's edge the newest tokens stay.",
      .needs = kNeedHost,
      .params = kParams,
      .default_host = "snapkv",
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t tokens = plane.tokens;
    const uint32_t length = tokens < params.Int(kChunkLength) ? 1 : params.Int(kChunkLength);
    const uint32_t chunks = (tokens + length - 1) / length;
    for (uint32_t chunk = team.row(); chunk < chunks; chunk += team.rows()) {
      const uint32_t first = chunk * length;
      const uint32_t end = tokens - first < length ? tokens : first + length;
      double sum = 0;
      uint32_t counted = 0;
      for (uint32_t t = first + team.in_row(); t < end; t += team.row_width()) {
        if (plane.host[t] != plane.host[t]) continue;
        sum += double{plane.host[t]};
        ++counted;
      }
      sum = team.RowSum(sum);
      counted = team.RowSum(counted);
      const float mean = static_cast<float>(sum / counted);
      // A token that is not a number leaves alone, not with its chunk.
      for (uint32_t t = first + team.in_row(); t < end; t += team.row_width()) {
        scores[t] = plane.host[t] != plane.host[t] ? plane.host[t] : mean;
      }
    }
  }
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_CHUNKKV_H_
