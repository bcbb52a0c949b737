// Random bytes for secrets: tokens and hash seeds.
#ifndef KVPOOL_SERVER_BASE_RANDOM_BYTES_H_
#define KVPOOL_SERVER_BASE_RANDOM_BYTES_H_

#include <sys/random.h>

#include <cerrno>
#include <string>

#include "proto/support/check.h"

namespace kvpool {

// `size` bytes of the kernel's generator. Waits only until that is seeded, early in boot.
inline std::string RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t got = getrandom(bytes.data() + done, size - done, 0);
    KVPOOL_CHECK(got > 0 || errno == EINTR, "getrandom: errno %d", errno);
    if (got > 0) done += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_RANDOM_BYTES_H_
