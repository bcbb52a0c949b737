#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/fence_events.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// An engine has a handful of steps in flight; so many events are a leak.
constexpr size_t kMaxEvents = 65536;

// Events are made when first needed and kept, since cuEventCreate costs more than a record.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}

  const CudaContext& context() const { return *context_; }

  // REQUIRES: the context is current.
  absl::StatusOr<CudaEvent> Take() {
    MutexLock lock(&mu_);
    if (!idle_.empty()) {
      CudaEvent event = std::move(idle_.back());
      idle_.pop_back();
      return event;
    }
    if (event_count_ == kMaxEvents) {
      return absl::ResourceExhaustedError(
          absl::StrCat("fence events: ", kMaxEvents, " are held, which is the limit"));
    }
    CUevent event;
    // With BLOCKING_SYNC a waiter sleeps; without timing a record is cheaper.
    RETURN_IF_ERROR(context_->Check(
        context_->driver().cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
        "cuEventCreate"));
    ++event_count_;
    return CudaEvent(context_, event);
  }
  void Return(CudaEvent event) {
    MutexLock lock(&mu_);
    idle_.push_back(std::move(event));
  }

 private:
  const std::shared_ptr<const CudaContext> context_;
  Mutex mu_;
  std::vector<CudaEvent> idle_ ABSL_GUARDED_BY(mu_);
  size_t event_count_ ABSL_GUARDED_BY(mu_) = 0;
};

class RecordedEvent : public FenceEvent {
 public:
  RecordedEvent(std::shared_ptr<EventPool> pool, CudaEvent event)
      : pool_(std::move(pool)), event_(std::move(event)) {}
  ~RecordedEvent() override { pool_->Return(std::move(event_)); }

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

class CudaFenceEvents : public FenceEvents {
 public:
  explicit CudaFenceEvents(std::shared_ptr<const CudaContext> context)
      : pool_(std::make_shared<EventPool>(std::move(context))) {}

  absl::StatusOr<std::unique_ptr<FenceEvent>> Record(void* stream) override {
    const CudaContext& context = pool_->context();
    ASSIGN_OR_RETURN(const CurrentContext current, context.MakeCurrent());
    ASSIGN_OR_RETURN(CudaEvent event, pool_->Take());
    const CUresult result = context.driver().cuEventRecord(event.get(), static_cast<CUstream>(stream));
    auto recorded = std::make_unique<RecordedEvent>(pool_, std::move(event));
    RETURN_IF_ERROR(context.Check(result, "fence: cuEventRecord"));
    return recorded;
  }

 private:
  const std::shared_ptr<EventPool> pool_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FenceEvents>> OpenCudaFenceEvents(const std::string& uuid_bytes) {
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::OpenUuid(uuid_bytes));
  return std::make_unique<CudaFenceEvents>(std::move(context));
}

}  // namespace kvpool
