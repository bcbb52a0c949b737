#include "tests/support/fake_cuda/kernels.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "cuda/base/stamp.h"
#include "tests/gpu/probe_kernels.h"
#include "tests/support/fake_cuda/ptx/launch.h"
#include "tests/support/fake_cuda/state.h"

namespace kvpool::fake {
namespace {

template <auto kBody, int kProtection>
Work BindStamps(const Grid&, void** arguments) {
  const StampBatch batch = *static_cast<const StampBatch*>(arguments[0]);
  return [batch] {
    for (uint32_t i = 0; i < batch.block_count; ++i) {
      if (!IsMapped(batch.blocks[i].address, batch.words_per_block * sizeof(uint64_t), kProtection)) {
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      }
      kBody(HostLane(), batch, i);
    }
    return CUDA_SUCCESS;
  };
}

Work BindCount(const Grid&, void** arguments) {
  const CountRequest request = *static_cast<const CountRequest*>(arguments[0]);
  return [request] {
    if (!IsMapped(reinterpret_cast<uint64_t>(request.counter), sizeof(uint64_t), PROT_WRITE)) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    CountUp(HostLane(), request);
    return CUDA_SUCCESS;
  };
}

const HostKernel kKernels[] = {
    {"kvpool_probe_count", BindCount},
    {"kvpool_write_stamps", BindStamps<WriteStamp<HostLane>, PROT_WRITE>},
    {"kvpool_verify_stamps", BindStamps<VerifyStamp<HostLane>, PROT_READ>},
};

}  // namespace

bool IsMapped(uint64_t address, size_t bytes, int protection) {
  State& state = TheState();
  const std::lock_guard lock(state.mu);
  return IsAccessible(state, address, bytes, protection);
}

const FakeKernel* FindKernel(const void* image, const char* name) {
  if (TheState().settings.kernels == Kernels::kPtx) return ptx::FindKernel(image, name);
  const auto* found = std::ranges::find_if(
      kKernels, [name](const HostKernel& kernel) { return std::strcmp(kernel.name(), name) == 0; });
  return found != std::end(kKernels) ? found : FindScoreKernel(name);
}

}  // namespace kvpool::fake
