#include "server/tiers/circuit_breaker.h"

#include <algorithm>

namespace kvpool {

void CircuitBreaker::Replied() {
  if (!closed()) return;
  failures_ = 0;
  pause_ = first_pause_;
}

void CircuitBreaker::Open(Clock::time_point now) {
  state_ = State::kOpen;
  open_until_ = now + pause_;
  pause_ = std::min(2 * pause_, longest_pause_);
}

void CircuitBreaker::Close() {
  state_ = State::kClosed;
  failures_ = kMostFailures - 1;
}

}  // namespace kvpool
