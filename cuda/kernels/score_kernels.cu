// The device side of the scorers: the bodies of cuda/scorers on teams of one thread block each. Names are C names: the
// driver finds kernels by them. Grids: one block a plane (x), unless said otherwise.
#include "cuda/kernels/cuda_team.h"
#include "cuda/scorers/context.h"
#include "cuda/scorers/features.h"
#include "cuda/scorers/gather_rows.h"
#include "cuda/scorers/reduce.h"
#include "cuda/scorers/window.h"
#include "kvpool_policies/all.h"

namespace kvpool::scorers {

// One kernel a type: each keeps to the registers it needs.
#define KVPOOL_FOR_EACH_DTYPE(X) \
  X(f32, KvDtype::kF32)          \
  X(f16, KvDtype::kF16)          \
  X(bf16, KvDtype::kBf16)        \
  X(fp8_e4m3, KvDtype::kFp8E4m3) \
  X(fp8_e5m2, KvDtype::kFp8E5m2)

// x: block of the sequence, from `first`; y: layer.
#define KVPOOL_TYPED_KERNELS(name, dtype)                                                                    \
  extern "C" __global__ void kvpool_score_records_##name(const __grid_constant__ KvView kv,                  \
                                                         const __grid_constant__ RecordLayout at,            \
                                                         uint32_t first, float* const* records) {            \
    RecordOfLayer<dtype>(CudaTeam(), kv, at, first + blockIdx.x, blockIdx.y, records[blockIdx.x]);           \
  }                                                                                                          \
  extern "C" __global__ void kvpool_score_anchor_dots_##name(const __grid_constant__ ScoreContext context) { \
    AnchorDots<dtype>(CudaTeam(), context, blockIdx.x);                                                      \
  }                                                                                                          \
  extern "C" __global__ void kvpool_score_window_lse_##name(const __grid_constant__ ScoreContext context) {  \
    WindowLse<dtype>(CudaTeam(), context, blockIdx.x);                                                       \
  }                                                                                                          \
  extern "C" __global__ void kvpool_score_window_##name(const __grid_constant__ ScoreContext context) {      \
    WindowStatistics<dtype>(CudaTeam(), context, blockIdx.x);                                                \
  }
KVPOOL_FOR_EACH_DTYPE(KVPOOL_TYPED_KERNELS)

extern "C" __global__ void kvpool_score_unpack(const __grid_constant__ ScoreContext context) {
  UnpackPlane(CudaTeam(), context, blockIdx.x);
}

extern "C" __global__ void kvpool_score_queries(const __grid_constant__ ScoreContext context) {
  LoadQueries(CudaTeam(), context, blockIdx.x);
}

// x: a share of the packs.
extern "C" __global__ void kvpool_score_reduce_planes(const __grid_constant__ PlaneReductions reductions) {
  const uint64_t packs = (reductions.items + kPack - 1) / kPack;
  const uint64_t share = (packs + gridDim.x - 1) / gridDim.x;
  const uint64_t begin = blockIdx.x * share;
  ReducePlanes(CudaTeam(), reductions, begin, begin + share < packs ? begin + share : packs);
}

// x: row.
extern "C" __global__ void kvpool_score_reduce_tokens(const __grid_constant__ KvShape shape,
                                                      TokenReduction over_tokens, const float* token_scores,
                                                      float* block_scores) {
  ReduceTokens(CudaTeam(), shape, over_tokens, token_scores + uint64_t{blockIdx.x} * shape.tokens,
               block_scores + uint64_t{blockIdx.x} * shape.blocks());
}

// x: destination block; y: layer.
extern "C" __global__ void kvpool_score_gather(const __grid_constant__ GatherRequest request) {
  GatherLayer(CudaTeam(), request, blockIdx.x, blockIdx.y);
}

#define KVPOOL_POLICY_KERNEL(Policy)                                                                       \
  extern "C" __global__ void kvpool_score_##Policy(const __grid_constant__ ScoreContext context,           \
                                                   const __grid_constant__ Params params, float* scores) { \
    Policy::Score(CudaTeam(), context.At(blockIdx.x, blockIdx.x), params,                                  \
                  scores + uint64_t{blockIdx.x} * context.shape().tokens);                                 \
  }
KVPOOL_POLICIES(KVPOOL_POLICY_KERNEL)

// x: planes [x * planes_each, …) of policies with a block form of their own; nothing for the others.
template <typename Policy>
__device__ void OwnBlocks(const ScoreContext& context, uint32_t planes_each, const Params& params,
                          float* block_scores) {
  if constexpr (requires { &Policy::template ScoreBlocks<CudaTeam>; }) {
    Policy::ScoreBlocks(CudaTeam(), context, {blockIdx.x * planes_each, planes_each}, blockIdx.x, params,
                        block_scores + uint64_t{blockIdx.x} * context.shape().blocks());
  }
}

#define KVPOOL_BLOCKS_KERNEL(Policy)                                      \
  extern "C" __global__ void kvpool_score_blocks_##Policy(                \
      const __grid_constant__ ScoreContext context, uint32_t planes_each, \
      const __grid_constant__ Params params, float* block_scores) {       \
    OwnBlocks<Policy>(context, planes_each, params, block_scores);        \
  }
KVPOOL_POLICIES(KVPOOL_BLOCKS_KERNEL)

}  // namespace kvpool::scorers
