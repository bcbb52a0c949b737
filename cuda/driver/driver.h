// The CUDA driver API as one table of functions, loaded from libcuda.so.1 when a GPU is first asked for, so
// that one binary runs with and without a driver. Only sources of the CUDA side include this: it needs the
// toolkit's headers.
#ifndef KVPOOL_CUDA_DRIVER_DRIVER_H_
#define KVPOOL_CUDA_DRIVER_DRIVER_H_

#include <cuda.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Every driver function that each driver must have. cuda.h renames many of these by macro to the version that fits
// its types (cuMemAlloc is cuMemAlloc_v2). Field, type and symbol agree, since all three come from the
// same expansion.
// clang-format off
#define KVPOOL_CUDA_DRIVER_FUNCTIONS(X)                                                           \
  X(cuInit) X(cuGetErrorName) X(cuGetErrorString)                                                 \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid)                        \
  X(cuDeviceGetAttribute) X(cuDeviceTotalMem)                                                     \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxPushCurrent) X(cuCtxPopCurrent) \
  X(cuCtxSynchronize) X(cuThreadExchangeStreamCaptureMode) X(cuStreamIsCapturing)                 \
  X(cuMemGetInfo) X(cuMemGetAllocationGranularity)                                                \
  X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree)                       \
  X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)                                                     \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)                               \
  X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost)                                   \
  X(cuMemHostRegister) X(cuMemHostUnregister)                                                     \
  X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle)                               \
  X(cuMemsetD8Async) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync)               \
  X(cuStreamCreate) X(cuStreamCreateWithPriority) X(cuCtxGetStreamPriorityRange)                  \
  X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuEventElapsedTime)            \
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize)       \
  X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuLaunchKernel)
// clang-format on

namespace kvpool {

struct Driver {
#define KVPOOL_DRIVER_FIELD(name) decltype(&::name) name = nullptr;
  KVPOOL_CUDA_DRIVER_FUNCTIONS(KVPOOL_DRIVER_FIELD)
#undef KVPOOL_DRIVER_FIELD
  // cuMemcpyBatchAsync as CUDA 13 has it, and as 12.8 and 12.9 do, which cuda.h does not declare any more; null where the driver has
  // none of it.
  decltype(&::cuMemcpyBatchAsync) memcpy_batch = nullptr;
  CUresult (*memcpy_batch_12_8)(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                CUmemcpyAttributes* attributes, size_t* attributes_from,
                                size_t attributes_count, size_t* failed, CUstream stream) = nullptr;
};

// The driver of this process, which the first call loads and initialises (cuInit); later calls return the
// same. The library is the one that the environment variable KVPOOL_LIBCUDA names, else libcuda.so.1.
// UNAVAILABLE: there is no such library, it lacks one of the functions, or there is no GPU; with the loader's
// or the driver's words.
absl::StatusOr<const Driver*> LoadDriver();

// The one place where a CUresult becomes a Status, with `doing` and the driver's name and words for the
// error. Out of memory is RESOURCE_EXHAUSTED; an error after which the context is unusable is DATA_LOSS and
// IsSticky (cuda/device.h).
absl::Status CudaStatus(const Driver& driver, CUresult result, absl::string_view doing);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DRIVER_DRIVER_H_
