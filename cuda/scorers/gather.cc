#include "cuda/scorers/gather.h"

#include "cuda/scorers/host/host_team.h"
#include "cuda/scorers/parts/gather_rows.h"

namespace kvpool::scorers {

void Gather(const GatherRequest& request, HostWorkers* workers) {
  const KvShape& shape = request.from.shape;
  const uint32_t blocks = (request.kept_tokens + shape.tokens_per_block - 1) / shape.tokens_per_block;
  workers->Run(blocks * shape.layers, [&](uint32_t item, uint32_t) {
    GatherLayer(HostTeam(), request, item / shape.layers, item % shape.layers);
  });
}

}  // namespace kvpool::scorers
