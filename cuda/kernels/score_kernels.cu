// The scorers' kernels: the bodies of cuda/scorers/parts and cuda/scorers/policies on teams of one thread
// block each. They have C names, by which the driver finds them. launch.h has the sizes of teams. "x" and "y"
// below are the grid's.
#include "cuda/kernels/cuda_logit_tile.h"
#include "cuda/kernels/cuda_team.h"
#include "cuda/kernels/launch.h"
#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/drift_rows.h"
#include "cuda/scorers/parts/features.h"
#include "cuda/scorers/parts/fold_rows.h"
#include "cuda/scorers/parts/gather_rows.h"
#include "cuda/scorers/parts/low_rows.h"
#include "cuda/scorers/parts/merge_rows.h"
#include "cuda/scorers/parts/reduce.h"
#include "cuda/scorers/parts/select_rows.h"
#include "cuda/scorers/parts/window.h"
#include "kvpool_policies/all.h"

namespace kvpool::scorers {
namespace {

__device__ BlockRange ShareOf(const PlaneShares& shares, const KvShape& shape) {
  const uint32_t begin = blockIdx.x % shares.shares * shares.blocks_each;
  const uint32_t end = begin + shares.blocks_each;
  return {begin, end < shape.blocks() ? end : shape.blocks()};
}

}  // namespace

// The arguments are the threads of a team and the least number of teams that an SM must hold: 1 where the
// default would make the assembler spill registers.
#define KVPOOL_KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

// One kernel for each type, so that each uses no more registers than it needs.
#define KVPOOL_FOR_EACH_DTYPE(X) \
  X(f32, KvDtype::kF32)          \
  X(f16, KvDtype::kF16)          \
  X(bf16, KvDtype::kBf16)        \
  X(fp8_e4m3, KvDtype::kFp8E4m3) \
  X(fp8_e5m2, KvDtype::kFp8E5m2)

// records: x: block of the sequence, from `first`; y: layer. anchor_dots: x: share of a plane. nearest: x: tile of a
// plane, whose tiles are neighbours. low: x: record, of which those of all planes are neighbours. fold: x: share of a plane,
// whose shares are neighbours. The others: x: plane.
#define KVPOOL_TYPED_KERNELS(name, dtype)                                                                  \
  KVPOOL_KERNEL(kBlockThreads, kRecordTeams)                                                               \
  kvpool_score_records_##name(const __grid_constant__ KvView kv, const __grid_constant__ RecordLayout at,  \
                              uint32_t first, float* const* records) {                                     \
    RecordOfLayer<dtype>(CudaTeam(), kv, at, first + blockIdx.x, blockIdx.y, records[first + blockIdx.x]); \
  }                                                                                                        \
  KVPOOL_KERNEL(kBlockThreads, kRecordTeams)                                                               \
  kvpool_score_anchor_dots_##name(const __grid_constant__ ScoreContext context,                            \
                                  const __grid_constant__ PlaneShares shares) {                            \
    AnchorDots<dtype>(CudaTeam(), context, blockIdx.x / shares.shares, ShareOf(shares, context.shape()));  \
  }                                                                                                        \
  KVPOOL_KERNEL(kPolicyThreads, 1)                                                                         \
  kvpool_score_window_lse_##name(const __grid_constant__ ScoreContext context) {                           \
    WindowLseByTiles<dtype>(context, blockIdx.x);                                                          \
  }                                                                                                        \
  KVPOOL_KERNEL(kPolicyThreads, 1)                                                                         \
  kvpool_score_window_##name(const __grid_constant__ ScoreContext context) {                               \
    WindowStatisticsByTiles<dtype>(context, blockIdx.x);                                                   \
  }                                                                                                        \
  KVPOOL_KERNEL(kBlockThreads, 1)                                                                          \
  kvpool_score_nearest_##name(const __grid_constant__ MergeContext context, uint32_t tiles) {              \
    __shared__ NearestTile tile;                                                                           \
    FindNearest<dtype>(CudaTeam(), context, blockIdx.x / tiles, blockIdx.x % tiles,                        \
                       NearestTile::TokensOf(context.request.gather.from.k.head_dim), &tile);              \
  }                                                                                                        \
  KVPOOL_KERNEL(kBlockThreads, 1)                                                                          \
  kvpool_score_low_##name(const __grid_constant__ LowRequest request) {                                    \
    __shared__ LowTile tile;                                                                               \
    const uint32_t planes = request.from.shape.planes();                                                   \
    LowRecord<dtype>(CudaTeam(), request, blockIdx.x / planes, blockIdx.x % planes, &tile);                \
  }                                                                                                        \
  KVPOOL_KERNEL(kBlockThreads, 1)                                                                          \
  kvpool_score_fold_##name(const __grid_constant__ FoldContext context) {                                  \
    __shared__ FoldTile tile;                                                                              \
    const uint32_t shares = context.shares();                                                              \
    FoldShare<dtype>(CudaTeam(), context, blockIdx.x / shares, blockIdx.x % shares, &tile);                \
  }
KVPOOL_FOR_EACH_DTYPE(KVPOOL_TYPED_KERNELS)

// x: share of a plane.
KVPOOL_KERNEL(kBlockThreads)
kvpool_score_unpack(const __grid_constant__ ScoreContext context,
                    const __grid_constant__ PlaneShares shares) {
  UnpackRecords(CudaTeam(), context, blockIdx.x / shares.shares, ShareOf(shares, context.shape()));
}

KVPOOL_KERNEL(kPlaneThreads) kvpool_score_anchors(const __grid_constant__ ScoreContext context) {
  MakeAnchor(CudaTeam(), context, blockIdx.x);
}

KVPOOL_KERNEL(kPlaneThreads) kvpool_score_queries(const __grid_constant__ ScoreContext context) {
  LoadQueries(CudaTeam(), context, blockIdx.x);
}

// x: pack; y: row, that of the first being given.
KVPOOL_KERNEL(kPlaneThreads)
kvpool_score_reduce_planes(const __grid_constant__ PlaneReductions of_first_row) {
  PlaneReductions reductions = of_first_row;
  reductions.first_layer += blockIdx.y;
  reductions.end_layer += blockIdx.y;
  reductions.row += blockIdx.y * reductions.items;
  ReducePlanes(CudaTeam(), reductions, blockIdx.x, blockIdx.x + 1);
}

// x: row; y: share of its blocks.
KVPOOL_KERNEL(kBlockThreads)
kvpool_score_reduce_tokens(const __grid_constant__ KvShape shape, TokenReduction over_tokens,
                           const float* token_scores, float* block_scores) {
  ReduceTokens(CudaTeam(), shape, over_tokens, token_scores + uint64_t{blockIdx.x} * shape.tokens,
               block_scores + uint64_t{blockIdx.x} * shape.blocks(), blockIdx.y, gridDim.y);
}

// x: destination block; y: layer.
KVPOOL_KERNEL(kBlockThreads) kvpool_score_gather(const __grid_constant__ GatherRequest request) {
  GatherLayer(CudaTeam(), request, blockIdx.x, blockIdx.y);
}

// x: source block; y: layer.
KVPOOL_KERNEL(kBlockThreads, 1) kvpool_score_merge_norms(const __grid_constant__ MergeContext context) {
  MergeNorms(CudaTeam(), context, blockIdx.x, blockIdx.y);
}
// x: plane.
KVPOOL_KERNEL(kBlockThreads, 1) kvpool_score_link(const __grid_constant__ MergeContext context) {
  LinkMerged(CudaTeam(), context, blockIdx.x);
}
// x: destination block; y: layer.
KVPOOL_KERNEL(kBlockThreads, 1) kvpool_score_merge(const __grid_constant__ MergeContext context) {
  MergeLayer(CudaTeam(), context, blockIdx.x, blockIdx.y);
}
// x: plane.
KVPOOL_KERNEL(kBlockThreads, 1) kvpool_score_sum_folds(const __grid_constant__ FoldContext context) {
  SumFolds(CudaTeam(), context, blockIdx.x);
}

// x: share of a row's tokens, of so many rows from the first on; a row's shares are neighbours.
KVPOOL_KERNEL(kBlockThreads, 1)
kvpool_score_drift_logits(const __grid_constant__ DriftContext context, uint32_t first_row, uint32_t shares) {
  const uint32_t begin = blockIdx.x % shares * kDriftTokens;
  DriftLogits(CudaTeam(), context, first_row, blockIdx.x / shares, begin, begin + kDriftTokens);
}
// x: row, of those from the first on.
KVPOOL_KERNEL(kBlockThreads, 1)
kvpool_score_drift_outputs(const __grid_constant__ DriftContext context, uint32_t first_row) {
  DriftOutputs(CudaTeam(), context, first_row, blockIdx.x);
}

// x: piece.
KVPOOL_KERNEL(kBlockThreads) kvpool_score_copy_pieces(const PieceCopy* pieces) {
  CopyPiece(CudaTeam(), pieces[blockIdx.x]);
}

// Three kernels with x: tile of a row; a row's tiles are neighbours.
KVPOOL_KERNEL(kBlockThreads)
kvpool_score_count_digits(const __grid_constant__ SelectRequest request, uint32_t pass) {
  __shared__ uint32_t bins[kDigits];
  CountDigits(CudaTeam(), request, pass, blockIdx.x / request.tiles(), blockIdx.x % request.tiles(), bins);
}
KVPOOL_KERNEL(kBlockThreads) kvpool_score_count_tile(const __grid_constant__ SelectRequest request) {
  __shared__ uint32_t bins[kDigits];
  CountTile(CudaTeam(), request, blockIdx.x / request.tiles(), blockIdx.x % request.tiles(), bins);
}
KVPOOL_KERNEL(kBlockThreads) kvpool_score_victims(const __grid_constant__ SelectRequest request) {
  WriteVictims(CudaTeam(), request, blockIdx.x / request.tiles(), blockIdx.x % request.tiles());
}

// x: plane.
#define KVPOOL_POLICY_KERNEL(Policy)                                                                         \
  KVPOOL_KERNEL(kPolicyThreads, 1)                                                                           \
  kvpool_score_##Policy(const __grid_constant__ ScoreContext context, const __grid_constant__ Params params, \
                        float* scores) {                                                                     \
    Policy::Score(CudaTeam(), context.At(blockIdx.x, blockIdx.x), params,                                    \
                  scores + uint64_t{blockIdx.x} * context.shape().tokens);                                   \
  }
KVPOOL_POLICIES(KVPOOL_POLICY_KERNEL)

// x: planes [x * planes_each, …). For policies with a block form of their own, which registry.list says: nvcc 13 takes
// `requires { &Policy::template ScoreBlocks<CudaTeam>; }` for false where it is true.
#define KVPOOL_BLOCKS_KERNEL(Policy)                                                                      \
  KVPOOL_KERNEL(kPolicyThreads, 1)                                                                        \
  kvpool_score_blocks_##Policy(const __grid_constant__ ScoreContext context, uint32_t planes_each,        \
                               const __grid_constant__ Params params, float* block_scores) {              \
    Policy::ScoreBlocks(CudaTeam(), context, {blockIdx.x * planes_each, planes_each}, blockIdx.x, params, \
                        block_scores + uint64_t{blockIdx.x} * context.shape().blocks());                  \
  }
KVPOOL_BLOCK_POLICIES(KVPOOL_BLOCKS_KERNEL)

}  // namespace kvpool::scorers
