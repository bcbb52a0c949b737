// The kernels of the fake driver: their host bodies by name.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvpool::fake {

// A launch's work, with its arguments copied. It returns CUDA_ERROR_ILLEGAL_ADDRESS where the kernel would
// have read memory that is not mapped, or written memory that is not mapped writable.
using Work = std::function<CUresult()>;

struct Grid {
  uint32_t x, y;
};

struct HostKernel {
  const char* name;
  Work (*bind)(const Grid& grid, void** arguments);
};
// The kernels of the scorers.
const HostKernel* FindScoreKernel(const char* name);
// nullptr: there is no kernel of this name.
const HostKernel* FindHostKernel(const char* name);

// Whether a kernel may access the range (PROT_READ, PROT_WRITE).
bool IsMapped(uint64_t address, size_t bytes, int protection);

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
