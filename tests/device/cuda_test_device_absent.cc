#include "tests/device/test_device.h"

namespace kvpool {

absl::StatusOr<std::unique_ptr<TestDevice>> OpenCudaTestDevice() { return OpenCudaDevice("0").status(); }

}  // namespace kvpool
