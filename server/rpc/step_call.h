// The Step stream: batches in, answers and notices out.
//
//   waiting    for a caller
//   unbound    for a first batch that opens or names a member
//   bound      the member's stream
//   draining   the caller half-closed: what is queued still goes out
//   ending     Finish is on the way; the call goes when every operation under way is back
//
// A batch is applied on the queue's thread that read it, and its answer is written at once. The next batch is read only
// while fewer than kMaxUnanswered answers wait to be written, so a peer that does not read is not read either. Notices
// stay with the daemon until an answer takes them along or nothing else waits to be written.
#ifndef KVPOOL_SERVER_RPC_STEP_CALL_H_
#define KVPOOL_SERVER_RPC_STEP_CALL_H_

#include "kvpool/v1/engine.grpc.pb.h"
#include "server/daemon/daemon.h"
#include "server/rpc/unary_call.h"

namespace kvpool {

inline constexpr size_t kMaxUnanswered = 16;

// Step in bytes: an answer is serialised once, for the wire and for repetitions.
using EngineService = v1::Engine::WithRawMethod_Step<v1::Engine::AsyncService>;

// Waits for Step calls on the site's queue, for as long as the queue runs.
void AcceptStepCalls(const RpcSite<EngineService>& site, Daemon* daemon);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STEP_CALL_H_
