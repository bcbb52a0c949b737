// How much work a call is, in blocks and keys (Turn::kNames of them are some 0.1 ms): what it names, and what it looks at
// beside, as far as that is known without the space's mutex. Nothing of the call has to be checked before.
#ifndef KVPOOL_SERVER_SPACE_CALL_WORK_H_
#define KVPOOL_SERVER_SPACE_CALL_WORK_H_

#include <cstdint>

#include "kvpool/v1/engine.pb.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/wire/operation.h"
#include "server/wire/validate.h"

namespace kvpool {

// A call that names more blocks and keys, some half a millisecond of work, is carried out by a thread of its own, so
// that the queue's other callers do not wait for it.
inline constexpr uint64_t kLargeCallNames = 4096;

inline uint64_t WorkOf(const Session& session, const v1::Operation& operation) {
  // A set that is replaced is given back.
  uint64_t names = CountNames(operation) + NumbersOf(operation), sets = IsOfSets(operation) ? 1 : 0;
  if (operation.has_fence() || operation.has_close_session()) {
    names += session.parked_names.load();
    sets += session.parked_sets.load();
  }
  // It reads what the blocks hold.
  if (operation.has_match() && session.space->may_doubt()) names += kLargeCallNames + 1;
  return names + sets * session.largest_episode.load();
}

inline uint64_t WorkOf(const Session& session, const v1::StepRequest& request) {
  uint64_t work = 0;
  for (const v1::Operation& operation : request.operations()) work += WorkOf(session, operation);
  return work;
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_CALL_WORK_H_
