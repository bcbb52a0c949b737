// TriAttention: keeps the keys that the head's mean query will attend to from positions to come.
//
// RoPE turns the pair f of a query's elements at position t by the angle t w_f, as it has turned the cached key's. With
// pairs as complex numbers q_f and k_f, means over a calibration's queries and over offsets o, RoPE's scale s, and the
// position p of the newest token:
//
//   score = sum_f Re(s^2 mean_o(exp(i (p + o) w_f)) mean(q_f) conj(k_f)) + sum_f s^2 (mean |q_f| - |mean q_f|) |k_f|
//         = sum_f Re(a_f exp(i p w_f) conj(k_f))                        + sum_f c_f |k_f|
//
// which is then brought to mean 0 and deviation 1 over the tokens (normalise), so that heads weigh alike. The position
// is Signals::now; where that is 0, the number of tokens says it, which holds until a token was dropped. The weights are
//
//   [layer][kv head][real part of a, imaginary part of a, c], then the w: k_head_dim / 2 floats each
//
// a and c are means over the query heads that read the kv head, as the authors' vLLM plug-in has it. Their maximum over
// offsets is not a sum of this form. `kvpool-lab calibrate` makes the weights.
#ifndef KVPOOL_CUDA_SCORERS_POLICIES_TRIATTENTION_H_
#define KVPOOL_CUDA_SCORERS_POLICIES_TRIATTENTION_H_

#include <cmath>
#include <cstdint>

#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/normalise.h"
#include "cuda/scorers/parts/policy.h"
#include "cuda/scorers/parts/rotation.h"
#include "cuda/scorers/parts/team.h"

namespace kvpool::scorers {

struct Triattention {
  enum : uint32_t { kPairing, kNormalise, kRecent };
  static constexpr ParamFacts kParams[] = {
      {"pairing", ParamType::kChoice, 0, 0, 1, "half|interleaved",
       "the elements that RoPE turns together: f and f + d/2, or 2f and 2f + 1"},
      {"normalise", ParamType::kBool, 1, 0, 1, "", "to mean 0 and deviation 1 over the tokens of a head"},
      {"recent", ParamType::kInt, 128, 0, 1 << 20, "",
       "most recent tokens that stay; at most half the budget"},
  };
  static constexpr PolicyFacts kFacts = {
      .name = "triattention",
      .title = "TriAttention",
      .source = "arXiv 2604.04921",
      .description =
          "Keeps the keys that the head's mean query will attend to from positions to come: one pass over K "
          "with calibrated vectors of each head (kvpool-lab calibrate), which RoPE's frequencies carry to "
          "the "
          "position.",
      .needs = kNeedKeys | kNeedWeights,
      .params = kParams,
      .protect = [](const Params& params, const KvShape& shape, uint32_t budget_tokens) -> Protection {
        const uint32_t recent = params.Int(kRecent), half = budget_tokens / 2;
        return {.last_tokens = recent < half ? recent : half};
      },
      .weight_count = [](const Params& params, const KvShape& shape, uint32_t hidden_dim, uint64_t given)
          -> uint64_t { return (3 * uint64_t{shape.planes()} + 1) * (shape.k_head_dim / 2); },
  };

  template <typename Team>
  KVPOOL_HOST_DEVICE static void Score(const Team& team, const Plane& plane, const Params& params,
                                       float* scores) {
    const uint32_t pairs = plane.kv->shape.k_head_dim / 2;
    const uint64_t planes = uint64_t{plane.layers} * plane.model_heads;
    const float* const own =
        plane.weights + 3 * pairs * (uint64_t{plane.layer} * plane.model_heads + plane.model_head);
    const float* const frequencies = plane.weights + 3 * pairs * planes;
    float* const turned = plane.scratch + uint64_t{kScratchRows} * plane.tokens;
    const float now = plane.signals->now;
    const double position = now > 0 ? double{now} : static_cast<double>(plane.tokens - 1);
    for (uint32_t f = team.id(); f < pairs; f += team.count()) {
      const double real = double{own[f]}, imaginary = double{own[pairs + f]};
      const Rotation by = RotationOf(position * double{frequencies[f]});
      turned[f] = static_cast<float>(real * by.cos - imaginary * by.sin);
      turned[pairs + f] = static_cast<float>(real * by.sin + imaginary * by.cos);
    }
    team.Sync();
    const bool half = params.Is(kPairing, 0);
    WithDtype(plane.kv->dtype, KeysOfType<Team>{team, plane, half, turned, own + 2 * pairs, scores});
    team.Sync();
    if (params.Is(kNormalise, 1)) Normalise(team, 0, plane.tokens, scores);
  }

 private:
  template <typename Team>
  struct KeysOfType {
    const Team& team;
    const Plane& plane;
    bool half;
    const float* turned;
    const float* of_length;
    float* scores;

    // Row teams take four tokens at once, whose loads overlap; past the last token that is loaded again.
    template <KvDtype dtype>
    KVPOOL_HOST_DEVICE void Run() const {
      constexpr uint32_t kAtOnce = 4;
      using Storage = typename Element<dtype>::Storage;
      const KvView& kv = *plane.kv;
      const uint32_t pairs = kv.shape.k_head_dim / 2;
      const uint64_t stride = kv.k.dim_stride_bytes;
      const uint64_t partner = half ? pairs * stride : stride;
      for (uint32_t base = team.row() * kAtOnce; base < plane.tokens; base += team.rows() * kAtOnce) {
        const unsigned char* rows[kAtOnce];
        KVPOOL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint32_t token = base + i < plane.tokens ? base + i : plane.tokens - 1;
          rows[i] = kv.KeyRow(plane.layer, plane.head, token);
        }
        float sums[kAtOnce] = {};
        for (uint32_t f = team.in_row(); f < pairs; f += team.row_width()) {
          const uint64_t at = (half ? f : 2 * f) * stride;
          const float by_real = turned[f], by_imaginary = turned[pairs + f], by_length = of_length[f];
          KVPOOL_UNROLL
          for (uint32_t i = 0; i < kAtOnce; ++i) {
            const float real = Element<dtype>::Load(*reinterpret_cast<const Storage*>(rows[i] + at));
            const float imaginary =
                Element<dtype>::Load(*reinterpret_cast<const Storage*>(rows[i] + at + partner));
            sums[i] += by_real * real + by_imaginary * imaginary +
                       by_length * sqrtf(real * real + imaginary * imaginary);
          }
        }
        KVPOOL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const float sum = team.RowSum(sums[i]);
          if (team.in_row() == 0 && base + i < plane.tokens) scores[base + i] = sum;
        }
      }
    }
  };
};

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_POLICIES_TRIATTENTION_H_
