#include "tests/gpu/probe_kernels.h"

namespace kvpool {
namespace {

class OneLane {
 public:
  __device__ uint64_t id() const { return threadIdx.x; }
};

}  // namespace

extern "C" __global__ void kvpool_probe_count(CountRequest request) { CountUp(OneLane(), request); }

}  // namespace kvpool
