// Time that stands still until a test moves it.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CLOCK_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CLOCK_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "server/base/clock.h"

namespace kvpool {

class FakeClock final : public Clock {
 public:
  uint64_t NowMs() const override {
    if (on_read) on_read();
    return now_ms_.load();
  }
  void Advance(uint64_t ms) { now_ms_ += ms; }
  std::function<void()> on_read;  // It runs before each reading. Set it while nobody reads.

 private:
  std::atomic<uint64_t> now_ms_{1000000};
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CLOCK_H_
