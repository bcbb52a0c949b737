#include "cuda/scorers/merge.h"

#include "absl/strings/str_cat.h"
#include "cuda/scorers/host/host_team.h"
#include "proto/support/limits.h"

namespace kvpool::scorers {
namespace {

static_assert(kMaxHeadDim <= NearestTile::kFloats);

// One tile of a plane on the host, where a tile has one token.
struct HostNearest {
  const MergeContext& context;
  uint32_t plane;
  uint32_t token;
  template <KvDtype dtype>
  void Run() const {
    NearestTile tile;
    FindNearest<dtype>(HostTeam(), context, plane, token, /*tile_tokens=*/1, &tile);
  }
};

}  // namespace

absl::Status CheckMerge(const MergeRequest& request, uint64_t most_bytes) {
  const KvShape& shape = request.gather.from.shape;
  const double products = static_cast<double>(request.gather.kept_tokens) * request.evicted_tokens *
                          shape.planes() * shape.k_head_dim;
  if (products > kMostMergeProducts) {
    return absl::ResourceExhaustedError(
        absl::StrCat("merging ", request.evicted_tokens, " tokens into ", request.gather.kept_tokens, " in ",
                     shape.planes(), " planes of ", shape.k_head_dim, " elements takes ", products,
                     " products; the limit is ", kMostMergeProducts));
  }
  MergeContext context{.request = request};
  const uint64_t bytes = ArrangeMerge(0, &context);
  if (bytes <= most_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("merging needs ", bytes,
                                                   " bytes of workspace on the device; the limit is ",
                                                   most_bytes, " (--score-workspace)"));
}

void Merge(const MergeContext& context, HostWorkers* workers) {
  const KvView& kv = context.request.gather.from;
  const uint32_t per_block = kv.shape.tokens_per_block, layers = kv.shape.layers;
  const uint32_t evicted = context.request.evicted_tokens, kept = context.request.gather.kept_tokens;
  workers->Run(kv.shape.blocks() * layers, [&](uint32_t item, uint32_t) {
    MergeNorms(HostTeam(), context, item / layers, item % layers);
  });
  for (uint32_t plane = 0; plane < kv.shape.planes(); ++plane) {
    workers->Run(evicted, [&](uint32_t token, uint32_t) {
      WithDtype(kv.dtype, HostNearest{context, plane, token});
    });
  }
  workers->Run(kv.shape.planes(), [&](uint32_t plane, uint32_t) { LinkMerged(HostTeam(), context, plane); });
  workers->Run((kept + per_block - 1) / per_block * layers, [&](uint32_t item, uint32_t) {
    MergeLayer(HostTeam(), context, item / layers, item % layers);
  });
}

}  // namespace kvpool::scorers
