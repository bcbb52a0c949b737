#include "server/rpc/rpc_queue.h"

#include <string>
#include <vector>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// The message travels in a header, and all headers of a call together may have 8 KiB.
constexpr size_t kMaxMessageBytes = 4096;

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

RpcQueue::RpcQueue(std::unique_ptr<grpc::ServerCompletionQueue> queue) : queue_(std::move(queue)) {}

RpcQueue::~RpcQueue() {
  if (thread_.joinable()) Stop();
}

void RpcQueue::Start() {
  thread_ = std::thread([this] { Run(); });
}

void RpcQueue::Run() {
  void* tag;
  bool ok;
  while (queue_->Next(&tag, &ok)) static_cast<RpcTag*>(tag)->Run(ok);
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
