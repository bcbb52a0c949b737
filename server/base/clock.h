// The clock that the daemon's logic reads; tests move theirs by hand.
#ifndef KVPOOL_SERVER_BASE_CLOCK_H_
#define KVPOOL_SERVER_BASE_CLOCK_H_

#include <cstdint>

namespace kvpool {

class Clock {
 public:
  virtual ~Clock() = default;
  // Milliseconds since an arbitrary start; never moves back.
  virtual uint64_t NowMs() const = 0;
};

// The system's CLOCK_MONOTONIC.
Clock* MonotonicClock();

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_CLOCK_H_
