#include "cuda/driver/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "cuda/sticky.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

absl::StatusOr<Driver> Load() {
  const char* path = ::secure_getenv("KVPOOL_LIBCUDA");
  if (path == nullptr) path = "libcuda.so.1";
  // Never closed: the driver may have threads.
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::UnavailableError(absl::StrCat("no CUDA driver: ", ::dlerror()));
  Driver driver;
#define KVPOOL_DRIVER_NAME(name) #name
#define KVPOOL_DRIVER_LOAD(name)                                                                      \
  driver.name = reinterpret_cast<decltype(&::name)>(::dlsym(library, KVPOOL_DRIVER_NAME(name)));      \
  if (driver.name == nullptr) {                                                                       \
    return absl::UnavailableError(                                                                    \
        absl::StrCat("the CUDA driver ", path, " is too old: it has no ", KVPOOL_DRIVER_NAME(name))); \
  }
  KVPOOL_CUDA_DRIVER_FUNCTIONS(KVPOOL_DRIVER_LOAD)
#undef KVPOOL_DRIVER_LOAD
#undef KVPOOL_DRIVER_NAME
  driver.memcpy_batch =
      reinterpret_cast<decltype(driver.memcpy_batch)>(::dlsym(library, "cuMemcpyBatchAsync_v2"));
  driver.memcpy_batch_12_8 =
      reinterpret_cast<decltype(driver.memcpy_batch_12_8)>(::dlsym(library, "cuMemcpyBatchAsync"));
  const absl::Status status = CudaStatus(driver, driver.cuInit(0), "cuInit");
  if (!status.ok()) return absl::UnavailableError(status.message());
  return driver;
}

struct Meaning {
  CUresult result;
  absl::StatusCode code;
};
constexpr absl::StatusCode kSticky = absl::StatusCode::kDataLoss;
constexpr Meaning kMeanings[] = {
    {CUDA_ERROR_OUT_OF_MEMORY, absl::StatusCode::kResourceExhausted},
    {CUDA_ERROR_NOT_PERMITTED, absl::StatusCode::kPermissionDenied},
    {CUDA_ERROR_NOT_SUPPORTED, absl::StatusCode::kUnimplemented},
    {CUDA_ERROR_NO_DEVICE, absl::StatusCode::kUnavailable},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, absl::StatusCode::kUnavailable},
    {CUDA_ERROR_STUB_LIBRARY, absl::StatusCode::kUnavailable},
    {CUDA_ERROR_SYSTEM_NOT_READY, absl::StatusCode::kUnavailable},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, absl::StatusCode::kUnavailable},
    {CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, absl::StatusCode::kUnavailable},
    // After one of these every call in the context fails with the same error until the process ends.
    {CUDA_ERROR_ECC_UNCORRECTABLE, kSticky},
    {CUDA_ERROR_NVLINK_UNCORRECTABLE, kSticky},
    {CUDA_ERROR_CONTAINED, kSticky},
    {CUDA_ERROR_ILLEGAL_ADDRESS, kSticky},
    {CUDA_ERROR_LAUNCH_TIMEOUT, kSticky},
    {CUDA_ERROR_ASSERT, kSticky},
    {CUDA_ERROR_HARDWARE_STACK_ERROR, kSticky},
    {CUDA_ERROR_ILLEGAL_INSTRUCTION, kSticky},
    {CUDA_ERROR_MISALIGNED_ADDRESS, kSticky},
    {CUDA_ERROR_INVALID_ADDRESS_SPACE, kSticky},
    {CUDA_ERROR_INVALID_PC, kSticky},
    {CUDA_ERROR_LAUNCH_FAILED, kSticky},
    {CUDA_ERROR_TENSOR_MEMORY_LEAK, kSticky},
    {CUDA_ERROR_EXTERNAL_DEVICE, kSticky},
    {CUDA_ERROR_MPS_CLIENT_TERMINATED, kSticky},
};

absl::StatusCode CodeOf(CUresult result) {
  const Meaning* meaning = std::ranges::find(kMeanings, result, &Meaning::result);
  return meaning != std::end(kMeanings) ? meaning->code : absl::StatusCode::kInternal;
}

}  // namespace

absl::StatusOr<const Driver*> LoadDriver() {
  static const absl::StatusOr<Driver>& driver = *new absl::StatusOr<Driver>(Load());
  if (!driver.ok()) return driver.status();
  return &*driver;
}

absl::Status CudaStatus(const Driver& driver, CUresult result, absl::string_view doing) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* words = nullptr;
  // A driver older than the error has no words for it.
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS) name = "unknown error";
  if (driver.cuGetErrorString(result, &words) != CUDA_SUCCESS) words = "no words for it";
  const absl::StatusCode code = CodeOf(result);
  absl::Status status(code,
                      absl::StrCat(doing, ": ", name, " (", static_cast<int>(result), ": ", words, ")"));
  if (code == kSticky) MarkSticky(&status);
  return status;
}

}  // namespace kvpool
