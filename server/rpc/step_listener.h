// Brings what the daemon says to a member's stream, on any thread, to the thread that serves the stream.
#ifndef KVPOOL_SERVER_RPC_STEP_LISTENER_H_
#define KVPOOL_SERVER_RPC_STEP_LISTENER_H_

#include <grpcpp/alarm.h>

#include "absl/base/thread_annotations.h"
#include "proto/support/mutex.h"
#include "server/daemon/daemon.h"
#include "server/rpc/rpc_queue.h"

namespace kvpool {

// At most one hop is under way, however much there is to say. Outlives the stream for as long as the daemon holds it.
class StepListener final : public StreamListener {
 public:
  // `tag` comes back on the queue for each hop.
  StepListener(RpcQueue* queue, RpcTag* tag) : queue_(queue), tag_(tag) {}

  void OnPending() override ABSL_LOCKS_EXCLUDED(mu_);
  void OnSuperseded() override ABSL_LOCKS_EXCLUDED(mu_);

  // ---- The stream's thread
  // Between these the stream is in the daemon, and looks for itself afterwards: no hop is needed. EndVerb answers
  // whether there was something.
  void BeginVerb();
  bool EndVerb();
  // A hop has arrived.
  void Landed();
  bool superseded();
  // No hops begin any more. True: one is under way.
  bool Shut();

 private:
  void Hop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  RpcQueue* const queue_;
  RpcTag* const tag_;
  Mutex mu_;
  bool shut_ ABSL_GUARDED_BY(mu_) = false;
  bool in_verb_ ABSL_GUARDED_BY(mu_) = false;
  bool missed_ ABSL_GUARDED_BY(mu_) = false;
  bool hopping_ ABSL_GUARDED_BY(mu_) = false;
  bool superseded_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STEP_LISTENER_H_
