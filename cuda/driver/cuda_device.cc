// A GPU as a device: slabs are virtual-memory-management (VMM) allocations, or single allocations with
// IPC handles.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/driver/cuda_kv_compute.h"
#include "cuda/member_ranges.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

class VmmSlab : public Slab {
 public:
  // Members are destroyed in the reverse order: the mapping goes before the memory.
  // `adopted`: the descriptor that the memory came by, if this process has not made it.
  VmmSlab(std::shared_ptr<const CudaContext> context, CudaAllocation memory, CudaAddresses addresses,
          CudaMapping mapping, size_t bytes, UniqueFd adopted = UniqueFd())
      : context_(std::move(context)),
        memory_(std::move(memory)),
        addresses_(std::move(addresses)),
        mapping_(std::move(mapping)),
        bytes_(bytes),
        adopted_(std::move(adopted)) {}

  size_t bytes() const override { return bytes_; }
  uint64_t address() const override { return addresses_.get(); }
  absl::StatusOr<UniqueFd> Export() const override {
    if (adopted_.valid()) {
      // No documentation says that what was imported can be exported.
      UniqueFd copy(::fcntl(adopted_.get(), F_DUPFD_CLOEXEC, 0));
      if (!copy.valid()) return absl::ErrnoToStatus(errno, "exporting a slab: dup of its descriptor");
      return copy;
    }
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    int fd = -1;
    RETURN_IF_ERROR(context_->Check(context_->driver().cuMemExportToShareableHandle(
                                        &fd, memory_.get(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                                    "cuMemExportToShareableHandle"));
    return UniqueFd(fd);
  }
  absl::StatusOr<IpcHandle> ipc_handle() const override {
    return absl::FailedPreconditionError(
        "this slab is handed over as a file descriptor, not as an IPC handle");
  }

 private:
  const std::shared_ptr<const CudaContext> context_;
  const CudaAllocation memory_;
  const CudaAddresses addresses_;
  const CudaMapping mapping_;
  const size_t bytes_;
  const UniqueFd adopted_;
};

class IpcSlab : public Slab {
 public:
  IpcSlab(CudaArray memory, const IpcHandle& handle, size_t bytes)
      : memory_(std::move(memory)), handle_(handle), bytes_(bytes) {}

  size_t bytes() const override { return bytes_; }
  uint64_t address() const override { return memory_.get(); }
  absl::StatusOr<UniqueFd> Export() const override {
    return absl::FailedPreconditionError(
        "this slab is handed over as an IPC handle, not as a file descriptor");
  }
  absl::StatusOr<IpcHandle> ipc_handle() const override { return handle_; }

 private:
  const CudaArray memory_;
  const IpcHandle handle_;
  const size_t bytes_;
};

struct Traits {
  std::string name;
  size_t total_bytes = 0;
  size_t granularity_bytes = 0;
};

absl::StatusOr<int> Attribute(const CudaContext& context, CUdevice_attribute attribute) {
  int value = 0;
  RETURN_IF_ERROR(context.Check(context.driver().cuDeviceGetAttribute(&value, attribute, context.device()),
                                absl::StrCat("cuDeviceGetAttribute ", static_cast<int>(attribute))));
  return value;
}

absl::StatusOr<Traits> Probe(const CudaContext& context) {
  constexpr struct {
    CUdevice_attribute attribute;
    const char* words;
  } kNeeds[] = {
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
       "memory handed over as file descriptors"},
  };
  for (const auto& need : kNeeds) {
    ASSIGN_OR_RETURN(const int supported, Attribute(context, need.attribute));
    if (supported != 0) continue;
    return absl::UnimplementedError(absl::StrCat(context.uuid(), " and its driver do not support ",
                                                 need.words, " (device attribute ",
                                                 static_cast<int>(need.attribute), ")"));
  }
  ASSIGN_OR_RETURN(const int mode, Attribute(context, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE));
  if (mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS && context.CheckEndsWithProcess().ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(context.uuid(),
                     " is in compute mode EXCLUSIVE_PROCESS: with this daemon no engine could open it;"
                     " nvidia-smi --compute-mode=DEFAULT allows both, and so does an MPS server"));
  }
  Traits traits;
  char name[256];
  const Driver& driver = context.driver();
  RETURN_IF_ERROR(
      context.Check(driver.cuDeviceGetName(name, sizeof name, context.device()), "cuDeviceGetName"));
  traits.name = name;
  RETURN_IF_ERROR(
      context.Check(driver.cuDeviceTotalMem(&traits.total_bytes, context.device()), "cuDeviceTotalMem"));
  ASSIGN_OR_RETURN(const size_t granularity_bytes, MemoryGranularity(context));
  traits.granularity_bytes = std::max(granularity_bytes, kSlabGranularityBytes);
  return traits;
}

class CudaDevice : public Device {
 public:
  CudaDevice(std::shared_ptr<const CudaContext> context, Traits traits, CudaStream zeroing)
      : context_(std::move(context)), traits_(std::move(traits)), zeroing_(std::move(zeroing)) {}

  const std::string& id() const override { return context_->uuid(); }
  const std::string& name() const override { return traits_.name; }
  std::string uuid_bytes() const override { return context_->uuid_bytes(); }
  size_t granularity_bytes() const override { return traits_.granularity_bytes; }
  size_t total_bytes() const override { return traits_.total_bytes; }

  absl::StatusOr<size_t> free_bytes() const override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    RETURN_IF_ERROR(
        context_->Check(context_->driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo"));
    return free_bytes;
  }

  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override {
    RETURN_IF_ERROR(CheckSize(bytes));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    ASSIGN_OR_RETURN(CudaAllocation memory, CreateMemory(context_, bytes));
    ASSIGN_OR_RETURN(CudaAddresses addresses, ReserveAddresses(context_, bytes));
    ASSIGN_OR_RETURN(CudaMapping mapping, MapMemory(context_, memory, addresses.get(), bytes));
    RETURN_IF_ERROR(Zero(addresses.get(), bytes));
    return std::make_unique<VmmSlab>(context_, std::move(memory), std::move(addresses), std::move(mapping),
                                     bytes);
  }

  absl::StatusOr<std::unique_ptr<Slab>> AdoptSlab(UniqueFd fd, size_t bytes) override {
    RETURN_IF_ERROR(CheckSize(bytes));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    ASSIGN_OR_RETURN(CudaAllocation memory, ImportMemory(context_, fd));
    ASSIGN_OR_RETURN(CudaAddresses addresses, ReserveAddresses(context_, bytes));
    ASSIGN_OR_RETURN(CudaMapping mapping, MapMemory(context_, memory, addresses.get(), bytes));
    return std::make_unique<VmmSlab>(context_, std::move(memory), std::move(addresses), std::move(mapping),
                                     bytes, std::move(fd));
  }

  absl::Status OutlivesProcesses() const override { return context_->CheckEndsWithProcess(); }

  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions&) override {
    return CudaKvCompute::Open(context_, {});
  }

  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) override {
    // A handle opens the whole 2 MiB blocks that the driver carved the allocation from, so an allocation that
    // leaves the process must consist of whole ones.
    RETURN_IF_ERROR(CheckSize(bytes));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const Driver& driver = context_->driver();
    CUdeviceptr address;
    const absl::Status status = context_->Check(driver.cuMemAlloc(&address, bytes), "cuMemAlloc");
    if (!status.ok()) return WithFreeBytes(*context_, status, bytes);
    CudaArray memory(context_, address);
    RETURN_IF_ERROR(Zero(address, bytes));
    CUipcMemHandle driver_handle;
    RETURN_IF_ERROR(context_->Check(driver.cuIpcGetMemHandle(&driver_handle, address), "cuIpcGetMemHandle"));
    IpcHandle handle;
    static_assert(sizeof handle == sizeof driver_handle);
    std::ranges::copy(std::as_bytes(std::span(driver_handle.reserved)), handle.begin());
    return std::make_unique<IpcSlab>(std::move(memory), handle, bytes);
  }

  absl::Status CopyAll(absl::Span<const Copy> copies) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    MutexLock lock(&mu_);
    const Driver& driver = context_->driver();
    absl::Status queued;
    for (const Copy& copy : copies) {
      queued = context_->Check(driver.cuMemcpyDtoDAsync(copy.to, copy.from, copy.bytes, zeroing_.get()),
                               "cuMemcpyDtoDAsync");
      if (!queued.ok()) break;
    }
    // Those before one that failed are under way.
    const absl::Status finished = context_->Finish(zeroing_.get(), "copying blocks");
    return finished.ok() ? queued : finished;
  }

 private:
  absl::Status CheckSize(size_t bytes) const {
    if (bytes != 0 && bytes % traits_.granularity_bytes == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("slab bytes: ", bytes, " is not a positive multiple of ",
                                                   traits_.granularity_bytes, ", the granularity of ", id()));
  }

  // Waits until the zeros are in memory: a new owner must never read an old one's data.
  absl::Status Zero(CUdeviceptr address, size_t bytes) {
    MutexLock lock(&mu_);
    const Driver& driver = context_->driver();
    RETURN_IF_ERROR(
        context_->Check(driver.cuMemsetD8Async(address, 0, bytes, zeroing_.get()), "cuMemsetD8Async"));
    return context_->Finish(zeroing_.get(), "zeroing a slab");
  }

  const std::shared_ptr<const CudaContext> context_;
  const Traits traits_;
  // Held while a slab is zeroed or blocks are copied, so that each waits for its own work only.
  Mutex mu_;
  const CudaStream zeroing_;
};

}  // namespace

absl::StatusOr<int> CudaDeviceCount() {
  ASSIGN_OR_RETURN(const Driver* driver, LoadDriver());
  int count = 0;
  RETURN_IF_ERROR(CudaStatus(*driver, driver->cuDeviceGetCount(&count), "cuDeviceGetCount"));
  return count;
}

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const std::string& ordinal_or_uuid) {
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::Open(ordinal_or_uuid));
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  ASSIGN_OR_RETURN(Traits traits, Probe(*context));
  ASSIGN_OR_RETURN(CudaStream zeroing, MakeStream(context));
  return std::make_unique<CudaDevice>(std::move(context), std::move(traits), std::move(zeroing));
}

}  // namespace kvpool
