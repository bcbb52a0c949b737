// A thread that an operator can tell from the others: `top -H`, `perf` and debuggers show its name.
#ifndef KVPOOL_PROTO_SUPPORT_NAMED_THREAD_H_
#define KVPOOL_PROTO_SUPPORT_NAMED_THREAD_H_

#include <sys/prctl.h>

#include <cstddef>
#include <thread>
#include <utility>

namespace kvpool {

// The kernel keeps 15 bytes of a name.
template <size_t kBytes, typename Run>
std::thread NamedThread(const char (&name)[kBytes], Run run) {
  static_assert(kBytes <= 16);
  return std::thread([&name, run = std::move(run)]() mutable {
    prctl(PR_SET_NAME, name);
    run();
  });
}

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_NAMED_THREAD_H_
