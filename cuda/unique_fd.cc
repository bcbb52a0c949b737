#include <unistd.h>

#include "cuda/device.h"

namespace kvpool {

void UniqueFd::Reset(int fd) {
  // EINTR and EIO from close still close: Linux has given the number away already, so there is nothing to
  // retry.
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

}  // namespace kvpool
