#include "server/rpc/health_service.h"

#include <grpcpp/alarm.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvpool {

namespace health = grpc::health::v1;
using HealthSite = RpcSite<health::Health::AsyncService>;

// One Watch call: writes the status once, then at each change, until the caller goes or the server stops. It
// belongs to its queue's thread; only Wake is called on others.
class HealthWatch final : public RpcCall {
 public:
  static void Accept(const HealthSite& site, HealthState* state) {
    auto* watch = new HealthWatch(site, state);
    watch->context_.AsyncNotifyWhenDone(static_cast<RpcTag*>(&watch->gone_tag_));
    site.service->RequestWatch(&watch->context_, &watch->request_, &watch->writer_, site.queue->cq(),
                               site.queue->cq(), static_cast<RpcTag*>(&watch->accept_tag_));
  }

  void Abandon() override {
    stop_ = true;
    Pump();
  }

  void OnRest() override { Abandon(); }

  // The status has changed: has the queue's thread look at it.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu_) {
    if (waking_) return;
    waking_ = true;
    alarm_.Set(site_.queue->cq(), std::chrono::system_clock::time_point(), static_cast<RpcTag*>(&wake_tag_));
  }

 private:
  HealthWatch(const HealthSite& site, HealthState* state) : site_(site), state_(state) {}
  ~HealthWatch() = default;

  void OnAccepted(bool ok) {
    if (!ok) {
      delete this;  // The server stops. gone_tag_ comes only for calls that have begun.
      return;
    }
    if (!site_.queue->stopping()) Accept(site_, state_);
    site_.queue->Begin(this);
    {
      MutexLock lock(&state_->mu_);
      state_->watches_.insert(this);
    }
    Pump();
  }
  void OnWritten(bool ok) {
    writing_ = false;
    if (!ok) stop_ = true;
    Pump();
  }
  void OnWake(bool ok) {
    {
      MutexLock lock(&state_->mu_);
      waking_ = false;
    }
    Pump();
  }
  void OnGone(bool ok) {
    gone_ = true;
    stop_ = true;
    Pump();
  }
  void OnFinished(bool ok) {
    finished_ = true;
    Pump();
  }

  void Pump() {
    if (!writing_ && !finishing_) {
      const auto status = Now();
      if (stop_) {
        finishing_ = true;
        writer_.Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the watch ends"),
                       static_cast<RpcTag*>(&finish_tag_));
      } else if (status != written_) {
        writing_ = true;
        written_ = status;
        health::HealthCheckResponse response;
        response.set_status(status);
        writer_.Write(response, static_cast<RpcTag*>(&write_tag_));
      }
    }
    if (!finished_ || !gone_) return;
    {
      MutexLock lock(&state_->mu_);
      state_->watches_.erase(this);
      if (waking_) return;  // OnWake comes here again.
    }
    site_.queue->End(this);
    delete this;
  }

  health::HealthCheckResponse::ServingStatus Now() const {
    if (!state_->Knows(request_.service())) return health::HealthCheckResponse::SERVICE_UNKNOWN;
    return state_->serving() ? health::HealthCheckResponse::SERVING
                             : health::HealthCheckResponse::NOT_SERVING;
  }

  const HealthSite site_;
  HealthState* const state_;
  grpc::ServerContext context_;
  health::HealthCheckRequest request_;
  grpc::ServerAsyncWriter<health::HealthCheckResponse> writer_{&context_};
  MethodTag<HealthWatch> accept_tag_{this, &HealthWatch::OnAccepted};
  MethodTag<HealthWatch> write_tag_{this, &HealthWatch::OnWritten};
  MethodTag<HealthWatch> wake_tag_{this, &HealthWatch::OnWake};
  MethodTag<HealthWatch> gone_tag_{this, &HealthWatch::OnGone};
  MethodTag<HealthWatch> finish_tag_{this, &HealthWatch::OnFinished};
  health::HealthCheckResponse::ServingStatus written_ = health::HealthCheckResponse::UNKNOWN;
  bool writing_ = false, stop_ = false, gone_ = false, finishing_ = false, finished_ = false;
  bool waking_ ABSL_GUARDED_BY(state_->mu_) = false;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(state_->mu_);
};

// The analysis can't see that mu_ is also the mutex of each watch.
void HealthState::SetServing(bool serving) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  MutexLock lock(&mu_);
  if (serving_ == serving) return;
  serving_ = serving;
  for (HealthWatch* watch : watches_) watch->Wake();
}

bool HealthState::serving() const {
  MutexLock lock(&mu_);
  return serving_;
}

bool HealthState::Knows(const std::string& service) const {
  return service.empty() || std::find(services_.begin(), services_.end(), service) != services_.end();
}

void AcceptHealthCalls(const HealthSite& site, HealthState* state) {
  AddUnary<health::HealthCheckRequest, health::HealthCheckResponse>(
      site, "Check", &health::Health::AsyncService::RequestCheck,
      [state](const Caller&, health::HealthCheckRequest* request, health::HealthCheckResponse* response,
              const UnaryDone& done) {
        if (!state->Knows(request->service())) {
          return done(absl::NotFoundError(absl::StrCat("no service \"", request->service(), "\" here")));
        }
        response->set_status(state->serving() ? health::HealthCheckResponse::SERVING
                                              : health::HealthCheckResponse::NOT_SERVING);
        done(absl::OkStatus());
      });
  HealthWatch::Accept(site, state);
}

}  // namespace kvpool
