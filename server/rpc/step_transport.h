// What carries a Step stream: gRPC, or frames of a Unix socket (proto/support/step_frames.h).
//
// At most one read and one write are under way, and each operation ends with its tag on the stream's queue, in whose thread all of it
// is used.
#ifndef KVPOOL_SERVER_RPC_STEP_TRANSPORT_H_
#define KVPOOL_SERVER_RPC_STEP_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "proto/support/unique_fd.h"
#include "server/access/peer.h"
#include "server/rpc/connections.h"
#include "server/rpc/rpc_events.h"
#include "server/rpc/rpc_queue.h"
#include "server/rpc/socket_events.h"
#include "server/wire/step_reader.h"

namespace kvpool {

// Step carries bytes here: an answer is serialised once, for the wire and for the repetition of a batch.
using EngineService = v1::Engine::WithRawMethod_Step<v1::Engine::AsyncService>;

class StepTransport {
 public:
  virtual ~StepTransport() = default;

  // The first operation. `begun` comes back with ok when there is a caller, and without it if there will be none; `over`, if there
  // was one, when nobody waits for answers any more.
  virtual void Begin(RpcTag* begun, RpcTag* over) = 0;
  // Who it is.
  virtual Peer peer() const = 0;
  // The caller hung up, or gave up, before Finish.
  virtual bool gone() const = 0;

  // !ok: no further message comes.
  virtual void Read(RpcTag* tag) = 0;
  virtual size_t read_bytes() const = 0;
  // Puts what was read into `reader`, and forgets it. INVALID_ARGUMENT, RESOURCE_EXHAUSTED: the stream can't go on.
  virtual absl::Status TakeRead(StepReader* reader) = 0;
  // `more`: another message follows as soon as this one is taken.
  virtual void Write(std::string bytes, bool more, RpcTag* tag) = 0;
  // Tells the caller how the stream ended, if it can be told. A read that is under way comes back without ok. REQUIRES: no write is
  // under way; once.
  virtual void Finish(const absl::Status& status, RpcTag* tag) = 0;
  // What is under way comes back without ok, though nobody reads.
  virtual void Cancel() = 0;
};

// A call of the service, which a caller will make.
std::unique_ptr<StepTransport> MakeGrpcTransport(EngineService* service, RpcQueue* queue,
                                                 const Connections* connections);
// A socket whose peer has sent kStepPreface, which nobody has read yet. It belongs to the thread of `events`.
std::unique_ptr<StepTransport> MakeFrameTransport(SocketEvents* events, UniqueFd socket,
                                                  std::shared_ptr<const PeerCredentials> peer);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STEP_TRANSPORT_H_
