// The kernels of stamps: the bodies of cuda/base/stamp.h on CUDA lanes. They have C names, by which the
// driver finds them.
#include "cuda/base/stamp.h"

namespace kvpool {
namespace {

constexpr unsigned int kWarpLanes = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;

// The lanes of an item x of a batch are all threads of the thread blocks (x, y).
class CudaLane {
 public:
  __device__ uint64_t id() const { return uint64_t{blockIdx.y} * blockDim.x + threadIdx.x; }
  __device__ uint64_t count() const { return uint64_t{gridDim.y} * blockDim.x; }
  // REQUIRES: every thread of the warp calls.
  __device__ void AddTo(uint64_t* total, uint64_t x) const {
    for (unsigned int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
      x += __shfl_down_sync(kAllLanes, x, distance);
    }
    // Most verifications find nothing, and need no memory traffic for zeros.
    if (threadIdx.x % kWarpLanes == 0 && x != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(x));
    }
  }
};

}  // namespace

extern "C" __global__ void kvpool_write_stamps(StampBatch batch) {
  WriteStamp(CudaLane(), batch, blockIdx.x);
}

extern "C" __global__ void kvpool_verify_stamps(StampBatch batch) {
  VerifyStamp(CudaLane(), batch, blockIdx.x);
}

}  // namespace kvpool
