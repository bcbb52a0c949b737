#include <memory>
#include <vector>

#include "cuda/block_stamper.h"
#include "cuda/check_stamps.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

class HostStamper : public BlockStamper {
 public:
  absl::Status Write(absl::Span<const StampedBlock> blocks, size_t block_bytes) override {
    RETURN_IF_ERROR(CheckStampedBlocks(blocks));
    const StampBatch batch = Batch(blocks, block_bytes, nullptr);
    for (uint32_t i = 0; i < batch.block_count; ++i) WriteStamp(HostLane(), batch, i);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<uint64_t>> Verify(absl::Span<const StampedBlock> blocks,
                                               size_t block_bytes) override {
    RETURN_IF_ERROR(CheckStampedBlocks(blocks));
    std::vector<uint64_t> wrong_words(blocks.size());
    const StampBatch batch = Batch(blocks, block_bytes, wrong_words.data());
    for (uint32_t i = 0; i < batch.block_count; ++i) VerifyStamp(HostLane(), batch, i);
    return wrong_words;
  }

 private:
  static StampBatch Batch(absl::Span<const StampedBlock> blocks, size_t block_bytes, uint64_t* wrong_words) {
    return {.blocks = blocks.data(),
            .wrong_words = wrong_words,
            .block_count = static_cast<uint32_t>(blocks.size()),
            .words_per_block = block_bytes / sizeof(uint64_t)};
  }
};

}  // namespace

std::unique_ptr<BlockStamper> MakeHostStamper() { return std::make_unique<HostStamper>(); }

}  // namespace kvpool
