#include "server/rpc/rpc_events.h"

#include <grpcpp/alarm.h>

#include <utility>

namespace kvpool {
namespace {

// gRPC looks at no socket when an event has come while it was not looking, and the end of each answer is one: with a single look a
// turn, nothing would be read until nobody waited for a turn any more. A look takes in one socket, and there may be nothing for us.
constexpr int kLooks = 4;

class GrpcAlarm final : public RpcAlarm {
 public:
  explicit GrpcAlarm(grpc::ServerCompletionQueue* queue) : queue_(queue) {}
  void Set(RpcTag* tag) override {
    // A time that is long past: the tag comes back at once.
    alarm_.Set(queue_, std::chrono::system_clock::time_point(), tag);
  }
  void SetAfter(std::chrono::milliseconds time, RpcTag* tag) override {
    alarm_.Set(queue_, std::chrono::system_clock::now() + time, tag);
  }
  void Cancel() override { alarm_.Cancel(); }

 private:
  grpc::ServerCompletionQueue* const queue_;
  grpc::Alarm alarm_;
};

class GrpcEvents final : public RpcEvents {
 public:
  explicit GrpcEvents(std::unique_ptr<grpc::ServerCompletionQueue> queue) : queue_(std::move(queue)) {}

  bool Wait(Event* event) override {
    void* tag;
    if (!queue_->Next(&tag, &event->ok)) return false;
    event->tag = static_cast<RpcTag*>(tag);
    return true;
  }
  bool Look(Event* event) override {
    void* tag;
    for (int look = 0; look < kLooks; ++look) {
      // A time that is long past: what has not arrived is not waited for.
      if (queue_->AsyncNext(&tag, &event->ok, std::chrono::system_clock::time_point()) !=
          grpc::CompletionQueue::GOT_EVENT) {
        continue;
      }
      event->tag = static_cast<RpcTag*>(tag);
      return true;
    }
    return false;
  }
  void Shut() override { queue_->Shutdown(); }
  std::unique_ptr<RpcAlarm> MakeAlarm() override { return std::make_unique<GrpcAlarm>(queue_.get()); }
  grpc::ServerCompletionQueue* cq() override { return queue_.get(); }

 private:
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
};

}  // namespace

std::unique_ptr<RpcEvents> MakeGrpcEvents(std::unique_ptr<grpc::ServerCompletionQueue> queue) {
  return std::make_unique<GrpcEvents>(std::move(queue));
}

}  // namespace kvpool
