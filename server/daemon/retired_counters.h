// What spaces that are gone had counted, so that sums over spaces never fall.
#ifndef KVPOOL_SERVER_DAEMON_RETIRED_COUNTERS_H_
#define KVPOOL_SERVER_DAEMON_RETIRED_COUNTERS_H_

#include "proto/support/mutex.h"
#include "server/space/space_snapshot.h"
#include "server/space/space_state.h"

namespace kvpool {

void Accumulate(const PoolCounters& from, PoolCounters* to);
void Accumulate(const SpaceCounters& from, SpaceCounters* to);

class RetiredCounters {
 public:
  void Add(const SpaceSnapshot& space, const SpaceCounters& counters) ABSL_LOCKS_EXCLUDED(mu_);
  // Under space 0: no memory, only what was counted.
  SpaceSnapshot space() ABSL_LOCKS_EXCLUDED(mu_);
  SpaceCounters counters() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  SpaceSnapshot space_ ABSL_GUARDED_BY(mu_);
  SpaceCounters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_RETIRED_COUNTERS_H_
