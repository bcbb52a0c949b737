// The descriptors of this process, which a story may run out of and must not leave behind.
#ifndef KVPOOL_TESTS_FUZZ_DESCRIPTORS_H_
#define KVPOOL_TESTS_FUZZ_DESCRIPTORS_H_

#include <fcntl.h>

#include "proto/support/unique_fd.h"

namespace kvpool::fuzz {

// A descriptor of some file, for messages, logs and probes.
inline int AnyFile() {
  static const UniqueFd file(open("/dev/null", O_RDWR | O_CLOEXEC));
  return file.get();
}

inline int LowestFreeDescriptor() {
  UniqueFd probe(fcntl(AnyFile(), F_DUPFD_CLOEXEC, 0));
  return probe.get();
}

// How many there are, of those that a story may reach.
inline int OpenDescriptors() {
  constexpr int kMost = 128;
  (void)AnyFile();  // It is there from the first count on.
  int open = 0;
  for (int fd = 0; fd < kMost; ++fd) open += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return open;
}

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_DESCRIPTORS_H_
