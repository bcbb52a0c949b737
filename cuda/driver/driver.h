// The CUDA driver API as one table of functions, filled from libcuda.so.1 when a GPU is first asked for: one
// binary runs with and without a driver. Included by the CUDA side only: it needs the toolkit's headers, for
// types.
#ifndef KVPOOL_CUDA_DRIVER_DRIVER_H_
#define KVPOOL_CUDA_DRIVER_DRIVER_H_

#include <cuda.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Every driver function we call. cuda.h renames many of these by macro to the version that fits its types
// (cuMemAlloc is cuMemAlloc_v2): field, type and symbol follow, since all three come from the same expansion.
// clang-format off
#define KVPOOL_CUDA_DRIVER_FUNCTIONS(X)                                                           \
  X(cuInit) X(cuGetErrorName) X(cuGetErrorString)                                                 \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid)                        \
  X(cuDeviceGetAttribute) X(cuDeviceTotalMem)                                                     \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxPushCurrent) X(cuCtxPopCurrent) \
  X(cuMemGetInfo) X(cuMemGetAllocationGranularity)                                                \
  X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree)                       \
  X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)                                                     \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)                               \
  X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost)                                   \
  X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle)                               \
  X(cuMemsetD8Async) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync)                                    \
  X(cuStreamCreate) X(cuStreamCreateWithPriority) X(cuCtxGetStreamPriorityRange)                  \
  X(cuStreamDestroy) X(cuStreamSynchronize) X(cuEventElapsedTime)                                 \
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize)       \
  X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuLaunchKernel)
// clang-format on

namespace kvpool {

struct Driver {
#define KVPOOL_DRIVER_FIELD(name) decltype(&::name) name = nullptr;
  KVPOOL_CUDA_DRIVER_FUNCTIONS(KVPOOL_DRIVER_FIELD)
#undef KVPOOL_DRIVER_FIELD
};

// The driver of this process, loaded and initialised (cuInit) on the first call; later calls get the same
// answer. The library is libcuda.so.1, or what the environment variable KVPOOL_LIBCUDA names. UNAVAILABLE: no
// such library, a library without one of the functions, or no GPU; with the loader's or the driver's words.
absl::StatusOr<const Driver*> LoadDriver();

// A function of the loaded driver that is not in the table; nullptr where the driver has none of this name.
// REQUIRES: LoadDriver() was OK.
void* FindDriverFunction(const char* name);

// The one place where a CUresult becomes a Status: `doing` and the driver's own name and words for the error.
// Out of memory is RESOURCE_EXHAUSTED; errors after which the context is unusable are DATA_LOSS and IsSticky
// (cuda/device.h).
absl::Status CudaStatus(const Driver& driver, CUresult result, absl::string_view doing);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DRIVER_DRIVER_H_
