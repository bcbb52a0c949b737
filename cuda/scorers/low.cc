#include "cuda/scorers/low.h"

#include "cuda/scorers/host/host_team.h"
#include "proto/support/limits.h"

namespace kvpool::scorers {
namespace {

// A row of V is staged whole.
static_assert(kMaxHeadDim * sizeof(float) <= LowTile::kStageBytes);

struct HostRecord {
  const LowRequest& request;
  uint32_t group;
  uint32_t plane;
  template <KvDtype dtype>
  void Run() const {
    LowTile tile;
    LowRecord<dtype>(HostTeam(), request, group, plane, &tile);
  }
};

}  // namespace

void KeepLow(const LowRequest& request, HostWorkers* workers) {
  for (uint32_t plane = 0; plane < request.from.shape.planes(); ++plane) {
    workers->Run(request.groups(), [&](uint32_t group, uint32_t) {
      WithDtype(request.from.dtype, HostRecord{request, group, plane});
    });
  }
}

}  // namespace kvpool::scorers
