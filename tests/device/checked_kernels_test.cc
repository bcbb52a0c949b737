// The checks of kernels that the fake driver executes from their PTX: each mistake is seen, and named.
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/driver/cuda_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/support/status_macros.h"
#include "tests/device/in_child.h"

extern "C" const unsigned char kvpool_faulty_kernels_image[];

namespace kvpool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint32_t kCount = 64;

struct Launch {
  unsigned int blocks = 1;
  unsigned int threads = kCount;
  uint32_t fetched = kCount;  // words
};

// Runs the kernel on the words 0, 1, …, and returns them.
absl::StatusOr<std::vector<uint32_t>> RunKernel(const char* name, const Launch& launch) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const CudaContext> context, CudaContext::Open("0"));
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  ASSIGN_OR_RETURN(const CudaStream stream, MakeStream(context));
  const Driver& driver = context->driver();
  CUmodule module;
  RETURN_IF_ERROR(context->Check(driver.cuModuleLoadData(&module, kvpool_faulty_kernels_image), "load"));
  CUfunction function;
  RETURN_IF_ERROR(context->Check(driver.cuModuleGetFunction(&function, module, name), "find"));
  CUdeviceptr address;
  RETURN_IF_ERROR(context->Check(driver.cuMemAlloc(&address, 2 * kCount * sizeof(uint32_t)), "allocate"));
  const CudaArray memory(context, address);
  std::vector<uint32_t> words(kCount);
  std::iota(words.begin(), words.end(), 0u);
  RETURN_IF_ERROR(context->Check(
      driver.cuMemcpyHtoDAsync(address, words.data(), kCount * sizeof(uint32_t), stream.get()), "send"));
  uint32_t count = kCount;
  void* arguments[] = {&address, &count};
  RETURN_IF_ERROR(context->Check(driver.cuLaunchKernel(function, launch.blocks, 1, 1, launch.threads, 1, 1, 0,
                                                       stream.get(), arguments, nullptr),
                                 "launch"));
  words.resize(launch.fetched);
  RETURN_IF_ERROR(context->Check(
      driver.cuMemcpyDtoHAsync(words.data(), address, words.size() * sizeof(uint32_t), stream.get()),
      "fetch"));
  RETURN_IF_ERROR(context->Check(driver.cuStreamSynchronize(stream.get()), "synchronise"));
  return words;
}

std::string ErrorOf(const char* name, const Launch& launch = {}) {
  return InChild({}, [&] { return RunKernel(name, launch).status(); });
}

TEST(CheckedKernels, ASoundOneComputes) {
  EXPECT_EQ(InChild({},
                    [] {
                      ASSIGN_OR_RETURN(const std::vector<uint32_t> words, RunKernel("sound", {}));
                      return words == std::vector<uint32_t>(kCount, kCount - 1)
                                 ? absl::OkStatus()
                                 : absl::InternalError("wrong sums");
                    }),
            "OK");
}

TEST(CheckedKernels, AccessesStayInMappedMemoryAndAreAligned) {
  EXPECT_THAT(ErrorOf("misaligned"), AllOf(StartsWith("sticky"), HasSubstr("CUDA_ERROR_MISALIGNED_ADDRESS"),
                                           HasSubstr("thread 0 of block (0, 0)"),
                                           HasSubstr("accesses 8 bytes"), HasSubstr("st.global.u64")));
  EXPECT_THAT(ErrorOf("outside"),
              AllOf(StartsWith("sticky"), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"), HasSubstr("not mapped")));
}

TEST(CheckedKernels, WhatIsReadWasWritten) {
  EXPECT_THAT(ErrorOf("unwritten"),
              AllOf(StartsWith("sticky"), HasSubstr("reads what nobody has written: PTX line")));
  EXPECT_THAT(ErrorOf("unwritten_shared"),
              AllOf(HasSubstr("thread 58 "), HasSubstr("reads what nobody has written")));
  EXPECT_THAT(ErrorOf("empty", {.fetched = kCount + 1}),
              HasSubstr("a copy of 260 bytes reads what nobody has written"));
}

TEST(CheckedKernels, ThreadsThatShareMemoryMeetAtABarrier) {
  EXPECT_THAT(ErrorOf("no_barrier"),
              AllOf(HasSubstr("reads what nobody has written"), HasSubstr("ld.shared")));
  EXPECT_THAT(ErrorOf("no_barrier_in_array"), HasSubstr("races with a write of another thread"));
  EXPECT_THAT(ErrorOf("blocks_race", {.blocks = 2}), HasSubstr("races with a write of another thread block"));
}

TEST(CheckedKernels, AllWhoAreMeantComeToBarriersAndShuffles) {
  EXPECT_THAT(ErrorOf("barrier_for_some"), HasSubstr("when others of its block wait at this barrier"));
  EXPECT_THAT(ErrorOf("shuffle_of_some"), HasSubstr("waits for lanes of its warp that never come here"));
}

TEST(CheckedKernels, AThreadBlockIsNoLargerThanItsKernelTakes) {
  EXPECT_THAT(ErrorOf("sound", {.threads = 1025}), HasSubstr("CUDA_ERROR_INVALID_VALUE"));
}

}  // namespace
}  // namespace kvpool
