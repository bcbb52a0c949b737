// The kernels that read K and V, on the host.
#ifndef KVPOOL_CUDA_SCORERS_HOST_HOST_KERNELS_H_
#define KVPOOL_CUDA_SCORERS_HOST_HOST_KERNELS_H_

#include <cstdint>

#include "cuda/scorers/host/host_team.h"
#include "cuda/scorers/parts/context.h"
#include "cuda/scorers/parts/records.h"

namespace kvpool::scorers {

// Computes one layer's part of a block's record.
void RecordLayer(const HostTeam& team, const KvView& kv, const RecordLayout& at, uint32_t block,
                 uint32_t layer, float* record);
void DotPlaneWithAnchor(const HostTeam& team, const ScoreContext& context, uint32_t plane);
// The statistics of the query window's attention for each of the plane's tokens. `scratch` has WindowScratchFloats.
// REQUIRES: the plane's queries are loaded (LoadQueries).
void AttendPlane(const HostTeam& team, const ScoreContext& context, uint32_t plane, float* scratch);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_HOST_HOST_KERNELS_H_
