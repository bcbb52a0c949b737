// A device that passes everything on to a real one, until it is told to fail in one of the
// ways that devices do.
#ifndef KVPOOL_TESTS_SUPPORT_FAULTY_DEVICE_H_
#define KVPOOL_TESTS_SUPPORT_FAULTY_DEVICE_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "cuda/kv_compute.h"
#include "cuda/sticky.h"
#include "proto/support/mutex.h"

namespace kvpool {

// Thread-safe, like every device.
class FaultyDevice : public Device {
 public:
  explicit FaultyDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  // Somebody else's process takes the memory: slabs can't be made any more, though total_bytes()
  // says there is room.
  void FillUp() {
    MutexLock lock(&mu_);
    full_ = true;
  }
  // That process gives it back.
  void GiveBack() {
    MutexLock lock(&mu_);
    full_ = false;
  }
  // An uncorrectable memory error (XID 48): the context is gone and every call says so,
  // until the process ends.
  void Lose() {
    MutexLock lock(&mu_);
    lost_ = true;
  }
  // The GPU is busy with an engine's long kernel: making a slab waits for Resume.
  void Stall() {
    MutexLock lock(&mu_);
    stalled_ = true;
  }
  void Resume() {
    MutexLock lock(&mu_);
    stalled_ = false;
    resumed_.SignalAll();
  }

  const std::string& id() const override { return device_->id(); }
  const std::string& name() const override { return device_->name(); }
  std::string uuid_bytes() const override { return device_->uuid_bytes(); }
  size_t granularity_bytes() const override { return device_->granularity_bytes(); }
  size_t total_bytes() const override { return device_->total_bytes(); }
  absl::StatusOr<size_t> free_bytes() const override {
    MutexLock lock(&mu_);
    if (lost_) return Lost();
    return full_ ? 0 : device_->free_bytes();
  }
  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override {
    const absl::Status fault = Fault(bytes);
    if (!fault.ok()) return fault;
    return device_->MakeSlab(bytes);
  }
  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) override {
    const absl::Status fault = Fault(bytes);
    if (!fault.ok()) return fault;
    return device_->MakeIpcSlab(bytes);
  }
  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override {
    return device_->MakeKvCompute(options);
  }

 private:
  static absl::Status Lost() {
    absl::Status status =
        absl::DataLossError("CUDA_ERROR_ECC_UNCORRECTABLE (214: uncorrectable ECC error encountered)");
    MarkSticky(&status);
    return status;
  }
  absl::Status Fault(size_t bytes) {
    MutexLock lock(&mu_);
    while (stalled_) resumed_.Wait(&mu_);
    if (lost_) return Lost();
    if (!full_) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat(id(), ": ", bytes, " bytes asked, 0 of ", total_bytes(), " free"));
  }

  const std::unique_ptr<Device> device_;
  mutable Mutex mu_;
  CondVar resumed_;
  bool full_ ABSL_GUARDED_BY(mu_) = false;
  bool lost_ ABSL_GUARDED_BY(mu_) = false;
  bool stalled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_FAULTY_DEVICE_H_
