#include "server/rpc/rpc_queue.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/named_thread.h"
#include "server/base/time_slices.h"

namespace kvpool {
namespace {

// The message travels in a header, and all headers of a call together may have 8 KiB.
constexpr size_t kMaxMessageBytes = 4096;
// Peers that send without end do not keep those from their turn who have sent. An event is a message that is read, some 10 us,
// and some 1 ms for each MiB that it has.
constexpr int kMostEventsBetweenTurns = 1024;
constexpr size_t kMostBytesBetweenTurns = 1 << 20;
// Unary verbs of one tenant that wait for its turns, and what they name.
constexpr size_t kMostVerbsWaiting = 1024;
constexpr size_t kMostVerbBytesWaiting = 8 << 20;

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

RpcQueue::RpcQueue(std::unique_ptr<RpcEvents> events, std::function<bool()> several)
    : events_(std::move(events)), several_(std::move(several)) {}

RpcQueue::~RpcQueue() {
  if (thread_.joinable()) Stop();
}

void RpcQueue::Start() {
  thread_ = NamedThread("rpc-queue", [this] {
    AskFor(Slices::kShortest);
    Run();
  });
}

void RpcQueue::Run() {
  while (RunNext(&RpcEvents::Wait)) {
  }
}

bool RpcQueue::RunNext(bool (RpcEvents::*next)(RpcEvents::Event*)) {
  RpcEvents::Event event;
  if (turns_.empty()) {
    read_bytes_ = 0;
    if (!((*events_).*next)(&event)) return false;
    event.tag->Run(event.ok);
    return true;
  }
  if (events_since_ < kMostEventsBetweenTurns && read_bytes_ < kMostBytesBetweenTurns &&
      events_->Look(&event)) {
    ++events_since_;
    event.tag->Run(event.ok);
    return true;
  }
  events_since_ = 0;
  read_bytes_ = 0;
  const Turn turn = *turns_.Pop();
  if (turn.bytes > 0) {
    const auto bytes = turn_bytes_.find(turn.tenant);
    if ((bytes->second -= turn.bytes) == 0) turn_bytes_.erase(bytes);
  }
  turn.work();
  return true;
}

void RpcQueue::InTurn(const std::string& tenant, std::function<void()> work, size_t bytes) {
  if (turns_.empty() && !several_()) return work();
  if (bytes > 0) turn_bytes_[tenant] += bytes;
  turns_.Push(tenant, {.tenant = tenant, .work = std::move(work), .bytes = bytes});
}

absl::Status RpcQueue::CheckTurn(const std::string& tenant, const std::string& verb, size_t bytes) const {
  const size_t waiting = turns_.size(tenant);
  if (waiting == 0) return absl::OkStatus();
  const auto found = turn_bytes_.find(tenant);
  const size_t waiting_bytes = found == turn_bytes_.end() ? 0 : found->second;
  if (waiting < kMostVerbsWaiting && waiting_bytes + bytes <= kMostVerbBytesWaiting) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      verb, ": ", waiting, " verbs of tenant \"", tenant, "\" wait for its turn, with ", waiting_bytes,
      " bytes, and this one has ", bytes, "; the limits are ", kMostVerbsWaiting, " and ",
      kMostVerbBytesWaiting, " bytes; nothing was applied: call again, with the same sequence"));
}

void RpcQueue::Stop() {
  stop_alarm_->Set(&stop_tag_);
  if (thread_.joinable()) thread_.join();
}

void RpcQueue::Rest() {
  resting_ = true;
  rest_alarm_->Set(&rest_tag_);
}

void RpcQueue::OnRested(bool ok) {
  const std::vector<RpcCall*> calls(calls_.begin(), calls_.end());
  for (RpcCall* call : calls) call->OnRest();
}

void RpcQueue::OnStop(bool ok) {
  stopping_ = true;
  const std::vector<RpcCall*> calls(calls_.begin(), calls_.end());
  for (RpcCall* call : calls) call->Abandon();
  if (calls_.empty()) events_->Shut();
}

void RpcQueue::End(RpcCall* call) {
  KVPOOL_CHECK(calls_.erase(call) == 1, "an RPC ended that had not begun");
  --begun_;
  // The queue is shut only now: a call may start operations until its end, which a queue
  // that is shut refuses.
  if (stopping_ && calls_.empty()) events_->Shut();
}

}  // namespace kvpool
