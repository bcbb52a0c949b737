// The Step stream: batches in, answers and notices out.
//
//   waiting    no caller has come
//   unbound    the first batch, which opens or names a member, has not come
//   opening    it opens one, on a thread of Openings: the stream is not read meanwhile
//   bound      it is the member's stream
//   in turn    a batch was read and waits for its tenant's turn: the stream is not read meanwhile
//   applying   a large batch is applied on a thread of CallWorkers: the stream is not read meanwhile
//   draining   the caller half-closed: answers that are queued still go out
//   ending     Finish is on the way; the call is deleted when every operation under way has returned
//
// Any other batch is applied on the queue's thread that read it, at once or in turn, and its answer is written at once. The next batch is
// read only while fewer than kMaxUnanswered answers wait to be written, so that a peer which does not read is
// not read either. Notices stay with the daemon until an answer takes them along, or until nothing else waits
// to be written.
#ifndef KVPOOL_SERVER_RPC_STEP_CALL_H_
#define KVPOOL_SERVER_RPC_STEP_CALL_H_

#include <string>

#include "kvpool/v1/engine.grpc.pb.h"
#include "server/access/refusal_log.h"
#include "server/daemon/daemon.h"
#include "server/rpc/call_workers.h"
#include "server/rpc/openings.h"
#include "server/rpc/unary_call.h"

namespace kvpool {

inline constexpr size_t kMaxUnanswered = 16;
// A call that names more blocks and keys, some half a millisecond of work, is carried out by a thread of its own, so
// that the queue's other callers do not wait for it.
inline constexpr uint64_t kLargeCallNames = 4096;
// The owner of a member's large calls: those of a session wait for one another.
uint64_t LargeCallOwner(const Member& member);
// Whose turn it takes.
const std::string& TenantOf(const Member& member);

// Step carries bytes here: an answer is serialised once, for the wire and for the repetition of a batch.
using EngineService = v1::Engine::WithRawMethod_Step<v1::Engine::AsyncService>;

// What calls of engines are carried out with. All of it outlives the calls.
struct EngineHost {
  Daemon* daemon;
  Openings* openings;
  CallWorkers* large_calls;
  RefusalLog* refusals;  // It has those who came with the token of another user's session.
};

// Serves Step calls on the site's queue, for as long as it runs.
void AcceptStepCalls(const RpcSite<EngineService>& site, const EngineHost& host);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STEP_CALL_H_
