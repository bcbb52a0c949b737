// Time that stands still until a test moves it.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CLOCK_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CLOCK_H_

#include <atomic>
#include <cstdint>

#include "server/base/clock.h"

namespace kvpool {

class FakeClock final : public Clock {
 public:
  uint64_t NowMs() const override { return now_ms_.load(); }
  void Advance(uint64_t ms) { now_ms_ += ms; }

 private:
  std::atomic<uint64_t> now_ms_{1000000};
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CLOCK_H_
