// Whether a server is worth asking.
//
//   closed     requests go to it
//   open       kMostFailures requests or connections failed in a row: all fail at once, for a pause that doubles each time
//   half open  the pause is over, and it is tried: if it answers, the breaker is closed, and one more failure opens it again
//
// A reply to a request is what ends a row of failures. Not thread-safe.
#ifndef KVPOOL_SERVER_TIERS_CIRCUIT_BREAKER_H_
#define KVPOOL_SERVER_TIERS_CIRCUIT_BREAKER_H_

#include <chrono>
#include <cstdint>

namespace kvpool {

class CircuitBreaker {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State : uint8_t { kClosed, kOpen, kHalfOpen };
  static constexpr int kMostFailures = 3;

  CircuitBreaker(std::chrono::milliseconds first_pause, std::chrono::milliseconds longest_pause)
      : first_pause_(first_pause), longest_pause_(longest_pause), pause_(first_pause) {}

  State state() const { return state_; }
  bool closed() const { return state_ == State::kClosed; }
  // REQUIRES: it is open. The pause is over then.
  Clock::time_point open_until() const { return open_until_; }
  // It answered a request. What was asked before does not make a server good that is left alone.
  void Replied();
  // False: that is one failure more, and not yet enough. True: the caller calls Open, once it knows why.
  bool Failed() { return ++failures_ >= kMostFailures && closed(); }
  void Open(Clock::time_point now);
  // REQUIRES: it is open.
  void TryAgain() { state_ = State::kHalfOpen; }
  // REQUIRES: it is half open. It answers again.
  void Close();

 private:
  const std::chrono::milliseconds first_pause_, longest_pause_;
  State state_ = State::kClosed;
  int failures_ = 0;
  std::chrono::milliseconds pause_;
  Clock::time_point open_until_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_CIRCUIT_BREAKER_H_
