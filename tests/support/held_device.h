// A device whose scorer a test can hold up, like a GPU that is busy with an engine's kernels, and whose calls
// it can count.
#ifndef KVPOOL_TESTS_SUPPORT_HELD_DEVICE_H_
#define KVPOOL_TESTS_SUPPORT_HELD_DEVICE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cuda/device.h"
#include "cuda/kv_compute.h"
#include "proto/support/mutex.h"

namespace kvpool {

// Shared by test and device. It outlives the device.
class DeviceHold {
 public:
  // From now on calls that reach the scorer wait there, until Release.
  void Hold();
  void Release();
  // Waits until `count` calls have reached the scorer since the start.
  void AwaitCalls(int count);
  int calls();
  // The next calls fail with this status; OK: they succeed.
  void FailWith(const absl::Status& status);
  // The addresses of the slabs, in the order they were made.
  std::vector<uint64_t> slab_addresses();
  // The device is gone, and another begins.
  void Forget();

  // ---- The device's side
  absl::Status Pass();
  void AddSlab(uint64_t address);

 private:
  Mutex mu_;
  CondVar changed_;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> slabs_ ABSL_GUARDED_BY(mu_);
};

std::unique_ptr<Device> MakeHeldDevice(std::unique_ptr<Device> device, DeviceHold* hold);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_HELD_DEVICE_H_
