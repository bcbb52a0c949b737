// The fake driver's kernels: host bodies, found by name.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvpool::fake {

// The work of a launch, with its arguments copied. It answers CUDA_ERROR_ILLEGAL_ADDRESS where the kernel
// would touch memory that is not mapped for that access.
using Work = std::function<CUresult()>;

struct Grid {
  uint32_t x, y;
};

struct HostKernel {
  const char* name;
  Work (*bind)(const Grid& grid, void** arguments);
};
// The scorers' kernels alone. nullptr: no kernel of this name.
const HostKernel* FindScoreKernel(const char* name);
// All kernels. nullptr: no kernel of this name.
const HostKernel* FindHostKernel(const char* name);

// Whether a kernel may access this memory with this protection (PROT_READ, PROT_WRITE).
bool IsMapped(uint64_t address, size_t bytes, int protection);

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
