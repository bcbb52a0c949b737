// A kernel as the fake driver launches it.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_FAKE_KERNEL_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_FAKE_KERNEL_H_

#include <cuda.h>

#include <cstdint>
#include <functional>

namespace kvpool::fake {

// A launch's work, with its arguments copied. It returns CUDA_ERROR_ILLEGAL_ADDRESS where the kernel would
// have read memory that is not mapped, or written memory that is not mapped writable.
using Work = std::function<CUresult()>;

struct Grid {
  uint32_t x, y;
  uint32_t threads;  // a thread block's
};

class FakeKernel {
 public:
  virtual ~FakeKernel() = default;
  // The most threads that a thread block may have.
  virtual uint32_t max_threads() const { return 1024; }
  virtual Work Bind(const Grid& grid, void** arguments) const = 0;
};

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_FAKE_KERNEL_H_
