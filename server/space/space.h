// The memory of one (tenant, fingerprint) and the sessions in it, behind one mutex.
//
// Locks, in this order: growth_mu (one thread at a time makes or destroys slabs; held across device calls),
// the registry's mutex, mu. No device call, send or listener runs under mu.
#ifndef KVPOOL_SERVER_SPACE_SPACE_H_
#define KVPOOL_SERVER_SPACE_SPACE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/base/clock.h"
#include "server/space/batch.h"
#include "server/space/device_budget.h"
#include "server/space/device_verbs.h"
#include "server/space/space_state.h"
#include "server/space/verbs.h"

namespace kvpool {

class Space {
 public:
  Space(SpaceFacts facts, const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy,
        std::vector<RunnerOrWhy> runners, DeviceBudget* budget, EventLog* event_log, const Clock* clock);

  // Makes one more slab on every rank, or on none. RESOURCE_EXHAUSTED: the space is at its largest, or the
  // budget or a device is out of memory.
  absl::Status MakeSlab(Deferred* deferred) ABSL_EXCLUSIVE_LOCKS_REQUIRED(growth_mu) ABSL_LOCKS_EXCLUDED(mu);
  // Destroys the slabs of a closed space. When it returns they are gone, whichever thread destroyed them.
  void DestroySlabs() ABSL_LOCKS_EXCLUDED(growth_mu, mu);
  // Sends what is in the outbox, in order, unless another thread is at it.
  void SendFrames(Deferred* deferred) ABSL_LOCKS_EXCLUDED(mu);

  // Of all its slabs, per rank. Needs no lock: who asks about many spaces would wait for the verbs of each.
  uint64_t slab_bytes() const { return slab_bytes_.load(std::memory_order_relaxed); }

  const SpaceFacts facts;
  Mutex growth_mu ABSL_ACQUIRED_BEFORE(mu);
  Mutex mu;
  SpaceState state ABSL_GUARDED_BY(mu);
  BlockVerbs verbs ABSL_GUARDED_BY(mu);
  DeviceVerbs device_verbs ABSL_GUARDED_BY(mu);
  Batches batches ABSL_GUARDED_BY(mu);

 private:
  absl::StatusOr<SlabRow> MakeRow(uint64_t bytes);
  void DestroyRow(SlabRow row);
  absl::Status SendFrame(OutgoingFrame out);

  DeviceBudget* const budget_;
  const Clock* const clock_;
  std::atomic<uint64_t> slab_bytes_{0};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_H_
