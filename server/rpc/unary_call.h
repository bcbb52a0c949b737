// A unary RPC: one wrapper that accepts, measures and maps errors for all methods.
//
// A method is one line in a registration list:
//
//   AddUnary<v1::EvictRequest, v1::EvictResponse>(site, "Evict", &OperatorService::RequestEvict, handler);
//
// where handler(caller, request, response, done) fills the response and calls done(status) once: within the call,
// or later on any thread. All four arguments are valid until `done` is destroyed.
#ifndef KVPOOL_SERVER_RPC_UNARY_CALL_H_
#define KVPOOL_SERVER_RPC_UNARY_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/async_unary_call.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_queue.h"
#include "server/rpc/rpc_stats.h"

namespace kvpool {

using UnaryDone = std::function<void(const absl::Status&)>;

// One service on one queue.
template <typename Service>
struct RpcSite {
  Service* service;
  RpcQueue* queue;
  RpcStats* stats;
  const Connections* connections;
};

template <typename Service, typename Request, typename Response>
struct UnaryMethod {
  using Accept = void (Service::*)(grpc::ServerContext*, Request*, grpc::ServerAsyncResponseWriter<Response>*,
                                   grpc::CompletionQueue*, grpc::ServerCompletionQueue*, void*);
  using Handler = std::function<void(const Caller&, Request*, Response*, UnaryDone)>;

  RpcSite<Service> site;
  MethodStats* stats;
  Accept accept;
  Handler handler;
  // A method of CallWorkers, whose calls take long: the handler is told whether the caller is gone.
  bool watched = false;
  // Called on the queue's thread with an answer that could not be delivered. May be empty.
  std::function<void(const Response&)> undelivered;
};

// One call. It lives from being ready for a caller until its answer is on the way, and longer
// while `done` exists.
template <typename Service, typename Request, typename Response>
class UnaryCall final : public RpcTag,
                        public RpcCall,
                        public std::enable_shared_from_this<UnaryCall<Service, Request, Response>> {
 public:
  using Method = UnaryMethod<Service, Request, Response>;

  static void Accept(std::shared_ptr<const Method> method) {
    auto call = std::make_shared<UnaryCall>(std::move(method));
    call->self_ = call;
    const RpcSite<Service>& site = call->method_->site;
    if (call->method_->watched) {
      call->context_.AsyncNotifyWhenDone(static_cast<RpcTag*>(&call->over_tag_));
    }
    (site.service->*call->method_->accept)(&call->context_, &call->request_, &call->writer_, site.queue->cq(),
                                           site.queue->cq(), static_cast<RpcTag*>(call.get()));
  }

  explicit UnaryCall(std::shared_ptr<const Method> method) : method_(std::move(method)) {}

  void Run(bool ok) override {
    if (begun_) {
      OnAnswered(ok);
    } else if (!ok) {
      self_.reset();  // The server stops. over_tag_ comes only for calls that have begun.
    } else {
      if (!method_->site.queue->stopping()) Accept(method_);
      Begin();
    }
  }

  // It ends by itself.
  void OnRest() override {}

  void Abandon() override {
    caller_.gone = true;
    Answer(absl::UnavailableError("the daemon shuts down"));
  }

 private:
  void Begin() {
    begun_ = true;
    begun_ns_ = NowNs();
    method_->site.queue->Begin(this);
    caller_.peer = PeerOf(context_, *method_->site.connections);
    if (method_->site.queue->turns_wait()) method_->site.queue->CountRead(request_.ByteSizeLong());
    method_->handler(caller_, &request_, &response_,
                     [call = this->shared_from_this()](const absl::Status& status) { call->Answer(status); });
  }

  void OnAnswered(bool ok) {
    const absl::StatusCode code = AnswerCode();
    method_->stats->Record(NowNs() - begun_ns_, code);
    if (!ok && code == absl::StatusCode::kOk && method_->undelivered) method_->undelivered(response_);
    finished_ = true;
    EndIfOver();
  }

  void OnOver(bool ok) {
    over_ = true;
    if (context_.IsCancelled()) caller_.gone = true;
    EndIfOver();
  }

  void EndIfOver() {
    if (!finished_ || (method_->watched && !over_)) return;
    method_->site.queue->End(this);
    self_.reset();
  }

  void Answer(const absl::Status& status) {
    MutexLock lock(&mu_);
    if (answered_) return;
    answered_ = true;
    code_ = status.code();
    if (status.ok()) {
      writer_.Finish(response_, grpc::Status::OK, static_cast<RpcTag*>(this));
    } else {
      writer_.FinishWithError(ToGrpcStatus(status), static_cast<RpcTag*>(this));
    }
  }

  absl::StatusCode AnswerCode() {
    MutexLock lock(&mu_);
    return code_;
  }

  const std::shared_ptr<const Method> method_;
  std::shared_ptr<UnaryCall> self_;  // Set while the queue may hand it back.
  grpc::ServerContext context_;
  Request request_;
  Response response_;  // Belongs to the handler until the call is answered.
  grpc::ServerAsyncResponseWriter<Response> writer_{&context_};
  MethodTag<UnaryCall> over_tag_{this, &UnaryCall::OnOver};
  Caller caller_;
  // These belong to the queue's thread.
  bool begun_ = false, finished_ = false;
  bool over_ = false;  // gRPC has nothing more to say of a watched call.
  uint64_t begun_ns_ = 0;

  Mutex mu_;
  bool answered_ ABSL_GUARDED_BY(mu_) = false;
  absl::StatusCode code_ ABSL_GUARDED_BY(mu_) = absl::StatusCode::kOk;
};

template <typename Request, typename Response, typename Service>
void AddUnary(const RpcSite<Service>& site, const std::string& name,
              std::type_identity_t<typename UnaryMethod<Service, Request, Response>::Accept> accept,
              typename UnaryMethod<Service, Request, Response>::Handler handler, bool watched = false,
              std::function<void(const Response&)> undelivered = nullptr) {
  UnaryCall<Service, Request, Response>::Accept(
      std::make_shared<const UnaryMethod<Service, Request, Response>>(UnaryMethod<Service, Request, Response>{
          site, site.stats->Add(name), accept, std::move(handler), watched, std::move(undelivered)}));
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_UNARY_CALL_H_
