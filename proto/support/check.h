// Invariants that hold in every build: when one breaks, the daemon is wrong and must not go on.
#ifndef KVPOOL_PROTO_SUPPORT_CHECK_H_
#define KVPOOL_PROTO_SUPPORT_CHECK_H_

#include <cstdio>
#include <cstdlib>

// KVPOOL_CHECK(refs > 0, "block %u has no holder", id): prints and aborts.
#define KVPOOL_CHECK(condition, ...)                                                         \
  do {                                                                                       \
    if (__builtin_expect(!(condition), 0)) {                                                 \
      std::fprintf(stderr, "%s:%d: invariant broken: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                                     \
      std::fputc('\n', stderr);                                                              \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

#endif  // KVPOOL_PROTO_SUPPORT_CHECK_H_
