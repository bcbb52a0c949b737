// One GPU's primary context in this process, and owners for the objects that the driver makes in it.
#ifndef KVPOOL_CUDA_DRIVER_CUDA_CONTEXT_H_
#define KVPOOL_CUDA_DRIVER_CUDA_CONTEXT_H_

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cuda/device.h"
#include "cuda/driver/driver.h"

namespace kvpool {

// Makes one context current in its thread while it lives, and lets the thread make calls that a graph which another captures
// would forbid (the global mode, PyTorch's default): our threads touch no stream of an engine's. Its destructor restores
// the thread's own context and mode.
class CurrentContext {
 public:
  CurrentContext(CurrentContext&& other) noexcept
      : driver_(std::exchange(other.driver_, nullptr)), capture_mode_(other.capture_mode_) {}
  ~CurrentContext();

 private:
  friend class CudaContext;
  CurrentContext(const Driver* driver, CUstreamCaptureMode capture_mode)
      : driver_(driver), capture_mode_(capture_mode) {}
  const Driver* driver_;
  CUstreamCaptureMode capture_mode_;  // the thread's own
};

// The primary context, which the CUDA runtime and PyTorch use too: an engine's streams and ours share it.
// Immutable; any thread may call.
class CudaContext {
 public:
  // Takes an ordinal ("0") or a UUID ("GPU-…"). INVALID_ARGUMENT: it is neither. NOT_FOUND lists the GPUs.
  static absl::StatusOr<std::shared_ptr<const CudaContext>> Open(const std::string& ordinal_or_uuid);
  // Takes the 16 bytes of the UUID.
  static absl::StatusOr<std::shared_ptr<const CudaContext>> OpenUuid(const std::string& uuid_bytes);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const Driver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  const std::string& uuid_bytes() const { return uuid_bytes_; }
  const std::string& uuid() const { return uuid_; }  // "GPU-8-4-4-4-12"

  absl::StatusOr<CurrentContext> MakeCurrent() const;
  // These two wait for all work of a stream, and of the context, an engine's too. REQUIRES: the context is current. An
  // error is sticky, whatever the driver calls it: nobody knows then whether the GPU still writes. But a context of which
  // a stream captures a graph can't be waited for: the capture is broken, and the error, FAILED_PRECONDITION, is not sticky.
  absl::Status Finish(CUstream stream, absl::string_view doing) const;
  absl::Status FinishAll(absl::string_view doing) const;
  // FAILED_PRECONDITION: what a process has begun on this GPU goes on when it is killed.
  absl::Status CheckEndsWithProcess() const;
  absl::Status Check(CUresult result, absl::string_view doing) const {
    return CudaStatus(driver_, result, doing);
  }
  // For destructors, which can't return an error: makes the context current, calls `function`, and prints to
  // stderr if that fails. It does not crash, since it runs inside engines too, and a context that is gone
  // took the memory with it.
  template <typename Function, typename... Args>
  void GiveBack(const char* what, Function function, Args... args) const {
    const absl::StatusOr<CurrentContext> current = MakeCurrent();
    ReportLost(what, current.ok() ? Check(function(args...), what) : current.status());
  }

 private:
  CudaContext(const Driver& driver, CUdevice device, CUcontext context, std::string uuid_bytes);
  static absl::StatusOr<std::shared_ptr<const CudaContext>> Retain(const Driver& driver, CUdevice device);
  static void ReportLost(const char* what, const absl::Status& status);

  const Driver& driver_;
  const CUdevice device_;
  const CUcontext context_;
  const std::string uuid_bytes_;
  const std::string uuid_;
};

// Owns an object of the driver, which its destructor releases by the driver function `kFunction`: acquire and
// adopt on one line.
template <auto kFunction, typename... Args>
class CudaOwned {
 public:
  CudaOwned() = default;
  explicit CudaOwned(std::shared_ptr<const CudaContext> context, Args... args)
      : context_(std::move(context)), args_(args...) {}
  CudaOwned(CudaOwned&&) noexcept = default;
  CudaOwned& operator=(CudaOwned&& other) noexcept {
    if (this != &other) {
      Reset();
      context_ = std::move(other.context_);
      args_ = other.args_;
    }
    return *this;
  }
  ~CudaOwned() { Reset(); }

  // Releases the object now; if that fails it is still owned. REQUIRES: valid(), and the context is current.
  absl::Status Release(absl::string_view doing) {
    const CUresult result =
        std::apply([this](Args... args) { return (context_->driver().*kFunction)(args...); }, args_);
    absl::Status released = context_->Check(result, doing);
    if (released.ok()) context_ = nullptr;
    return released;
  }

  bool valid() const { return context_ != nullptr; }
  auto get() const { return std::get<0>(args_); }

 private:
  void Reset() {
    if (context_ == nullptr) return;
    std::apply(
        [this](Args... args) { context_->GiveBack("giving back", context_->driver().*kFunction, args...); },
        args_);
    context_ = nullptr;
  }

  std::shared_ptr<const CudaContext> context_;
  std::tuple<Args...> args_;
};

using CudaAllocation = CudaOwned<&Driver::cuMemRelease, CUmemGenericAllocationHandle>;
using CudaAddresses = CudaOwned<&Driver::cuMemAddressFree, CUdeviceptr, size_t>;
using CudaMapping = CudaOwned<&Driver::cuMemUnmap, CUdeviceptr, size_t>;
using CudaArray = CudaOwned<&Driver::cuMemFree, CUdeviceptr>;
using CudaPinned = CudaOwned<&Driver::cuMemFreeHost, void*>;
using CudaImport = CudaOwned<&Driver::cuIpcCloseMemHandle, CUdeviceptr>;
using CudaStream = CudaOwned<&Driver::cuStreamDestroy, CUstream>;
using CudaEvent = CudaOwned<&Driver::cuEventDestroy, CUevent>;
using CudaModule = CudaOwned<&Driver::cuModuleUnload, CUmodule>;

// All functions below REQUIRE that the context is current.

// A stream that does not synchronise with the default stream.
absl::StatusOr<CudaStream> MakeStream(const std::shared_ptr<const CudaContext>& context);
// The same with the lowest priority: its work waits for that of the process's other streams.
absl::StatusOr<CudaStream> MakeLowPriorityStream(const std::shared_ptr<const CudaContext>& context);

// Memory of the virtual-memory-management (VMM) functions that can leave the process as a file descriptor.
CUmemAllocationProp ShareableMemory(const CudaContext& context);
absl::StatusOr<CudaAllocation> CreateMemory(const std::shared_ptr<const CudaContext>& context, size_t bytes);
// Memory that another process exported as `fd`, which stays the caller's.
absl::StatusOr<CudaAllocation> ImportMemory(const std::shared_ptr<const CudaContext>& context,
                                            const UniqueFd& fd);
absl::StatusOr<CudaAddresses> ReserveAddresses(const std::shared_ptr<const CudaContext>& context,
                                               size_t bytes);
// Maps the first `bytes` of `memory`, readable and writable.
absl::StatusOr<CudaMapping> MapMemory(const std::shared_ptr<const CudaContext>& context,
                                      const CudaAllocation& memory, CUdeviceptr address, size_t bytes);
absl::StatusOr<size_t> MemoryGranularity(const CudaContext& context);
// The status of a failed allocation with "GPU-…: 4096 bytes asked, 10 of 20 free" in front of its message.
absl::Status WithFreeBytes(const CudaContext& context, const absl::Status& status, size_t bytes);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DRIVER_CUDA_CONTEXT_H_
