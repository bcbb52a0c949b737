// Whether a policy that thinks is asked at all.
//
//   closed      it is asked; kTripAfter decisions in a row that came too late open the breaker
//   open        it is not, until the cool-down is over
//   half-open   one decision is tried: in time, the breaker closes; late, it opens for twice as long as before
//
// Not thread-safe. Time comes in as an argument.
#ifndef KVPOOL_SERVER_REPLACEMENT_BREAKER_H_
#define KVPOOL_SERVER_REPLACEMENT_BREAKER_H_

#include <algorithm>
#include <cstdint>

namespace kvpool {

class Breaker {
 public:
  enum class State : uint8_t { kClosed, kHalfOpen, kOpen };
  // A machine that is busy for a moment delays one decision or two.
  static constexpr uint32_t kTripAfter = 8;
  static constexpr uint64_t kFirstCoolDownMs = 1000, kMostCoolDownMs = 60000;

  State state(uint64_t now_ms) const {
    if (!open_) return State::kClosed;
    return trying_ || now_ms - opened_ms_ >= cool_down_ms_ ? State::kHalfOpen : State::kOpen;
  }
  // Whether to ask now. In half-open the first caller is the one that tries.
  bool Admit(uint64_t now_ms) {
    if (!open_) return true;
    if (trying_ || state(now_ms) == State::kOpen) return false;
    return trying_ = true;
  }
  // Of a decision that was admitted.
  void OnDecision(uint64_t now_ms, bool in_time) {
    trying_ = false;
    if (in_time) {
      open_ = false;
      late_ = 0;
      cool_down_ms_ = kFirstCoolDownMs;
    } else if (open_) {
      opened_ms_ = now_ms;
      cool_down_ms_ = std::min(2 * cool_down_ms_, kMostCoolDownMs);
    } else if (++late_ >= kTripAfter) {
      open_ = true;
      opened_ms_ = now_ms;
      ++times_opened_;
    }
  }
  // An admitted decision came to nothing: it was neither late nor in time.
  void OnNone() { trying_ = false; }
  uint64_t times_opened() const { return times_opened_; }

 private:
  bool open_ = false, trying_ = false;
  uint32_t late_ = 0;  // In a row.
  uint64_t opened_ms_ = 0, cool_down_ms_ = kFirstCoolDownMs, times_opened_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_BREAKER_H_
