// The mark on errors after which a GPU context is gone. Reading it (IsSticky) is part of cuda/device.h.
#ifndef KVPOOL_CUDA_STICKY_H_
#define KVPOOL_CUDA_STICKY_H_

#include "absl/status/status.h"

namespace kvpool {

void MarkSticky(absl::Status* status);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_STICKY_H_
