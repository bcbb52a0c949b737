#include "server/base/clock.h"

#include <time.h>

namespace kvpool {
namespace {

class SystemClock final : public Clock {
 public:
  uint64_t NowMs() const override {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1000000;
  }
};

}  // namespace

Clock* MonotonicClock() {
  static SystemClock clock;
  return &clock;
}

}  // namespace kvpool
