// Wakes the thread that serves a member's stream when the daemon, on any thread, has
// something for the member.
#ifndef KVPOOL_SERVER_RPC_STEP_LISTENER_H_
#define KVPOOL_SERVER_RPC_STEP_LISTENER_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "proto/support/mutex.h"
#include "server/daemon/daemon.h"
#include "server/rpc/rpc_queue.h"

namespace kvpool {

// A wake-up is a tag that comes back on the stream's queue. At most one is under way, however much there is
// to say. The listener outlives the stream for as long as the daemon holds it.
class StepListener final : public StreamListener {
 public:
  // `tag` comes back on `queue` for each wake-up.
  StepListener(RpcQueue* queue, RpcTag* tag) : tag_(tag), alarm_(queue->MakeAlarm()) {}

  void OnPending() override ABSL_LOCKS_EXCLUDED(mu_);
  void OnSuperseded() override ABSL_LOCKS_EXCLUDED(mu_);

  // ---- The stream's thread
  // Between these two the stream is inside the daemon and looks for itself afterwards, so that no wake-up is
  // sent. EndVerb answers whether one would have been.
  void BeginVerb();
  bool EndVerb();
  // The wake-up under way has come back.
  void WakeArrived();
  bool superseded();
  // No wake-up begins any more. True: one is still under way.
  bool Shut();

 private:
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  RpcTag* const tag_;
  const std::unique_ptr<RpcAlarm> alarm_;  // Set by whoever holds mu_.
  Mutex mu_;
  bool shut_ ABSL_GUARDED_BY(mu_) = false;
  bool in_verb_ ABSL_GUARDED_BY(mu_) = false;
  bool missed_ ABSL_GUARDED_BY(mu_) = false;
  bool waking_ ABSL_GUARDED_BY(mu_) = false;
  bool superseded_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STEP_LISTENER_H_
