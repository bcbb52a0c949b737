// What a queue waits for: the operations that its calls have begun, on gRPC's completion queue or on sockets (socket_events.h).
#ifndef KVPOOL_SERVER_RPC_RPC_EVENTS_H_
#define KVPOOL_SERVER_RPC_RPC_EVENTS_H_

#include <grpcpp/completion_queue.h>

#include <chrono>
#include <memory>

namespace kvpool {

// What comes back when an operation is over. `ok` is gRPC's: false if it did not succeed.
class RpcTag {
 public:
  virtual void Run(bool ok) = 0;

 protected:
  ~RpcTag() = default;
};

// A tag that calls one method of its owner. An owner has one for each operation that may be under
// way at the same time.
template <typename Owner>
class MethodTag final : public RpcTag {
 public:
  MethodTag(Owner* owner, void (Owner::*method)(bool)) : owner_(owner), method_(method) {}
  void Run(bool ok) override { (owner_->*method_)(ok); }

 private:
  Owner* const owner_;
  void (Owner::*const method_)(bool);
};

// Brings one tag at a time to a queue's thread.
class RpcAlarm {
 public:
  virtual ~RpcAlarm() = default;
  // The tag comes back at once. Any thread, if it is one at a time.
  virtual void Set(RpcTag* tag) = 0;
  // It comes back after a while, or when Cancel is called, once. On the queue's thread.
  virtual void SetAfter(std::chrono::milliseconds time, RpcTag* tag) = 0;
  virtual void Cancel() = 0;
};

class RpcEvents {
 public:
  struct Event {
    RpcTag* tag = nullptr;
    bool ok = false;
  };
  virtual ~RpcEvents() = default;

  // The next event. False: Shut was called, and there will be none.
  virtual bool Wait(Event* event) = 0;
  // False: nothing has come so far.
  virtual bool Look(Event* event) = 0;
  // REQUIRES: nothing begins any more.
  virtual void Shut() = 0;
  // Any thread. The alarm may be destroyed later than this, but not used.
  virtual std::unique_ptr<RpcAlarm> MakeAlarm() = 0;
  // Null: these are no events of gRPC.
  virtual grpc::ServerCompletionQueue* cq() { return nullptr; }
};

// Those of gRPC.
std::unique_ptr<RpcEvents> MakeGrpcEvents(std::unique_ptr<grpc::ServerCompletionQueue> queue);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_RPC_EVENTS_H_
