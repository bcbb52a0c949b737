#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/block_stamper.h"
#include "cuda/check_stamps.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/driver/kernels_image.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// Blocks in one launch; longer spans take several. Their 24-byte descriptions take 96 KiB of pinned memory.
constexpr size_t kBatchBlocks = 4096;
constexpr unsigned int kThreads = 256;
// A block is split among more threads than this gives work to, so that a launch with one block still fills
// a GPU.
constexpr size_t kWordsPerThread = 8;
constexpr unsigned int kMaxSplits = 128;

// A batch's input and output, laid out alike in pinned memory and on the device.
struct Staging {
  StampedBlock blocks[kBatchBlocks];
  uint64_t wrong_words[kBatchBlocks];
};

class CudaStamper : public BlockStamper {
 public:
  CudaStamper(std::shared_ptr<const CudaContext> context, CudaModule module, CUfunction write,
              CUfunction verify, CudaStream stream, CudaPinned pinned, CudaArray array)
      : context_(std::move(context)),
        module_(std::move(module)),
        write_(write),
        verify_(verify),
        stream_(std::move(stream)),
        pinned_(std::move(pinned)),
        array_(std::move(array)) {}

  absl::Status Write(absl::Span<const StampedBlock> blocks, size_t block_bytes) override {
    RETURN_IF_ERROR(CheckStampedBlocks(blocks));
    MutexLock lock(&mu_);
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    for (size_t first = 0; first < blocks.size(); first += kBatchBlocks) {
      const absl::Span<const StampedBlock> batch = blocks.subspan(first, kBatchBlocks);
      RETURN_IF_ERROR(Launch(write_, batch, block_bytes));
      RETURN_IF_ERROR(Finish());
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<uint64_t>> Verify(absl::Span<const StampedBlock> blocks,
                                               size_t block_bytes) override {
    RETURN_IF_ERROR(CheckStampedBlocks(blocks));
    MutexLock lock(&mu_);
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const Driver& driver = context_->driver();
    std::vector<uint64_t> wrong_words;
    wrong_words.reserve(blocks.size());
    for (size_t first = 0; first < blocks.size(); first += kBatchBlocks) {
      const absl::Span<const StampedBlock> batch = blocks.subspan(first, kBatchBlocks);
      const size_t bytes = batch.size() * sizeof(uint64_t);
      RETURN_IF_ERROR(context_->Check(
          driver.cuMemsetD8Async(array_.get() + offsetof(Staging, wrong_words), 0, bytes, stream_.get()),
          "cuMemsetD8Async"));
      RETURN_IF_ERROR(Launch(verify_, batch, block_bytes));
      RETURN_IF_ERROR(context_->Check(
          driver.cuMemcpyDtoHAsync(staging()->wrong_words, array_.get() + offsetof(Staging, wrong_words),
                                   bytes, stream_.get()),
          "cuMemcpyDtoHAsync"));
      RETURN_IF_ERROR(Finish());
      wrong_words.insert(wrong_words.end(), staging()->wrong_words, staging()->wrong_words + batch.size());
    }
    return wrong_words;
  }

 private:
  Staging* staging() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return static_cast<Staging*>(pinned_.get()); }

  absl::Status Launch(CUfunction kernel, absl::Span<const StampedBlock> blocks, size_t block_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::ranges::copy(blocks, staging()->blocks);
    const Driver& driver = context_->driver();
    RETURN_IF_ERROR(
        context_->Check(driver.cuMemcpyHtoDAsync(array_.get() + offsetof(Staging, blocks), staging()->blocks,
                                                 blocks.size() * sizeof(StampedBlock), stream_.get()),
                        "cuMemcpyHtoDAsync"));
    StampBatch batch = {
        .blocks = reinterpret_cast<const StampedBlock*>(array_.get() + offsetof(Staging, blocks)),
        .wrong_words = reinterpret_cast<uint64_t*>(array_.get() + offsetof(Staging, wrong_words)),
        .block_count = static_cast<uint32_t>(blocks.size()),
        .words_per_block = block_bytes / sizeof(uint64_t),
    };
    const size_t splits = batch.words_per_block / (kThreads * kWordsPerThread);
    void* arguments[] = {&batch};
    return context_->Check(driver.cuLaunchKernel(kernel, batch.block_count,
                                                 std::clamp<size_t>(splits, 1, kMaxSplits), 1, kThreads, 1, 1,
                                                 /*sharedMemBytes=*/0, stream_.get(), arguments, nullptr),
                           absl::StrCat("stamping ", blocks.size(), " blocks: cuLaunchKernel"));
  }

  absl::Status Finish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return context_->Finish(stream_.get(), "stamping");
  }

  const std::shared_ptr<const CudaContext> context_;
  const CudaModule module_;
  const CUfunction write_;
  const CUfunction verify_;
  Mutex mu_;  // guards the staging memory: one batch is under way at a time
  const CudaStream stream_;
  const CudaPinned pinned_;
  const CudaArray array_;
};

absl::StatusOr<CUfunction> FindKernel(const CudaContext& context, const CudaModule& module,
                                      const char* name) {
  CUfunction kernel;
  RETURN_IF_ERROR(context.Check(context.driver().cuModuleGetFunction(&kernel, module.get(), name), name));
  return kernel;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockStamper>> OpenCudaStamper(const std::string& uuid_bytes) {
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::OpenUuid(uuid_bytes));
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  const Driver& driver = context->driver();
  CUmodule loaded;
  RETURN_IF_ERROR(context->Check(driver.cuModuleLoadData(&loaded, kvpool_kernels_image), "cuModuleLoadData"));
  CudaModule module(context, loaded);
  ASSIGN_OR_RETURN(const CUfunction write, FindKernel(*context, module, "kvpool_write_stamps"));
  ASSIGN_OR_RETURN(const CUfunction verify, FindKernel(*context, module, "kvpool_verify_stamps"));
  ASSIGN_OR_RETURN(CudaStream stream, MakeStream(context));
  void* pinned_address;
  RETURN_IF_ERROR(
      context->Check(driver.cuMemHostAlloc(&pinned_address, sizeof(Staging), 0), "cuMemHostAlloc"));
  CudaPinned pinned(context, pinned_address);
  CUdeviceptr array_address;
  RETURN_IF_ERROR(context->Check(driver.cuMemAlloc(&array_address, sizeof(Staging)), "cuMemAlloc"));
  CudaArray array(context, array_address);
  return std::make_unique<CudaStamper>(std::move(context), std::move(module), write, verify,
                                       std::move(stream), std::move(pinned), std::move(array));
}

}  // namespace kvpool
