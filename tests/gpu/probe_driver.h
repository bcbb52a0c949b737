// Driver functions that only the GPU check calls.
#ifndef KVPOOL_TESTS_GPU_PROBE_DRIVER_H_
#define KVPOOL_TESTS_GPU_PROBE_DRIVER_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cuda/driver/driver.h"
#include "tests/device/driver_function.h"

// clang-format off
#define KVPOOL_PROBE_FUNCTIONS(X)                                                \
  X(cuDriverGetVersion) X(cuIpcGetEventHandle) X(cuIpcOpenEventHandle)           \
  X(cuStreamWaitEvent) X(cuStreamWriteValue64) X(cuStreamWaitValue64)            \
  X(cuMemcpyDtoDAsync)
// clang-format on

namespace kvpool {

struct ProbeDriver {
#define KVPOOL_PROBE_FIELD(name) decltype(&::name) name = nullptr;
  KVPOOL_PROBE_FUNCTIONS(KVPOOL_PROBE_FIELD)
#undef KVPOOL_PROBE_FIELD
};

// REQUIRES: LoadDriver() was OK.
inline absl::StatusOr<ProbeDriver> LoadProbeDriver() {
  ProbeDriver probe;
#define KVPOOL_PROBE_NAME(name) #name
#define KVPOOL_PROBE_LOAD(name)                                                                  \
  probe.name = reinterpret_cast<decltype(&::name)>(FindDriverFunction(KVPOOL_PROBE_NAME(name))); \
  if (probe.name == nullptr) {                                                                   \
    return absl::UnavailableError(absl::StrCat("the driver has no ", KVPOOL_PROBE_NAME(name)));  \
  }
  KVPOOL_PROBE_FUNCTIONS(KVPOOL_PROBE_LOAD)
#undef KVPOOL_PROBE_LOAD
#undef KVPOOL_PROBE_NAME
  return probe;
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_GPU_PROBE_DRIVER_H_
