// The kernels of fat binaries, executed from their PTX: real grids, thread blocks, warps, barriers, shuffles and shared memory.
// The blocks of a grid come one after the other, and a block's warps take turns at barriers. Each access is checked: it must be
// aligned, in a mapping, to memory that somebody has written if it reads, and apart from what other threads do without a
// barrier between. What is wrong is printed, and loses the context, as a GPU's error would.
//
// KVPOOL_FAKE_KERNELS_COUNTS names a file, to which a process adds a line for each kernel at its end: name, number of
// instructions in the PTX, then the numbers of Counts.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_LAUNCH_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_LAUNCH_H_

#include "tests/support/fake_cuda/fake_kernel.h"

namespace kvpool::fake::ptx {

// nullptr: the image has no kernel of this name.
const FakeKernel* FindKernel(const void* image, const char* name);

}  // namespace kvpool::fake::ptx

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_LAUNCH_H_
