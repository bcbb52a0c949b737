// The PTX in a fat binary: what a driver compiles for a GPU that the binary has no machine code for.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_IMAGE_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_IMAGE_H_

#include <string>

namespace kvpool::fake::ptx {

// Ends the process, with words, where there is none that it can read.
std::string TextOf(const void* fat_binary);

// Prints why, and ends the process: a test that can't execute a kernel must not pass.
[[noreturn]] void Die(const std::string& why);

}  // namespace kvpool::fake::ptx

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_IMAGE_H_
