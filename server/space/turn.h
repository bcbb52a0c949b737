// A caller's turn at a space, as the space's parts see it: the time, and what to do once the mutex
// is free again.
//
// Only SpaceTurn (space.h) makes one. It locks the space's mutex and settles what was deferred, so a function
// that takes a Turn& runs under the mutex, and nothing it defers is forgotten.
#ifndef KVPOOL_SERVER_SPACE_TURN_H_
#define KVPOOL_SERVER_SPACE_TURN_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "server/space/deferred.h"

namespace kvpool {

class Turn {
 public:
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  uint64_t now;  // ms. The clock is read when the mutex has been taken.
  Deferred& deferred;

  // So many names, blocks or keys, are some 0.1 ms of work, and 0.7 ms where each has a block evicted.
  static constexpr size_t kNames = 1024;
  // Counts work. The mutex is kept.
  void Worked(size_t names) { worked_ += names; }
  // Since the mutex was taken.
  size_t worked() const { return worked_; }
  // After much work lets go of the mutex, lets those in who wait, and takes it again. Anything may have changed
  // then: the session may have ended, and its holder may be another's.
  void Breathe() {
    if (worked_ >= kNames && may_pause_) Pause(Rest::kShort);
  }
  // kLong: for one that waits until another has done its work.
  enum class Rest { kShort, kLong };
  virtual void Pause(Rest rest) = 0;
  // Does work that needs nothing of the space while the mutex is free. It is a pause as any other.
  virtual void Outside(absl::FunctionRef<void()> work) = 0;

  // While it lives the turn keeps the mutex: its caller is in the middle of something.
  class Unbroken {
   public:
    explicit Unbroken(Turn& turn) : turn_(turn), before_(turn.may_pause_) { turn_.may_pause_ = false; }
    ~Unbroken() { turn_.may_pause_ = before_; }
    Unbroken(const Unbroken&) = delete;
    Unbroken& operator=(const Unbroken&) = delete;

   private:
    Turn& turn_;
    const bool before_;
  };

 protected:
  Turn(uint64_t now, Deferred* deferred) : now(now), deferred(*deferred) {}
  ~Turn() = default;
  void WorkBegins() { worked_ = 0; }

 private:
  size_t worked_ = 0;
  bool may_pause_ = true;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_TURN_H_
