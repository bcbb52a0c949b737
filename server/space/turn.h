// A caller's turn at a space, as the space's parts see it: the time, and what to do once the mutex
// is free again.
//
// Only SpaceTurn (space.h) makes one. It locks the space's mutex and settles what was deferred, so a function
// that takes a Turn& runs under the mutex, and nothing it defers is forgotten.
#ifndef KVPOOL_SERVER_SPACE_TURN_H_
#define KVPOOL_SERVER_SPACE_TURN_H_

#include <cstdint>

#include "server/space/deferred.h"

namespace kvpool {

class Turn {
 public:
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  const uint64_t now;  // ms. The clock is read once, when the mutex has been taken.
  Deferred& deferred;

 protected:
  Turn(uint64_t now, Deferred* deferred) : now(now), deferred(*deferred) {}
  ~Turn() = default;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_TURN_H_
