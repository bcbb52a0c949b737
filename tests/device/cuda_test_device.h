#ifndef KVPOOL_TESTS_DEVICE_CUDA_TEST_DEVICE_H_
#define KVPOOL_TESTS_DEVICE_CUDA_TEST_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "tests/device/test_device.h"

namespace kvpool {

// GPU 0 of the driver that KVPOOL_LIBCUDA names, or of the machine. UNAVAILABLE or UNIMPLEMENTED: there is none.
absl::StatusOr<std::unique_ptr<TestDevice>> OpenCudaTestDevice();

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_CUDA_TEST_DEVICE_H_
