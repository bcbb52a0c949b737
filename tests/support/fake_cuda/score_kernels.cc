// The kernels of the scorers, as the fake driver runs them: each thread block is one lane, the host's team,
// and they come one after the other.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

#include "cuda/kernels/launch.h"
#include "cuda/scorers/host/host_logit_tile.h"
#include "cuda/scorers/host/host_team.h"
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
#include "tests/support/fake_cuda/kernels.h"

namespace kvpool::fake {
namespace {

using namespace kvpool::scorers;  // NOLINT: the kernels' own names

struct ThreadBlock {
  uint32_t x, y;
  Grid grid;
};

// A kernel: its memory must be mapped (kReaches), then kBody runs for each thread block.
template <auto kReaches, auto kBody, typename... Args>
Work Bind(const Grid& grid, void** arguments) {
  const auto copied = [&]<size_t... i>(std::index_sequence<i...>) {
    return std::tuple<Args...>(*static_cast<const Args*>(arguments[i])...);
  }
  (std::index_sequence_for<Args...>());
  return [grid, copied] {
    const auto run = [&grid](const Args&... args) {
      if (!kReaches(grid, args...)) return CUDA_ERROR_ILLEGAL_ADDRESS;
      for (uint32_t y = 0; y < grid.y; ++y) {
        for (uint32_t x = 0; x < grid.x; ++x) kBody(ThreadBlock{x, y, grid}, args...);
      }
      return CUDA_SUCCESS;
    };
    return std::apply(run, copied);
  };
}

// ------------------------------------------------------------------------------------------ what is mapped

template <typename T>
bool Reads(const T* array, uint64_t count) {
  return count == 0 || IsMapped(reinterpret_cast<uint64_t>(array), count * sizeof(T), PROT_READ);
}
template <typename T>
bool Writes(T* array, uint64_t count) {
  return count == 0 || IsMapped(reinterpret_cast<uint64_t>(array), count * sizeof(T), PROT_READ | PROT_WRITE);
}

bool ReachesPlane(const KvView& kv, const KvPlane& plane, uint64_t block, int protection) {
  if (plane.head_dim == 0) return true;
  const uint64_t extent = (kv.shape.layers - 1) * plane.layer_stride_bytes +
                          (kv.shape.tokens_per_block - 1) * plane.token_stride_bytes +
                          (kv.shape.kv_heads - 1) * plane.head_stride_bytes +
                          (plane.head_dim - 1) * plane.dim_stride_bytes + BytesOf(kv.dtype);
  return IsMapped(block + plane.offset_bytes, extent, protection);
}
bool ReachesBlocks(const KvView& kv, const uint64_t* blocks, uint32_t count, int protection) {
  if (!Reads(blocks, count)) return false;
  return std::all_of(blocks, blocks + count, [&](uint64_t block) {
    return ReachesPlane(kv, kv.k, block, protection) && ReachesPlane(kv, kv.v, block, protection);
  });
}
bool ReachesRecords(const RecordLayout& at, float* const* records, uint32_t count) {
  return Reads(records, count) &&
         std::all_of(records, records + count, [&](float* record) { return Writes(record, at.floats); });
}

bool ReachesWorkspace(const ScoreContext& c) {
  return Writes(c.plane_scores, uint64_t{c.shape().planes()} * c.shape().tokens) &&
         Writes(c.scratch, c.shape().planes() * c.scratch_floats);
}
bool ReachesKeys(const ScoreContext& c) {
  return ReachesWorkspace(c) && ReachesBlocks(c.kv, c.kv.blocks, c.shape().blocks(), PROT_READ);
}
bool ReachesSelection(const Grid&, const SelectRequest& r) {
  return Reads(r.scores, uint64_t{r.rows} * r.items) && Reads(r.marks, r.items) &&
         Writes(r.bins, uint64_t{r.rows} * kDigitPasses * kDigits) &&
         Writes(r.searches, uint64_t{r.rows} * (kDigitPasses + 1)) &&
         Writes(r.tile_counts, uint64_t{r.rows} * r.tiles()) && Writes(r.victims, uint64_t{r.rows} * r.count);
}

// --------------------------------------------------------------------------------------------- the kernels

BlockRange ShareOf(uint32_t x, const PlaneShares& shares, const KvShape& shape) {
  const uint32_t begin = x % shares.shares * shares.blocks_each;
  return {begin, std::min(begin + shares.blocks_each, shape.blocks())};
}

constexpr auto kOfContext = [](const Grid&, const ScoreContext& c) { return ReachesWorkspace(c); };
constexpr auto kOfKeys = [](const Grid&, const ScoreContext& c) { return ReachesKeys(c); };

template <KvDtype dtype>
constexpr auto kRecords =
    Bind<[](const Grid& grid, const KvView& kv, const RecordLayout& at, uint32_t first,
            float* const* records) {
      return ReachesBlocks(kv, kv.blocks, kv.shape.blocks(), PROT_READ) &&
             ReachesRecords(at, records + first, grid.x);
    },
         [](const ThreadBlock& b, const KvView& kv, const RecordLayout& at, uint32_t first,
            float* const* records) {
           RecordOfLayer<dtype>(HostTeam(), kv, at, first + b.x, b.y, records[first + b.x]);
         },
         KvView, RecordLayout, uint32_t, float* const*>;
template <KvDtype dtype>
constexpr auto kAnchorDots =
    Bind<[](const Grid&, const ScoreContext& c, const PlaneShares&) { return ReachesKeys(c); },
         [](const ThreadBlock& b, const ScoreContext& c, const PlaneShares& shares) {
           AnchorDots<dtype>(HostTeam(), c, b.x / shares.shares, ShareOf(b.x, shares, c.shape()));
         },
         ScoreContext, PlaneShares>;
template <KvDtype dtype>
constexpr auto kWindowLse = Bind<kOfKeys,
                                 [](const ThreadBlock& b, const ScoreContext& c) {
                                   WindowLse<HostLogitTile<dtype>>(HostTeam(), c, b.x);
                                 },
                                 ScoreContext>;
template <KvDtype dtype>
constexpr auto kWindow = Bind<kOfKeys,
                              [](const ThreadBlock& b, const ScoreContext& c) {
                                WindowStatistics<HostLogitTile<dtype>>(HostTeam(), c, b.x);
                              },
                              ScoreContext>;

constexpr auto kUnpack =
    Bind<[](const Grid&, const ScoreContext& c, const PlaneShares&) {
      return ReachesWorkspace(c) &&
             ReachesRecords(c.record, const_cast<float* const*>(c.records), c.shape().blocks());
    },
         [](const ThreadBlock& b, const ScoreContext& c, const PlaneShares& shares) {
           UnpackRecords(HostTeam(), c, b.x / shares.shares, ShareOf(b.x, shares, c.shape()));
         },
         ScoreContext, PlaneShares>;
constexpr auto kAnchors =
    Bind<kOfContext, [](const ThreadBlock& b, const ScoreContext& c) { MakeAnchor(HostTeam(), c, b.x); },
         ScoreContext>;
constexpr auto kQueries =
    Bind<[](const Grid&, const ScoreContext& c) {
      return Writes(c.queries, c.shape().planes() * c.QueryFloats()) &&
             Writes(c.query_peaks, uint64_t{c.shape().planes()} * c.WindowRows());
    },
         [](const ThreadBlock& b, const ScoreContext& c) { LoadQueries(HostTeam(), c, b.x); }, ScoreContext>;

// The grid is that of GPU teams, whose packs are smaller, so each takes a share of the host's packs.
constexpr auto kReducePlanes =
    Bind<[](const Grid& grid, const PlaneReductions& r) { return Writes(r.row, grid.y * r.items); },
         [](const ThreadBlock& b, const PlaneReductions& of_first_row) {
           PlaneReductions r = of_first_row;
           r.first_layer += b.y;
           r.end_layer += b.y;
           r.row += b.y * r.items;
           const uint64_t packs = PacksOf(HostTeam(), r.items);
           const uint64_t share = (packs + b.grid.x - 1) / b.grid.x;
           ReducePlanes(HostTeam(), r, std::min(packs, b.x * share), std::min(packs, (b.x + 1) * share));
         },
         PlaneReductions>;
constexpr auto kReduceTokens =
    Bind<[](const Grid& grid, const KvShape& shape, TokenReduction, const float* tokens, float* blocks) {
      return Reads(tokens, uint64_t{grid.x} * shape.tokens) &&
             Writes(blocks, uint64_t{grid.x} * shape.blocks());
    },
         [](const ThreadBlock& b, const KvShape& shape, TokenReduction over, const float* tokens,
            float* blocks) {
           ReduceTokens(HostTeam(), shape, over, tokens + uint64_t{b.x} * shape.tokens,
                        blocks + uint64_t{b.x} * shape.blocks(), b.y, b.grid.y);
         },
         KvShape, TokenReduction, const float*, float*>;

constexpr auto kGather =
    Bind<[](const Grid& grid, const GatherRequest& r) {
      return ReachesBlocks(r.from, r.from.blocks, r.from.shape.blocks(), PROT_READ) &&
             ReachesBlocks(r.from, r.to_blocks, grid.x, PROT_READ | PROT_WRITE);
    },
         [](const ThreadBlock& b, const GatherRequest& r) { GatherLayer(HostTeam(), r, b.x, b.y); },
         GatherRequest>;
bool ReachesMerge(const MergeContext& c) {
  const KvShape& shape = c.request.gather.from.shape;
  const uint64_t evicted = uint64_t{shape.planes()} * c.request.evicted_tokens;
  return ReachesBlocks(c.request.gather.from, c.request.gather.from.blocks, shape.blocks(), PROT_READ) &&
         Writes(c.norms, uint64_t{shape.planes()} * shape.tokens) && Writes(c.nearest, evicted) &&
         Writes(c.weights, evicted) && Writes(c.next, evicted) &&
         Writes(c.first, uint64_t{shape.planes()} * c.request.gather.kept_tokens) &&
         Writes(c.thresholds, shape.planes()) && Writes(c.merged, shape.planes());
}
constexpr auto kOfMerge = [](const Grid&, const MergeContext& c) { return ReachesMerge(c); };
constexpr auto kMergeNorms =
    Bind<kOfMerge, [](const ThreadBlock& b, const MergeContext& c) { MergeNorms(HostTeam(), c, b.x, b.y); },
         MergeContext>;
template <KvDtype dtype>
constexpr auto kNearest =
    Bind<[](const Grid&, const MergeContext& c, uint32_t) { return ReachesMerge(c); },
         [](const ThreadBlock& b, const MergeContext& c, uint32_t tiles) {
           NearestTile tile;
           FindNearest<dtype>(HostTeam(), c, b.x / tiles, b.x % tiles,
                              NearestTile::TokensOf(c.request.gather.from.k.head_dim), &tile);
         },
         MergeContext, uint32_t>;
constexpr auto kLink =
    Bind<kOfMerge, [](const ThreadBlock& b, const MergeContext& c) { LinkMerged(HostTeam(), c, b.x); },
         MergeContext>;
constexpr auto kMerge =
    Bind<[](const Grid& grid, const MergeContext& c) {
      return ReachesMerge(c) &&
             ReachesBlocks(c.request.gather.from, c.request.gather.to_blocks, grid.x, PROT_READ | PROT_WRITE);
    },
         [](const ThreadBlock& b, const MergeContext& c) { MergeLayer(HostTeam(), c, b.x, b.y); },
         MergeContext>;
bool ReachesFold(const FoldContext& c) {
  const uint64_t planes = c.request.from.shape.planes(), floats = c.request.StateFloats();
  return Writes(c.sums, planes * c.shares() * floats) && Writes(c.of_share, planes * c.shares()) &&
         Writes(c.folded, planes) && Writes(c.request.state, planes * floats) &&
         (c.request.before == nullptr || Reads(c.request.before, planes * floats));
}
template <KvDtype dtype>
constexpr auto kFold = Bind<[](const Grid&, const FoldContext& c) {
  const FoldRequest& r = c.request;
  const KvShape& shape = r.from.shape;
  return ReachesFold(c) && ReachesBlocks(r.from, r.from.blocks, shape.blocks(), PROT_READ) &&
         Reads(r.evicted, (shape.layers - 1) * r.evicted_layer_stride +
                              (shape.kv_heads - 1) * r.evicted_head_stride + r.evicted_tokens) &&
         Reads(r.weights, (shape.layers - 1) * r.weights_layer_stride +
                              (shape.kv_heads - 1) * r.weights_head_stride + r.WeightFloats());
},
                            [](const ThreadBlock& b, const FoldContext& c) {
                              FoldTile tile;
                              FoldShare<dtype>(HostTeam(), c, b.x / c.shares(), b.x % c.shares(), &tile);
                            },
                            FoldContext>;
constexpr auto kSumFolds =
    Bind<[](const Grid&, const FoldContext& c) { return ReachesFold(c); },
         [](const ThreadBlock& b, const FoldContext& c) { SumFolds(HostTeam(), c, b.x); }, FoldContext>;
bool ReachesDrift(const DriftContext& c) {
  const KvShape& shape = c.score.shape();
  const uint64_t words = shape.tokens / 32 + (shape.tokens % 32 != 0),
                 weights = uint64_t{c.at_once} * shape.tokens;
  return ReachesBlocks(c.score.kv, c.score.kv.blocks, shape.blocks(), PROT_READ) &&
         Reads(c.kept, (shape.kv_heads - 1) * c.kept_head_stride + words) && Writes(c.weights, weights) &&
         Writes(c.kept_weights, weights) && Writes(c.drifts, c.rows);
}
constexpr auto kDriftLogits =
    Bind<[](const Grid&, const DriftContext& c, uint32_t, uint32_t) { return ReachesDrift(c); },
         [](const ThreadBlock& b, const DriftContext& c, uint32_t first_row, uint32_t shares) {
           const uint32_t begin = b.x % shares * kDriftTokens;
           DriftLogits(HostTeam(), c, first_row, b.x / shares, begin, begin + kDriftTokens);
         },
         DriftContext, uint32_t, uint32_t>;
constexpr auto kDriftOutputs =
    Bind<[](const Grid&, const DriftContext& c, uint32_t) { return ReachesDrift(c); },
         [](const ThreadBlock& b, const DriftContext& c, uint32_t first_row) {
           DriftOutputs(HostTeam(), c, first_row, b.x);
         },
         DriftContext, uint32_t>;
template <KvDtype dtype>
constexpr auto kLow = Bind<[](const Grid& grid, const LowRequest& r) {
  const uint64_t blocks = (grid.x - 1) / r.layout.records_per_block + 1;
  const uint64_t bytes = uint64_t{r.layout.records_per_block} * r.layout.record_bytes;
  return ReachesBlocks(r.from, r.from.blocks, r.from.shape.blocks(), PROT_READ) &&
         Reads(r.to_blocks, blocks) && std::all_of(r.to_blocks, r.to_blocks + blocks, [&](uint64_t block) {
           return IsMapped(block, bytes, PROT_READ | PROT_WRITE);
         });
},
                           [](const ThreadBlock& b, const LowRequest& r) {
                             LowTile tile;
                             const uint32_t planes = r.from.shape.planes();
                             LowRecord<dtype>(HostTeam(), r, b.x / planes, b.x % planes, &tile);
                           },
                           LowRequest>;
constexpr auto kCopyPieces =
    Bind<[](const Grid& grid, const PieceCopy* pieces) {
      return Reads(pieces, grid.x) && std::all_of(pieces, pieces + grid.x, [](const PieceCopy& piece) {
               return IsMapped(piece.from, piece.bytes, PROT_READ) &&
                      IsMapped(piece.to, piece.bytes, PROT_READ | PROT_WRITE);
             });
    },
         [](const ThreadBlock& b, const PieceCopy* pieces) { CopyPiece(HostTeam(), pieces[b.x]); },
         const PieceCopy*>;

constexpr auto kCountDigits =
    Bind<[](const Grid& grid, const SelectRequest& r, uint32_t) { return ReachesSelection(grid, r); },
         [](const ThreadBlock& b, const SelectRequest& r, uint32_t pass) {
           uint32_t bins[kDigits];
           CountDigits(HostTeam(), r, pass, b.x / r.tiles(), b.x % r.tiles(), bins);
         },
         SelectRequest, uint32_t>;
constexpr auto kCountTile = Bind<ReachesSelection,
                                 [](const ThreadBlock& b, const SelectRequest& r) {
                                   uint32_t bins[kDigits];
                                   CountTile(HostTeam(), r, b.x / r.tiles(), b.x % r.tiles(), bins);
                                 },
                                 SelectRequest>;
constexpr auto kVictims = Bind<ReachesSelection,
                               [](const ThreadBlock& b, const SelectRequest& r) {
                                 WriteVictims(HostTeam(), r, b.x / r.tiles(), b.x % r.tiles());
                               },
                               SelectRequest>;

template <typename Policy>
constexpr auto kPolicy =
    Bind<[](const Grid&, const ScoreContext& c, const Params&, float*) { return ReachesWorkspace(c); },
         [](const ThreadBlock& b, const ScoreContext& c, const Params& params, float* scores) {
           Policy::Score(HostTeam(), c.At(b.x, b.x), params, scores + uint64_t{b.x} * c.shape().tokens);
         },
         ScoreContext, Params, float*>;
template <typename Policy>
constexpr auto kPolicyBlocks =
    Bind<[](const Grid& grid, const ScoreContext& c, uint32_t, const Params&, float* scores) {
      return ReachesWorkspace(c) && Writes(scores, uint64_t{grid.x} * c.shape().blocks());
    },
         [](const ThreadBlock& b, const ScoreContext& c, uint32_t planes_each, const Params& params,
            float* scores) {
           Policy::ScoreBlocks(HostTeam(), c, {b.x * planes_each, planes_each}, b.x, params,
                               scores + uint64_t{b.x} * c.shape().blocks());
         },
         ScoreContext, uint32_t, Params, float*>;

#define KVPOOL_TYPED(name, dtype)                                                                            \
  {"kvpool_score_records_" #name, kRecords<dtype>}, {"kvpool_score_anchor_dots_" #name, kAnchorDots<dtype>}, \
      {"kvpool_score_window_lse_" #name, kWindowLse<dtype>}, {"kvpool_score_window_" #name, kWindow<dtype>}, \
      {"kvpool_score_nearest_" #name, kNearest<dtype>}, {"kvpool_score_low_" #name, kLow<dtype>},            \
      {"kvpool_score_fold_" #name, kFold<dtype>},
#define KVPOOL_POLICY(Policy) {"kvpool_score_" #Policy, kPolicy<Policy>},
#define KVPOOL_POLICY_BLOCKS(Policy) {"kvpool_score_blocks_" #Policy, kPolicyBlocks<Policy>},

const HostKernel kKernels[] = {
    // clang-format off
    KVPOOL_TYPED(f32, KvDtype::kF32) KVPOOL_TYPED(f16, KvDtype::kF16) KVPOOL_TYPED(bf16, KvDtype::kBf16)
    KVPOOL_TYPED(fp8_e4m3, KvDtype::kFp8E4m3) KVPOOL_TYPED(fp8_e5m2, KvDtype::kFp8E5m2)
    KVPOOL_POLICIES(KVPOOL_POLICY)
    KVPOOL_BLOCK_POLICIES(KVPOOL_POLICY_BLOCKS)
    // clang-format on
    {"kvpool_score_unpack", kUnpack},
    {"kvpool_score_anchors", kAnchors},
    {"kvpool_score_queries", kQueries},
    {"kvpool_score_reduce_planes", kReducePlanes},
    {"kvpool_score_reduce_tokens", kReduceTokens},
    {"kvpool_score_gather", kGather},
    {"kvpool_score_merge_norms", kMergeNorms},
    {"kvpool_score_link", kLink},
    {"kvpool_score_merge", kMerge},
    {"kvpool_score_sum_folds", kSumFolds},
    {"kvpool_score_drift_logits", kDriftLogits},
    {"kvpool_score_drift_outputs", kDriftOutputs},
    {"kvpool_score_copy_pieces", kCopyPieces},
    {"kvpool_score_count_digits", kCountDigits},
    {"kvpool_score_count_tile", kCountTile},
    {"kvpool_score_victims", kVictims},
};

}  // namespace

const HostKernel* FindScoreKernel(const char* name) {
  const auto* found = std::ranges::find_if(
      kKernels, [name](const HostKernel& kernel) { return std::strcmp(kernel.name(), name) == 0; });
  return found != std::end(kKernels) ? found : nullptr;
}

}  // namespace kvpool::fake
