// The counts of closed spaces, kept so that sums over spaces never fall.
#ifndef KVPOOL_SERVER_DAEMON_RETIRED_COUNTERS_H_
#define KVPOOL_SERVER_DAEMON_RETIRED_COUNTERS_H_

#include "proto/support/mutex.h"
#include "server/daemon/snapshot.h"

namespace kvpool {

class RetiredCounters {
 public:
  void Add(const SpaceSnapshot& closed) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    totals_.Add(closed);
  }
  CounterTotals totals() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return totals_;
  }

 private:
  Mutex mu_;
  CounterTotals totals_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_RETIRED_COUNTERS_H_
