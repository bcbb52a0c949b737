// The Step stream: batches in, answers and notices out, over gRPC or as frames.
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

#include <functional>
#include <memory>
#include <string>

#include "proto/support/unique_fd.h"
#include "server/access/refusal_log.h"
#include "server/base/peer_process.h"
#include "server/daemon/daemon.h"
#include "server/rpc/call_workers.h"
#include "server/rpc/openings.h"
#include "server/rpc/step_transport.h"
#include "server/rpc/unary_call.h"
#include "server/space/call_work.h"

namespace kvpool {

inline constexpr size_t kMaxUnanswered = 16;
// The owner of a member's large calls: those of a session wait for one another.
uint64_t LargeCallOwner(const Member& member);
// Whose turn it takes.
const std::string& TenantOf(const Member& member);

// What calls of engines are carried out with. All of it outlives the calls.
struct EngineHost {
  Daemon* daemon;
  Openings* openings;
  CallWorkers* large_calls;
  RefusalLog* refusals;  // It has those who came with the token of another user's session.
};

// Serves Step calls of gRPC on the site's queue, for as long as it runs.
void AcceptStepCalls(const RpcSite<EngineService>& site, const EngineHost& host);

// Takes a socket whose peer has sent kStepPreface and waits to be read; any thread.
using StepSockets = std::function<void(UniqueFd, std::shared_ptr<const PeerCredentials>)>;
// Serves the streams of such sockets on a queue that has these events. REQUIRES: the queue outlives what is answered.
StepSockets ServeStepSockets(RpcQueue* queue, SocketEvents* events, RpcStats* stats, const EngineHost& host);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STEP_CALL_H_
