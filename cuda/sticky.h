// Marks an error after which a GPU context is unusable. IsSticky (cuda/device.h) reads the mark.
#ifndef KVPOOL_CUDA_STICKY_H_
#define KVPOOL_CUDA_STICKY_H_

#include "absl/status/status.h"

namespace kvpool {

void MarkSticky(absl::Status* status);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_STICKY_H_
