#include "cuda/scorers/drift.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cuda/scorers/host/host_team.h"
#include "cuda/scorers/parts/window.h"

namespace kvpool::scorers {

absl::Status CheckDrift(const DriftRequest& request, uint64_t most_bytes) {
  const KvShape& shape = request.kv.shape;
  if (shape.v_head_dim == 0) {
    return absl::InvalidArgumentError("the layout has no V (v_head_dim is 0), and so no output to measure");
  }
  const QueryWindow& window = request.window;
  if (window.queries < 1 || window.queries > kMostDriftQueries || window.q_heads == 0 ||
      window.q_heads % shape.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a window of ", window.queries, " queries and ", window.q_heads, " query heads; must be 1 to ",
        kMostDriftQueries, " queries and a multiple of ", shape.kv_heads, " heads"));
  }
  DriftContext context;
  const uint64_t bytes = ArrangeDrift(request, 0, &context) + window.queries * window.query_stride_bytes +
                         request.kept_words() * sizeof(uint32_t);
  if (bytes <= most_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("measuring a drift needs ", bytes,
                                                   " bytes on the device; the limit is ", most_bytes,
                                                   " (--score-workspace)"));
}

double DriftProducts(const DriftRequest& request) {
  const KvShape& shape = request.kv.shape;
  // Weights are multiplied with values twice, for all tokens and for those that stay. What a weight takes besides, its address
  // and exponentials, was measured with heads of one element: 13 ns, as 52 products.
  constexpr uint32_t kOfWeight = 64;
  return 1.0 * static_cast<double>(request.rows()) * shape.tokens *
         (shape.k_head_dim + 2 * shape.v_head_dim + kOfWeight);
}

absl::StatusOr<Drift> DriftOf(absl::Span<const float> drifts) {
  Drift drift{.rows = drifts.size()};
  for (const float of_row : drifts) {
    if (!std::isfinite(of_row)) {
      return absl::OutOfRangeError(
          "the outputs are not finite, as a query, all of its keys or a value that is attended to are not");
    }
    drift.sum += std::min<double>(of_row, kMostDrift);
    drift.greatest = std::max<double>(drift.greatest, of_row);
  }
  return drift;
}

void MeasureDrift(const DriftContext& context, HostWorkers* workers) {
  const KvShape& shape = context.score.shape();
  workers->Run(shape.kv_heads,
               [&](uint32_t head, uint32_t) { LoadQueries(HostTeam(), context.score, head); });
  for (uint32_t first = 0; first < context.rows; first += context.at_once) {
    workers->Run(std::min(context.at_once, context.rows - first), [&](uint32_t row, uint32_t) {
      DriftLogits(HostTeam(), context, first, row, 0, shape.tokens);
      DriftOutputs(HostTeam(), context, first, row);
    });
  }
}

}  // namespace kvpool::scorers
