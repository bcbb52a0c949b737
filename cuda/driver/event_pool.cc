#include "cuda/driver/event_pool.h"

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

class RecordedEvent : public FenceEvent {
 public:
  RecordedEvent(std::shared_ptr<EventPool> pool, CudaEvent event)
      : pool_(std::move(pool)), event_(std::move(event)) {}
  ~RecordedEvent() override { pool_->Return(std::move(event_)); }

  void* event() const override { return event_.get(); }

  absl::StatusOr<bool> Done() const override {
    const CudaContext& context = pool_->context();
    ASSIGN_OR_RETURN(const CurrentContext current, context.MakeCurrent());
    const CUresult result = context.driver().cuEventQuery(event_.get());
    if (result == CUDA_ERROR_NOT_READY) return false;
    RETURN_IF_ERROR(context.Check(result, "fence: cuEventQuery"));
    return true;
  }

  absl::Status Wait() const override {
    const CudaContext& context = pool_->context();
    ASSIGN_OR_RETURN(const CurrentContext current, context.MakeCurrent());
    return context.Check(context.driver().cuEventSynchronize(event_.get()), "fence: cuEventSynchronize");
  }

 private:
  const std::shared_ptr<EventPool> pool_;
  CudaEvent event_;
};

}  // namespace

absl::StatusOr<CudaEvent> EventPool::Take() {
  MutexLock lock(&mu_);
  if (!idle_.empty()) {
    CudaEvent event = std::move(idle_.back());
    idle_.pop_back();
    return event;
  }
  if (event_count_ == options_.max_events) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options_.what, ": ", options_.max_events, " are held, which is the limit"));
  }
  CUevent event;
  // With BLOCKING_SYNC a waiter sleeps; without timing a record is cheaper.
  RETURN_IF_ERROR(context_->Check(
      context_->driver().cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
      "cuEventCreate"));
  ++event_count_;
  return CudaEvent(context_, event);
}

void EventPool::Return(CudaEvent event) {
  MutexLock lock(&mu_);
  idle_.push_back(std::move(event));
}

absl::StatusOr<std::unique_ptr<FenceEvent>> EventPool::Record(CudaEvent event, CUstream stream) {
  // An event of a graph that is being captured says nothing of when the graph runs.
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult result = context_->driver().cuStreamIsCapturing(stream, &capturing);
  if (result == CUDA_SUCCESS && capturing != CU_STREAM_CAPTURE_STATUS_NONE) {
    Return(std::move(event));
    return absl::FailedPreconditionError(
        "fence: the stream captures a graph: record the fence behind the graph's launch");
  }
  if (result == CUDA_SUCCESS) result = context_->driver().cuEventRecord(event.get(), stream);
  auto recorded = std::make_unique<RecordedEvent>(shared_from_this(), std::move(event));
  RETURN_IF_ERROR(context_->Check(result, "fence: cuEventRecord"));
  return recorded;
}

}  // namespace kvpool
