// Linked in place of the CUDA sources in a build without the CUDA toolkit.
#include "absl/status/status.h"
#include "cuda/block_stamper.h"
#include "cuda/device.h"

namespace kvpool {
namespace {

absl::Status Absent() { return absl::UnimplementedError("built without CUDA"); }

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const std::string&) { return Absent(); }
absl::StatusOr<int> CudaDeviceCount() { return Absent(); }
absl::StatusOr<std::unique_ptr<BlockStamper>> OpenCudaStamper(const std::string&) { return Absent(); }

}  // namespace kvpool
