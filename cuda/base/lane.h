// Lane-generic kernels: one source for GPU and host.
//
// A kernel's body is a function of a lane. The lanes of one launch share the work and add up sums:
//
//   for (uint64_t i = lane.id(); i < n; i += lane.count()) …
//   lane.AddTo(&total, x);
//
// A GPU runs the body on thousands of lanes. The host runs it on one, and that is the reference. The scorers'
// kernels, which share more than sums, are functions of a team instead (cuda/scorers/parts/team.h).
#ifndef KVPOOL_CUDA_BASE_LANE_H_
#define KVPOOL_CUDA_BASE_LANE_H_

#include <cstdint>

#ifdef __CUDACC__
#define KVPOOL_HOST_DEVICE __host__ __device__
// Before a loop whose arrays must be registers.
#define KVPOOL_UNROLL _Pragma("unroll")
#else
#define KVPOOL_HOST_DEVICE
#define KVPOOL_UNROLL
#endif

namespace kvpool {

class HostLane {
 public:
  uint64_t id() const { return 0; }
  uint64_t count() const { return 1; }
  void AddTo(uint64_t* total, uint64_t x) const { *total += x; }
};

}  // namespace kvpool

#endif  // KVPOOL_CUDA_BASE_LANE_H_
