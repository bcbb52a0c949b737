// The checks of kernels that the fake driver executes from their PTX: each mistake is seen, and named.
#include <bit>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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

constexpr uint32_t kCount = 64, kWords = 320;

struct Launch {
  unsigned int blocks = 1;
  unsigned int threads = kCount;
  uint32_t fetched = kCount;  // words
  std::vector<uint32_t> words = Counting();

  static std::vector<uint32_t> Counting() {
    std::vector<uint32_t> words(kCount);
    std::iota(words.begin(), words.end(), 0u);
    return words;
  }
};

// Runs the kernel on the words, of which it is told that they are kCount, and returns them.
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
  RETURN_IF_ERROR(context->Check(driver.cuMemAlloc(&address, kWords * sizeof(uint32_t)), "allocate"));
  const CudaArray memory(context, address);
  const std::vector<uint32_t>& sent = launch.words;
  std::vector<uint32_t> words(launch.fetched);
  RETURN_IF_ERROR(context->Check(
      driver.cuMemcpyHtoDAsync(address, sent.data(), sent.size() * sizeof(uint32_t), stream.get()), "send"));
  uint32_t count = kCount;
  void* arguments[] = {&address, &count};
  RETURN_IF_ERROR(context->Check(driver.cuLaunchKernel(function, launch.blocks, 1, 1, launch.threads, 1, 1, 0,
                                                       stream.get(), arguments, nullptr),
                                 "launch"));
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
  EXPECT_THAT(
      ErrorOf("shared_of_another_block", {.blocks = 2}),
      AllOf(HasSubstr("of block (1, 0) reads what nobody has written"), HasSubstr("ld.volatile.shared")));
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

// The f16 of a whole number below 2,048.
uint16_t HalfOf(uint32_t x) {
  if (x == 0) return 0;
  const uint32_t exponent = 31 - static_cast<uint32_t>(std::countl_zero(x));
  return static_cast<uint16_t>((exponent + 15) << 10 | (x << (10 - exponent) & 0x3ff));
}

TEST(CheckedKernels, TensorCoresMultiplyMatrices) {
  EXPECT_EQ(InChild({},
                    [] {
                      // Every element is another number, and the sums are whole numbers that a float has.
                      std::vector<uint32_t> words(192);
                      const auto a = [](uint32_t row, uint32_t k) { return row * 16 + k + 1; };
                      const auto b = [](uint32_t k, uint32_t column) { return 3 * (column * 16 + k) + 1; };
                      for (uint32_t i = 0; i < 256; ++i) {
                        words[i / 2] |= uint32_t{HalfOf(a(i / 16, i % 16))} << i % 2 * 16;
                        if (i < 128) words[128 + i / 2] |= uint32_t{HalfOf(b(i % 16, i / 16))} << i % 2 * 16;
                      }
                      ASSIGN_OR_RETURN(
                          const std::vector<uint32_t> done,
                          RunKernel("matrix_product", {.threads = 32, .fetched = kWords, .words = words}));
                      for (uint32_t i = 0; i < 128; ++i) {
                        uint32_t sum = 0;
                        for (uint32_t k = 0; k < 16; ++k) sum += a(i / 8, k) * b(k, i % 8);
                        if (std::bit_cast<float>(done[192 + i]) != static_cast<float>(sum)) {
                          return absl::InternalError(absl::StrCat(
                              "element ", i, " is ", std::bit_cast<float>(done[192 + i]), ", not ", sum));
                        }
                      }
                      return absl::OkStatus();
                    }),
            "OK");
  EXPECT_THAT(ErrorOf("matrix_product", {.threads = 16, .words = std::vector<uint32_t>(192)}),
              HasSubstr("multiplies matrices without all lanes of its warp"));
}

TEST(CheckedKernels, TensorCoresRoundToTf32) {
  EXPECT_EQ(InChild({},
                    [] {
                      // Of 12 bits, one more than a tf32 has: halves are rounded away from zero.
                      const auto a = [](uint32_t row, uint32_t k) {
                        return 2049.f + 2 * static_cast<float>(row * 8 + k);
                      };
                      const auto b = [](uint32_t k, uint32_t column) {
                        return static_cast<float>(column * 8 + k) - 31;
                      };
                      std::vector<uint32_t> words(192);
                      for (uint32_t i = 0; i < 128; ++i) {
                        words[i] = std::bit_cast<uint32_t>(a(i / 8, i % 8));
                        if (i < 64) words[128 + i] = std::bit_cast<uint32_t>(b(i % 8, i / 8));
                      }
                      ASSIGN_OR_RETURN(const std::vector<uint32_t> done,
                                       RunKernel("matrix_product_tf32",
                                                 {.threads = 32, .fetched = kWords, .words = words}));
                      for (uint32_t i = 0; i < 128; ++i) {
                        float sum = 0;
                        for (uint32_t k = 0; k < 8; ++k) sum += (a(i / 8, k) + 1) * b(k, i % 8);
                        if (std::bit_cast<float>(done[192 + i]) != sum) {
                          return absl::InternalError(absl::StrCat(
                              "element ", i, " is ", std::bit_cast<float>(done[192 + i]), ", not ", sum));
                        }
                      }
                      return absl::OkStatus();
                    }),
            "OK");
}

TEST(CheckedKernels, AThreadBlockIsNoLargerThanItsKernelTakes) {
  EXPECT_THAT(ErrorOf("sound", {.threads = 1025}), HasSubstr("CUDA_ERROR_INVALID_VALUE"));
}

}  // namespace
}  // namespace kvpool
