// Fences on a GPU: an event is recorded behind the work that an engine has queued on its stream, and another
// thread polls it or waits for it.
//
// An engine calls Record after queueing step n; the client library's fence thread waits for the event and
// then reports "done through n". Neither call makes the engine's thread wait.
#ifndef KVPOOL_CUDA_FENCE_EVENTS_H_
#define KVPOOL_CUDA_FENCE_EVENTS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvpool {

// One recorded point of a stream. Its destructor returns the event for the next Record to use, whether or not
// the point has passed. It may outlive its FenceEvents. Thread-compatible.
class FenceEvent {
 public:
  virtual ~FenceEvent() = default;
  // Whether all work before the point is done. An error is that of the work (after a sticky one the context
  // is gone): the fence has not passed and never will.
  virtual absl::StatusOr<bool> Done() const = 0;
  // Sleeps, without spinning, until all work before the point is done.
  virtual absl::Status Wait() const = 0;
  // The CUevent, as a plain pointer: another stream can be told to wait for it.
  virtual void* event() const = 0;
};

// Thread-safe.
class FenceEvents {
 public:
  virtual ~FenceEvents() = default;
  // `stream` is a CUstream (or cudaStream_t) of the device's primary context, as a plain pointer.
  // RESOURCE_EXHAUSTED: 65536 recorded events are still held.
  virtual absl::StatusOr<std::unique_ptr<FenceEvent>> Record(void* stream) = 0;
};

// `uuid_bytes` are those of Device::uuid_bytes(). UNIMPLEMENTED in a binary built without CUDA.
absl::StatusOr<std::unique_ptr<FenceEvents>> OpenCudaFenceEvents(const std::string& uuid_bytes);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_FENCE_EVENTS_H_
