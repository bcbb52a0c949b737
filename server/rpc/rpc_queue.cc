#include "server/rpc/rpc_queue.h"

#include <string>
#include <vector>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// The message travels in a header, and all headers of a call together may have 8 KiB.
constexpr size_t kMaxMessageBytes = 4096;
// Peers that send without end do not keep those from their turn who have sent. An event is a message that is read, some 10 us.
constexpr int kMostEventsBetweenTurns = 1024;

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // Both enumerations have the numbers of google.rpc.Code.
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()),
                      std::string(status.message().substr(0, kMaxMessageBytes)));
}

absl::Status Resting() {
  return absl::UnavailableError(
      "another daemon takes over; nothing was applied: call again, with the same sequence");
}

RpcQueue::RpcQueue(std::unique_ptr<grpc::ServerCompletionQueue> queue, std::function<bool()> several)
    : queue_(std::move(queue)), several_(std::move(several)) {}

RpcQueue::~RpcQueue() {
  if (thread_.joinable()) Stop();
}

void RpcQueue::Start() {
  thread_ = std::thread([this] { Run(); });
}

void RpcQueue::Run() {
  while (RunNext()) {
  }
}

bool RpcQueue::RunNext() {
  void* tag;
  bool ok;
  if (turns_.empty()) {
    if (!queue_->Next(&tag, &ok)) return false;
    static_cast<RpcTag*>(tag)->Run(ok);
    return true;
  }
  // A time that is long past: what has not arrived is not waited for.
  if (events_ < kMostEventsBetweenTurns &&
      queue_->AsyncNext(&tag, &ok, std::chrono::system_clock::time_point()) ==
          grpc::CompletionQueue::GOT_EVENT) {
    ++events_;
    static_cast<RpcTag*>(tag)->Run(ok);
    return true;
  }
  events_ = 0;
  (*turns_.Pop())();
  return true;
}

void RpcQueue::InTurn(const std::string& tenant, std::function<void()> work) {
  if (turns_.empty() && !several_()) return work();
  turns_.Push(tenant, std::move(work));
}

void RpcQueue::Stop() {
  stop_alarm_.Set(queue_.get(), std::chrono::system_clock::now(), static_cast<RpcTag*>(&stop_tag_));
  thread_.join();
}

void RpcQueue::Rest() {
  resting_ = true;
  rest_alarm_.Set(queue_.get(), std::chrono::system_clock::now(), static_cast<RpcTag*>(&rest_tag_));
}

void RpcQueue::OnRested(bool ok) {
  const std::vector<RpcCall*> calls(calls_.begin(), calls_.end());
  for (RpcCall* call : calls) call->OnRest();
}

void RpcQueue::OnStop(bool ok) {
  stopping_ = true;
  const std::vector<RpcCall*> calls(calls_.begin(), calls_.end());
  for (RpcCall* call : calls) call->Abandon();
  if (calls_.empty()) queue_->Shutdown();
}

void RpcQueue::End(RpcCall* call) {
  KVPOOL_CHECK(calls_.erase(call) == 1, "an RPC ended that had not begun");
  --begun_;
  // The queue is shut only now: a call may start operations until its end, which a queue
  // that is shut refuses.
  if (stopping_ && calls_.empty()) queue_->Shutdown();
}

}  // namespace kvpool
