// Events of one GPU that are recorded, waited for and used again.
#ifndef KVPOOL_CUDA_DRIVER_EVENT_POOL_H_
#define KVPOOL_CUDA_DRIVER_EVENT_POOL_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/fence_events.h"
#include "proto/support/mutex.h"

namespace kvpool {

// Events are made when first needed and kept, since cuEventCreate costs more than a record. Thread-safe.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  struct Options {
    const char* what;   // "fence events", as errors call them.
    size_t max_events;  // Held at a time.
  };
  static std::shared_ptr<EventPool> Make(std::shared_ptr<const CudaContext> context, const Options& options) {
    return std::shared_ptr<EventPool>(new EventPool(std::move(context), options));
  }

  const CudaContext& context() const { return *context_; }
  // Takes an event, of which there is one less until its FenceEvent goes. REQUIRES: the context is current.
  absl::StatusOr<CudaEvent> Take() ABSL_LOCKS_EXCLUDED(mu_);
  void Return(CudaEvent event) ABSL_LOCKS_EXCLUDED(mu_);
  // Records an event that was taken. REQUIRES: the context is current.
  absl::StatusOr<std::unique_ptr<FenceEvent>> Record(CudaEvent event, CUstream stream);

 private:
  EventPool(std::shared_ptr<const CudaContext> context, const Options& options)
      : context_(std::move(context)), options_(options) {}

  const std::shared_ptr<const CudaContext> context_;
  const Options options_;
  Mutex mu_;
  std::vector<CudaEvent> idle_ ABSL_GUARDED_BY(mu_);
  size_t event_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DRIVER_EVENT_POOL_H_
