#include "cuda/scorers/fold.h"

#include "absl/strings/str_cat.h"
#include "cuda/scorers/host/host_team.h"

namespace kvpool::scorers {
namespace {

// One share of a plane on the host.
struct HostFold {
  const FoldContext& context;
  uint32_t plane;
  uint32_t share;
  template <KvDtype dtype>
  void Run() const {
    FoldTile tile;
    FoldShare<dtype>(HostTeam(), context, plane, share, &tile);
  }
};

}  // namespace

double FoldProducts(const FoldRequest& request) {
  return 1.0 * request.evicted_tokens * request.from.shape.planes() *
         static_cast<double>(request.WeightFloats() + request.StateFloats());
}

absl::Status CheckFold(const FoldRequest& request, uint64_t weight_bytes, uint64_t most_bytes) {
  const KvShape& shape = request.from.shape;
  if (shape.v_head_dim == 0) {
    return absl::FailedPreconditionError("DISPOSITION_LESS adds up values, and this layout has no V");
  }
  if (shape.k_head_dim > FoldTile::kMostKeyDim) {
    return absl::FailedPreconditionError(absl::StrCat("DISPOSITION_LESS: k_head_dim is ", shape.k_head_dim,
                                                      "; the limit is ", FoldTile::kMostKeyDim));
  }
  const double products = FoldProducts(request);
  if (products > kMostFoldProducts) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "adding ", request.evicted_tokens, " tokens of ", shape.planes(), " planes to a state takes ",
        products, " products, ", request.WeightFloats() + request.StateFloats(), " for each; the limit is ",
        kMostFoldProducts));
  }
  FoldContext context{.request = request};
  const uint64_t rows = request.evicted_head_stride > 0    ? shape.planes()
                        : request.evicted_layer_stride > 0 ? shape.layers
                                                           : 1;
  const uint64_t states = (request.before == nullptr ? 1 : 2) * shape.planes() * request.StateFloats();
  const uint64_t bytes = ArrangeFold(0, &context) + weight_bytes + states * sizeof(float) +
                         rows * request.evicted_tokens * sizeof(uint32_t);
  if (bytes <= most_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("adding tokens to a state needs ", bytes, " bytes on the device, ", weight_bytes,
                   " of them for weights; the limit is ", most_bytes, " (--score-workspace)"));
}

void Fold(const FoldContext& context, HostWorkers* workers) {
  const KvView& kv = context.request.from;
  const uint32_t planes = kv.shape.planes(), shares = context.shares();
  workers->Run(planes * shares, [&](uint32_t item, uint32_t) {
    WithDtype(kv.dtype, HostFold{context, item / shares, item % shares});
  });
  workers->Run(planes, [&](uint32_t plane, uint32_t) { SumFolds(HostTeam(), context, plane); });
}

}  // namespace kvpool::scorers
