// Invariants that hold in every build: when one breaks, the daemon is wrong and must not go on.
#ifndef KVPOOL_PROTO_SUPPORT_CHECK_H_
#define KVPOOL_PROTO_SUPPORT_CHECK_H_

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace kvpool {

// Writes to stderr if it takes the words within 100 ms. Whoever comes here may hold mutexes that everybody waits for: a pipe
// that is full, as nobody reads it, must not keep the process from its end.
inline void WriteLastWords(const char* words, size_t size) {
  constexpr int kTries = 10, kTryMs = 10;
  for (int i = 0; i < kTries; ++i) {
    pollfd ready{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, kTryMs) != 1) continue;
    // Another thread may have taken the room since.
    iovec part{.iov_base = const_cast<char*>(words), .iov_len = size};
    if (pwritev2(STDERR_FILENO, &part, 1, -1, RWF_NOWAIT) >= 0) return;
    if (errno == EAGAIN) continue;
    // Not every file and terminal can be told not to wait. That there are no words then is no reason to go on.
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words, size);
    return;
  }
}

[[noreturn, gnu::cold, gnu::noinline, gnu::format(printf, 4, 5)]] inline void CheckFailed(
    const char* file, int line, const char* condition, const char* format, ...) {
  // Less than PIPE_BUF: a pipe takes all of it or nothing.
  char words[2048];
  static constexpr size_t kMost = sizeof(words) - 1;
  const auto add = [](size_t at, int added) {
    return std::min(kMost, at + static_cast<size_t>(std::max(added, 0)));
  };
  size_t size =
      add(0, std::snprintf(words, sizeof(words), "%s:%d: invariant broken: %s: ", file, line, condition));
  va_list values;
  va_start(values, format);
  size = add(size, std::vsnprintf(words + size, sizeof(words) - size, format, values));
  va_end(values);
  words[size++] = '\n';
  WriteLastWords(words, size);
  std::abort();
}

}  // namespace kvpool

// KVPOOL_CHECK(refs > 0, "block %u has no holder", id): prints and aborts.
#define KVPOOL_CHECK(condition, ...)                                      \
  do {                                                                    \
    if (__builtin_expect(!(condition), 0)) {                              \
      ::kvpool::CheckFailed(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    }                                                                     \
  } while (false)

#endif  // KVPOOL_PROTO_SUPPORT_CHECK_H_
