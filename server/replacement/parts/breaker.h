// Whether a policy that thinks is asked at all.
//
//   closed      it is asked; kTripAfter decisions in a row that came too late open the breaker
//   open        it is not, until the cool-down is over
//   half-open   one decision is tried: in time, the breaker closes; late, it opens for twice as long as before
//
// A decision that was admitted before the breaker opened changes nothing: it says how things were. Not thread-safe. Time
// comes in as an argument.
#ifndef KVPOOL_SERVER_REPLACEMENT_PARTS_BREAKER_H_
#define KVPOOL_SERVER_REPLACEMENT_PARTS_BREAKER_H_

#include <algorithm>
#include <cstdint>
#include <optional>

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
  // To be given back with what came of the decision. Nothing: do not ask now. In half-open the first caller is the one
  // that tries.
  using Ticket = uint64_t;
  std::optional<Ticket> Admit(uint64_t now_ms) {
    if (trying_ || state(now_ms) == State::kOpen) return std::nullopt;
    trying_ = open_;
    return times_opened_;
  }
  void OnDecision(Ticket ticket, uint64_t now_ms, bool in_time) {
    if (ticket != times_opened_) return;
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
  // The decision came to nothing: it was neither late nor in time.
  void OnNone(Ticket ticket) {
    if (ticket == times_opened_) trying_ = false;
  }
  uint64_t times_opened() const { return times_opened_; }

 private:
  bool open_ = false, trying_ = false;
  uint32_t late_ = 0;  // In a row.
  uint64_t opened_ms_ = 0, cool_down_ms_ = kFirstCoolDownMs, times_opened_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_PARTS_BREAKER_H_
