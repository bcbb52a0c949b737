// The kernels of the fake driver.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "tests/support/fake_cuda/fake_kernel.h"

namespace kvpool::fake {

// As Settings::kernels says: the host's body, or what the fat binary `image` has in PTX. nullptr: there is no kernel of this
// name.
const FakeKernel* FindKernel(const void* image, const char* name);

// A kernel's body, compiled for the host. Each thread block is one lane.
class HostKernel : public FakeKernel {
 public:
  using Binder = Work (*)(const Grid& grid, void** arguments);
  constexpr HostKernel(const char* name, Binder bind) : name_(name), bind_(bind) {}
  const char* name() const { return name_; }
  Work Bind(const Grid& grid, void** arguments) const override { return bind_(grid, arguments); }

 private:
  const char* name_;
  Binder bind_;
};
// The kernels of the scorers.
const HostKernel* FindScoreKernel(const char* name);

// Whether a kernel may access the range (PROT_READ, PROT_WRITE).
bool IsMapped(uint64_t address, size_t bytes, int protection);

}  // namespace kvpool::fake

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
