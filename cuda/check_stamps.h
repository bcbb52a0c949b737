// The check of arguments that all stampers share.
#ifndef KVPOOL_CUDA_CHECK_STAMPS_H_
#define KVPOOL_CUDA_CHECK_STAMPS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cuda/base/stamp.h"

namespace kvpool {

inline absl::Status CheckStampedBlocks(absl::Span<const StampedBlock> blocks) {
  constexpr size_t kMaxBlocks = size_t{1} << 31;  // Block ids have 32 bits.
  if (blocks.size() > kMaxBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat(blocks.size(), " blocks to stamp, at most ", kMaxBlocks, " at once"));
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].address % sizeof(uint64_t) == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("block ", i, " to stamp: address ", blocks[i].address, " is no multiple of 8"));
  }
  return absl::OkStatus();
}

}  // namespace kvpool

#endif  // KVPOOL_CUDA_CHECK_STAMPS_H_
