// The device that a run of the tests is about, which KVPOOL_TEST_DEVICE chooses ("host" or "cuda"), and
// access to its memory.
#ifndef KVPOOL_TESTS_DEVICE_TEST_DEVICE_H_
#define KVPOOL_TESTS_DEVICE_TEST_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/device.h"

namespace kvpool {

class TestDevice {
 public:
  virtual ~TestDevice() = default;
  virtual Device& device() = 0;
  virtual bool makes_ipc_slabs() const = 0;
  virtual absl::StatusOr<std::unique_ptr<MemberMemory>> Reserve(const MemberMemoryOptions& options) = 0;
  // Write and read 8 bytes at an address of the device, in order.
  virtual absl::StatusOr<uint64_t> Read(uint64_t address) = 0;
  virtual absl::Status Write(uint64_t address, uint64_t word) = 0;
  virtual absl::Status ReadAll(uint64_t address, absl::Span<uint64_t> words) = 0;
};

// UNAVAILABLE: this machine has no such device, with the reason. `capacity_bytes` limits the host
// device only.
absl::StatusOr<std::unique_ptr<TestDevice>> OpenTestDevice(size_t capacity_bytes);
// GPU 0 of the driver that KVPOOL_LIBCUDA names, or of the machine. UNAVAILABLE or UNIMPLEMENTED: there
// is none.
absl::StatusOr<std::unique_ptr<TestDevice>> OpenCudaTestDevice();

// The numbers of fds that this process has open, and of ranges that it has mapped.
size_t CountOpenFds();
size_t CountMappings();

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_TEST_DEVICE_H_
