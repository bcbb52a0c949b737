#include <utility>

#include "cuda/driver/cuda_context.h"
#include "proto/support/status_macros.h"
#include "tests/device/test_device.h"

namespace kvpool {
namespace {

class CudaTestDevice : public TestDevice {
 public:
  CudaTestDevice(std::unique_ptr<Device> device, std::shared_ptr<const CudaContext> context,
                 CudaStream stream)
      : device_(std::move(device)), context_(std::move(context)), stream_(std::move(stream)) {}

  Device& device() override { return *device_; }
  bool makes_ipc_slabs() const override { return true; }
  absl::StatusOr<std::unique_ptr<MemberMemory>> Reserve(const MemberMemoryOptions& options) override {
    return ReserveCudaMemory(device_->uuid_bytes(), options);
  }
  absl::StatusOr<uint64_t> Read(uint64_t address) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const Driver& driver = context_->driver();
    uint64_t word = 0;
    RETURN_IF_ERROR(
        context_->Check(driver.cuMemcpyDtoHAsync(&word, address, sizeof word, stream_.get()), "read"));
    RETURN_IF_ERROR(context_->Check(driver.cuStreamSynchronize(stream_.get()), "read"));
    return word;
  }
  absl::Status Write(uint64_t address, uint64_t word) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const Driver& driver = context_->driver();
    RETURN_IF_ERROR(
        context_->Check(driver.cuMemcpyHtoDAsync(address, &word, sizeof word, stream_.get()), "write"));
    return context_->Check(driver.cuStreamSynchronize(stream_.get()), "write");
  }
  absl::Status ReadAll(uint64_t address, absl::Span<uint64_t> words) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const Driver& driver = context_->driver();
    RETURN_IF_ERROR(context_->Check(
        driver.cuMemcpyDtoHAsync(words.data(), address, words.size() * sizeof words[0], stream_.get()),
        "read"));
    return context_->Check(driver.cuStreamSynchronize(stream_.get()), "read");
  }

 private:
  const std::unique_ptr<Device> device_;
  const std::shared_ptr<const CudaContext> context_;
  const CudaStream stream_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TestDevice>> OpenCudaTestDevice() {
  ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenCudaDevice("0"));
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::OpenUuid(device->uuid_bytes()));
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  ASSIGN_OR_RETURN(CudaStream stream, MakeStream(context));
  return std::make_unique<CudaTestDevice>(std::move(device), std::move(context), std::move(stream));
}

}  // namespace kvpool
