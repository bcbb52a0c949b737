// Kernels of the fake driver: their host bodies, by name.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_

#include <cuda.h>

#include <functional>

namespace kvpool::fake {

// A launch's work, its arguments copied. It answers CUDA_ERROR_ILLEGAL_ADDRESS where the kernel would have
// touched memory that is not mapped so.
using Work = std::function<CUresult()>;

struct HostKernel {
  const char* name;
  Work (*bind)(void** arguments);
};
// nullptr: no kernel of this name.
const HostKernel* FindHostKernel(const char* name);

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
