// A space as metrics want it.
#ifndef KVPOOL_SERVER_SNAPSHOT_H_
#define KVPOOL_SERVER_SNAPSHOT_H_

#include <cstdint>

#include "server/daemon.h"
#include "server/space_state.h"

namespace kvpool {

SpaceSnapshot SnapshotOf(const SpaceState& state, uint64_t now);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SNAPSHOT_H_
