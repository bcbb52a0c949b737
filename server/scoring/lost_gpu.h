// The end of a daemon whose GPU is lost: its context is gone, and nobody knows what its memory holds. Neither this daemon nor
// the next may serve that.
#ifndef KVPOOL_SERVER_SCORING_LOST_GPU_H_
#define KVPOOL_SERVER_SCORING_LOST_GPU_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvpool {

// Ends the process if the error is one that a GPU does not get over (IsSticky, cuda/device.h); any thread may call.
void EndIfGpuIsLost(const absl::Status& status, absl::string_view doing);
// What is done before the process ends, on the thread that met the error. Set it before there are others.
void BeforeEndForLostGpu(std::function<void()> tell);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_LOST_GPU_H_
