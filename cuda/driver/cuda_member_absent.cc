// Linked in place of a member's CUDA sources in a build without the CUDA toolkit.
#include "absl/status/status.h"
#include "cuda/block_copier.h"
#include "cuda/device.h"
#include "cuda/fence_events.h"

namespace kvpool {
namespace {

absl::Status Absent() { return absl::UnimplementedError("built without CUDA"); }

}  // namespace

absl::StatusOr<int> CudaOrdinal(const std::string&) { return Absent(); }
absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveCudaMemory(const std::string&,
                                                                const MemberMemoryOptions&) {
  return Absent();
}
absl::StatusOr<std::unique_ptr<FenceEvents>> OpenCudaFenceEvents(const std::string&) { return Absent(); }
absl::StatusOr<std::unique_ptr<BlockCopier>> OpenCudaBlockCopier(const std::string&) { return Absent(); }

}  // namespace kvpool
