#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/block_copier.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/driver/event_pool.h"
#include "cuda/sticky.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

using CudaRegistration = CudaOwned<&Driver::cuMemHostUnregister, void*>;

void* HostPointer(uint64_t address) { return reinterpret_cast<void*>(address); }

class CudaBlockCopier : public BlockCopier {
 public:
  struct Traits {
    bool takes_batches = false;
    int numa_node = -1;
  };
  CudaBlockCopier(std::shared_ptr<const CudaContext> context, CudaStream stream, const Traits& traits)
      : context_(std::move(context)),
        events_(EventPool::Make(context_, {.what = "copies", .max_events = kMaxCopyTickets})),
        stream_(std::move(stream)),
        numa_node_(traits.numa_node),
        takes_batches_(traits.takes_batches) {}
  ~CudaBlockCopier() override {
    // The GPU reaches page-locked memory by addresses of its own, which end with the registration.
    context_->GiveBack("waiting for copies", context_->driver().cuStreamSynchronize, stream_.get());
  }

  absl::Status Register(uint64_t host_address, size_t bytes) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    MutexLock lock(&mu_);
    void* const memory = HostPointer(host_address);
    // For the contexts of all GPUs: the driver does not register it a second time.
    RETURN_IF_ERROR(
        context_->Check(context_->driver().cuMemHostRegister(memory, bytes, CU_MEMHOSTREGISTER_PORTABLE),
                        absl::StrCat("cuMemHostRegister of ", bytes, " bytes")));
    registered_[host_address] = {.bytes = bytes, .registration = CudaRegistration(context_, memory)};
    return absl::OkStatus();
  }

  absl::Status Unregister(uint64_t host_address) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    MutexLock lock(&mu_);
    const auto found = registered_.find(host_address);
    if (found == registered_.end() || !found->second.registration.valid()) {
      return absl::InvalidArgumentError(
          absl::StrCat("no memory that begins at ", host_address, " is registered"));
    }
    RETURN_IF_ERROR(found->second.registration.Release("cuMemHostUnregister"));
    registered_.erase(found);
    return absl::OkStatus();
  }

  void ShareRegistered(uint64_t host_address, size_t bytes) override {
    MutexLock lock(&mu_);
    registered_[host_address] = {.bytes = bytes, .registration = {}};
  }

  absl::StatusOr<std::unique_ptr<FenceEvent>> Record(void* stream) override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    ASSIGN_OR_RETURN(CudaEvent event, events_->Take());
    return events_->Record(std::move(event), static_cast<CUstream>(stream));
  }

  absl::StatusOr<std::unique_ptr<FenceEvent>> Submit(CopyDirection direction,
                                                     absl::Span<const CopyRange> ranges,
                                                     const FenceEvent* after) override {
    if (ranges.size() > kMaxCopyRanges) {
      return absl::InvalidArgumentError(
          absl::StrCat("ranges: ", ranges.size(), " asked, at most ", kMaxCopyRanges, " taken"));
    }
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (ranges[i].bytes == 0)
        return absl::InvalidArgumentError(absl::StrCat("ranges[", i, "] has no bytes"));
    }
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    MutexLock lock(&mu_);
    ASSIGN_OR_RETURN(CudaEvent event, events_->Take());
    const absl::Status queued = Queue(direction, Runs(ranges), after);
    absl::StatusOr<std::unique_ptr<FenceEvent>> ticket = events_->Record(std::move(event), stream_.get());
    if (queued.ok() && ticket.ok()) return ticket;
    // The caller gives the memory to others, and copies before the one that failed may be under way.
    absl::Status failed = !queued.ok() ? queued : ticket.status();
    absl::Status drained = Drain();
    return drained.ok() || IsSticky(failed) ? failed : drained;
  }

  absl::Status Drain() override {
    absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    if (current.ok()) return context_->Finish(stream_.get(), "copying blocks");
    absl::Status failed = current.status();
    MarkSticky(&failed);
    return failed;
  }

  int numa_node() const override { return numa_node_; }

 private:
  struct Registered {
    uint64_t bytes = 0;
    CudaRegistration registration;  // Empty: another copier has registered it.
  };

  // Which registration the address is in; nullptr: in none.
  const Registered* RegisteredAt(uint64_t host_address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto after = registered_.upper_bound(host_address);
    if (after == registered_.begin()) return nullptr;
    const auto& [first, registered] = *std::prev(after);
    return host_address - first < registered.bytes ? &registered : nullptr;
  }

  // Joins ranges that follow each other on both sides. The driver does not take a copy across the edge of a registration.
  std::vector<CopyRange> Runs(absl::Span<const CopyRange> ranges) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<CopyRange> runs;
    for (const CopyRange& range : ranges) {
      CopyRange* const last = runs.empty() ? nullptr : &runs.back();
      if (last != nullptr && last->device_address + last->bytes == range.device_address &&
          last->host_address + last->bytes == range.host_address &&
          RegisteredAt(last->host_address) == RegisteredAt(range.host_address)) {
        last->bytes += range.bytes;
      } else {
        runs.push_back(range);
      }
    }
    return runs;
  }

  absl::Status Queue(CopyDirection direction, const std::vector<CopyRange>& runs, const FenceEvent* after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const Driver& driver = context_->driver();
    if (after != nullptr) {
      RETURN_IF_ERROR(
          context_->Check(driver.cuStreamWaitEvent(stream_.get(), static_cast<CUevent>(after->event()), 0),
                          "cuStreamWaitEvent"));
    }
    if (runs.empty()) return absl::OkStatus();
    // The addresses of a batch are as the GPU sees them: of other memory it would have none.
    bool registered = true;
    for (const CopyRange& run : runs) registered = registered && RegisteredAt(run.host_address) != nullptr;
    if (takes_batches_ && registered) {
      const CUresult result = QueueBatch(direction, runs);
      if (result != CUDA_ERROR_NOT_SUPPORTED) {
        return context_->Check(result, absl::StrCat("cuMemcpyBatchAsync of ", runs.size(), " runs"));
      }
      takes_batches_ = false;
      std::fprintf(stderr,
                   "kvpool: this driver does not support cuMemcpyBatchAsync: each run of a copy is a call\n");
    }
    return QueueEach(direction, runs);
  }

  CUresult QueueBatch(CopyDirection direction, const std::vector<CopyRange>& runs) {
    const Driver& driver = context_->driver();
    const bool to_device = direction == CopyDirection::kToDevice;
    std::vector<CUdeviceptr> to, from;
    std::vector<size_t> sizes;
    for (const CopyRange& run : runs) {
      to.push_back(to_device ? run.device_address : run.host_address);
      from.push_back(to_device ? run.host_address : run.device_address);
      sizes.push_back(run.bytes);
    }
    // By default sources may be read before what the stream waits for has passed.
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                                     .srcLocHint = {},
                                     .dstLocHint = {},
                                     .flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE};
    size_t first = 0;
    size_t failed = 0;
    return driver.memcpy_batch != nullptr
               ? driver.memcpy_batch(to.data(), from.data(), sizes.data(), runs.size(), &attributes, &first,
                                     1, stream_.get())
               : driver.memcpy_batch_12_8(to.data(), from.data(), sizes.data(), runs.size(), &attributes,
                                          &first, 1, &failed, stream_.get());
  }

  absl::Status QueueEach(CopyDirection direction, const std::vector<CopyRange>& runs) {
    const Driver& driver = context_->driver();
    for (const CopyRange& run : runs) {
      void* const host = HostPointer(run.host_address);
      const CUresult result =
          direction == CopyDirection::kToDevice
              ? driver.cuMemcpyHtoDAsync(run.device_address, host, run.bytes, stream_.get())
              : driver.cuMemcpyDtoHAsync(host, run.device_address, run.bytes, stream_.get());
      RETURN_IF_ERROR(context_->Check(result, absl::StrCat("a copy of ", run.bytes, " bytes")));
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<const CudaContext> context_;
  const std::shared_ptr<EventPool> events_;
  const CudaStream stream_;
  const int numa_node_;
  Mutex mu_;  // A submit's calls of the driver are not mixed with another's.
  bool takes_batches_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Registered> registered_ ABSL_GUARDED_BY(mu_);  // Keyed by first addresses.
};

// Whether the driver takes copies in batches. A batch has host memory's addresses as the GPU sees them. Where this attribute is 0, as
// in WSL, those of registered memory are not the host's, and a batch that names it loses the context.
absl::StatusOr<bool> TakesBatches(const CudaContext& context) {
  const Driver& driver = context.driver();
  int by_host_address = 0;
  RETURN_IF_ERROR(context.Check(
      driver.cuDeviceGetAttribute(
          &by_host_address, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, context.device()),
      "cuDeviceGetAttribute"));
  return by_host_address != 0 && (driver.memcpy_batch != nullptr || driver.memcpy_batch_12_8 != nullptr);
}

int NumaNode(const CudaContext& context) {
  int node = -1;
  // A driver of before 12.2 does not know the attribute.
  const CUresult result =
      context.driver().cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, context.device());
  return result == CUDA_SUCCESS ? node : -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockCopier>> OpenCudaBlockCopier(const std::string& ordinal_or_uuid) {
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::Open(ordinal_or_uuid));
  // A copy would go on into blocks that the daemon has given to others.
  RETURN_IF_ERROR(context->CheckEndsWithProcess());
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  ASSIGN_OR_RETURN(const bool takes_batches, TakesBatches(*context));
  ASSIGN_OR_RETURN(CudaStream stream, MakeLowPriorityStream(context));
  const CudaBlockCopier::Traits traits = {.takes_batches = takes_batches, .numa_node = NumaNode(*context)};
  return std::make_unique<CudaBlockCopier>(std::move(context), std::move(stream), traits);
}

}  // namespace kvpool
