#include <memory>
#include <utility>

#include "cuda/driver/cuda_context.h"
#include "cuda/driver/event_pool.h"
#include "cuda/fence_events.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// An engine has a handful of steps in flight; so many events are a leak.
constexpr size_t kMaxEvents = 65536;

class CudaFenceEvents : public FenceEvents {
 public:
  explicit CudaFenceEvents(std::shared_ptr<const CudaContext> context)
      : pool_(EventPool::Make(std::move(context), {.what = "fence events", .max_events = kMaxEvents})) {}

  absl::StatusOr<std::unique_ptr<FenceEvent>> Record(void* stream) override {
    ASSIGN_OR_RETURN(const CurrentContext current, pool_->context().MakeCurrent());
    ASSIGN_OR_RETURN(CudaEvent event, pool_->Take());
    return pool_->Record(std::move(event), static_cast<CUstream>(stream));
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
