// Copies between a GPU's memory and host memory, beside what an engine computes: on a stream of its own, of the lowest
// priority.
//
//   Submit   under way until all of its copies are done; then its ticket is done
//            or failed, for the reason that Done and Wait answer: the context is gone, and no copy is done any more
//
// Submits are done in their order, and the ranges of one in any order. Each begins once the point of the engine's stream that it
// is told to wait for has passed, and neither the engine's thread nor its stream waits for it.
#ifndef KVPOOL_CUDA_BLOCK_COPIER_H_
#define KVPOOL_CUDA_BLOCK_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/fence_events.h"

namespace kvpool {

enum class CopyDirection { kToDevice, kToHost };

struct CopyRange {
  uint64_t device_address = 0;
  uint64_t host_address = 0;
  uint64_t bytes = 0;
};

// A call of the driver for so many ranges takes tens of milliseconds; more are better told apart.
inline constexpr size_t kMaxCopyRanges = 65536;
// Points and tickets that may be held. An engine has some for each step in flight; so many are a leak.
inline constexpr size_t kMaxCopyTickets = 4096;

// Thread-safe. Its destructor waits for what is under way.
class BlockCopier {
 public:
  virtual ~BlockCopier() = default;
  // Page-locks host memory, until Unregister or the copier's end: it must stay mapped as long. Copies to and from memory that is not
  // page-locked are right, too, but slower, and Submit may wait for them. REQUIRES: no range of a copy lies partly in it.
  virtual absl::Status Register(uint64_t host_address, size_t bytes) = 0;
  // INVALID_ARGUMENT: this copier has registered nothing that begins there. REQUIRES: no copy of it is under way.
  virtual absl::Status Unregister(uint64_t host_address) = 0;
  // Memory that the copier of another GPU has registered, which locks it for all: this one makes use of that. REQUIRES: it stays
  // registered as long as copies of this one are under way.
  virtual void ShareRegistered(uint64_t host_address, size_t bytes) = 0;
  // The point behind what is queued on `stream` now: a CUstream (or cudaStream_t) of the device's primary context, as a plain
  // pointer. RESOURCE_EXHAUSTED: kMaxCopyTickets are held.
  virtual absl::StatusOr<std::unique_ptr<FenceEvent>> Record(void* stream) = 0;
  // Begins to copy. `after`: no copy begins before this point has passed; nullptr: at once. The memory is the copies' until the
  // ticket is done or failed, whether it is held or not. INVALID_ARGUMENT: more than kMaxCopyRanges, or one of no bytes.
  // RESOURCE_EXHAUSTED: as of Record. After an error none of its copies is under way, and some may be done.
  virtual absl::StatusOr<std::unique_ptr<FenceEvent>> Submit(CopyDirection direction,
                                                             absl::Span<const CopyRange> ranges,
                                                             const FenceEvent* after) = 0;
  // Waits for all that was submitted: for whoever could not wait for a ticket, and gives the memory to others. An error is sticky
  // (IsSticky, device.h), whatever the driver calls it: nobody knows whether the GPU still writes.
  virtual absl::Status Drain() = 0;
  // The node of the machine's memory that is nearest to the GPU; -1: the driver does not say.
  virtual int numa_node() const = 0;
};

// Takes an ordinal ("0") or a UUID ("GPU-…"), as OpenCudaDevice (device.h). UNIMPLEMENTED in a binary built without CUDA.
// FAILED_PRECONDITION: the GPU's processes share a server (MPS).
absl::StatusOr<std::unique_ptr<BlockCopier>> OpenCudaBlockCopier(const std::string& ordinal_or_uuid);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_BLOCK_COPIER_H_
