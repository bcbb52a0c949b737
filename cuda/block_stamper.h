// Writes stamps (cuda/base/stamp.h) into blocks and counts the words that differ from them: how a client
// proves that no block was handed to two owners.
#ifndef KVPOOL_CUDA_BLOCK_STAMPER_H_
#define KVPOOL_CUDA_BLOCK_STAMPER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/base/stamp.h"

namespace kvpool {

// Thread-safe. A call returns when its work on the device is done. The work runs on a stream of its own:
// REQUIRES that whatever else writes the blocks is done before the call.
class BlockStamper {
 public:
  virtual ~BlockStamper() = default;
  // `block_bytes` is the length of every block; a tail shorter than 8 bytes is neither written nor read.
  // INVALID_ARGUMENT: an address is no multiple of 8.
  virtual absl::Status Write(absl::Span<const StampedBlock> blocks, size_t block_bytes) = 0;
  // The number of wrong 8-byte words of each block; 0: the block holds what its owner wrote.
  virtual absl::StatusOr<std::vector<uint64_t>> Verify(absl::Span<const StampedBlock> blocks,
                                                       size_t block_bytes) = 0;
};

std::unique_ptr<BlockStamper> MakeHostStamper();
// `uuid_bytes` are those of Device::uuid_bytes(). UNIMPLEMENTED in a binary built without CUDA.
absl::StatusOr<std::unique_ptr<BlockStamper>> OpenCudaStamper(const std::string& uuid_bytes);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_BLOCK_STAMPER_H_
