// A member's view of a space on a GPU.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/member_ranges.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// The status for a handle of another process that did not open. A shortage of memory or a GPU that is gone is
// not the sender's fault; any other error is.
absl::Status SendersFault(const absl::Status& status) {
  if (absl::IsResourceExhausted(status) || IsSticky(status)) return status;
  return absl::InvalidArgumentError(status.message());
}

// One allocation mapped again and again, so that an engine's warm-up may write anywhere and costs little
// memory. The driver maps allocations from their start only, so the rest at the end of the range has a
// smaller one.
struct Scratch {
  std::vector<CudaAllocation> memory;
  std::vector<CudaMapping> mappings;
};

class CudaMember : public MemberMemory {
 public:
  CudaMember(std::shared_ptr<const CudaContext> context, CudaAddresses addresses, size_t reserve_bytes,
             size_t granularity_bytes, bool warming_up, Scratch scratch)
      : context_(std::move(context)),
        addresses_(std::move(addresses)),
        base_(addresses_.get()),
        reserved_bytes_(reserve_bytes),
        ranges_(reserve_bytes, granularity_bytes),
        warming_up_(warming_up),
        scratch_(std::move(scratch)) {}

  // What is mapped here may be in use by work that an engine has queued and not waited for: a step, when its session
  // ends. Taking the memory away would fault it, and end the engine's context.
  ~CudaMember() override {
    if (mappings_.empty() && scratch_.mappings.empty() && !ipc_.valid()) return;
    const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    if (!current.ok()) return;
    const absl::Status finished = context_->FinishAll("unmapping a space");
    // A context that is lost has no work left. One in which a stream captures a graph can't be waited for, so that its memory stays
    // mapped, until the process ends.
    if (finished.ok() || IsSticky(finished)) return;
    std::fprintf(stderr, "kvpool: a space stays mapped: %s\n", finished.ToString().c_str());
    static Mutex mu;
    static std::vector<Left>& left = *new std::vector<Left>();
    MutexLock lock(&mu);
    left.push_back({std::move(addresses_), std::move(scratch_), std::move(mappings_), std::move(ipc_)});
  }

  uint64_t base() const override { return base_; }
  size_t reserved_bytes() const override { return reserved_bytes_; }

  absl::Status MapSlab(UniqueFd fd, size_t offset_bytes, size_t bytes) override {
    if (ipc_.valid())
      return absl::FailedPreconditionError("this member has mapped an IPC handle: it takes no slabs");
    RETURN_IF_ERROR(ranges_.CheckFree(offset_bytes, bytes));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    ASSIGN_OR_RETURN(CudaAllocation memory, Import(std::move(fd)));
    if (warming_up_) {
      held_back_.push_back({std::move(memory), offset_bytes, bytes});
    } else {
      RETURN_IF_ERROR(Map(memory, offset_bytes, bytes));
    }
    ranges_.Add(offset_bytes, bytes);
    return absl::OkStatus();
  }

  absl::Status UnmapSlab(size_t offset_bytes, size_t bytes) override {
    if (ipc_.valid())
      return absl::FailedPreconditionError(
          "this member has mapped an IPC handle: it has no slabs to give up");
    RETURN_IF_ERROR(ranges_.CheckMapped(offset_bytes, bytes));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    if (warming_up_) {
      std::erase_if(held_back_, [&](const HeldBack& slab) { return slab.offset_bytes == offset_bytes; });
    }
    // A warm-up that ended half way has mapped it already.
    if (const auto mapped = mappings_.find(offset_bytes); mapped != mappings_.end()) {
      RETURN_IF_ERROR(mapped->second.Release(absl::StrCat("unmapping a slab at offset ", offset_bytes)));
      mappings_.erase(mapped);
    }
    ranges_.Remove(offset_bytes);
    return absl::OkStatus();
  }

  absl::Status FinishWork() override {
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    return context_->FinishAll("unmapping a slab");
  }

  absl::Status MapIpcSlab(const IpcHandle& handle, size_t bytes) override {
    if (ipc_.valid()) return absl::FailedPreconditionError("this member has mapped an IPC handle already");
    if (warming_up_ || !ranges_.slabs().empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "an IPC handle is a whole space: this member has ",
          warming_up_ ? "warm-up scratch" : absl::StrCat(ranges_.slabs().size(), " slabs mapped")));
    }
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    CUipcMemHandle driver_handle;
    std::memcpy(driver_handle.reserved, handle.data(), handle.size());
    CUdeviceptr address;
    const CUresult result =
        context_->driver().cuIpcOpenMemHandle(&address, driver_handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    const absl::Status status = context_->Check(result, "ipc_handle: cuIpcOpenMemHandle");
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
      // The driver takes an exporter with the importer's process id for the importer itself.
      return absl::FailedPreconditionError(
          absl::StrCat(status.message(), "; the handle was made by a process of the same id, ", ::getpid(),
                       ": in containers, let daemon and engine share a process namespace, or use slabs"));
    }
    if (!status.ok()) return SendersFault(status);
    ipc_ = CudaImport(context_, address);
    addresses_ = CudaAddresses();  // the driver chose others
    base_ = address;
    reserved_bytes_ = bytes;
    return absl::OkStatus();
  }

  absl::Status FinishWarmup() override {
    if (!warming_up_) return absl::FailedPreconditionError("FinishWarmup: this member is not warming up");
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    RETURN_IF_ERROR(context_->FinishAll("ending a warm-up"));
    scratch_ = Scratch();
    while (!held_back_.empty()) {
      const HeldBack& slab = held_back_.back();
      RETURN_IF_ERROR(Map(slab.memory, slab.offset_bytes, slab.bytes));
      held_back_.pop_back();  // a call after an error goes on with the next
    }
    warming_up_ = false;
    return absl::OkStatus();
  }

 private:
  // A slab that arrived during warm-up, imported but mapped nowhere yet.
  struct HeldBack {
    CudaAllocation memory;
    size_t offset_bytes;
    size_t bytes;
  };

  absl::StatusOr<CudaAllocation> Import(UniqueFd fd) {
    absl::StatusOr<CudaAllocation> memory = ImportMemory(context_, fd);
    if (!memory.ok()) return SendersFault(memory.status());
    return memory;
  }

  absl::Status Map(const CudaAllocation& memory, size_t offset_bytes, size_t bytes) {
    absl::StatusOr<CudaMapping> mapping = MapMemory(context_, memory, base_ + offset_bytes, bytes);
    if (mapping.ok()) {
      mappings_.emplace(offset_bytes, *std::move(mapping));
      return absl::OkStatus();
    }
    return SendersFault(
        absl::Status(mapping.status().code(),
                     absl::StrCat("slab of ", bytes, " bytes at offset ", offset_bytes,
                                  ": is the fd's memory that large? ", mapping.status().message())));
  }

  // What stays mapped.
  struct Left {
    CudaAddresses addresses;
    Scratch scratch;
    std::map<size_t, CudaMapping> mappings;
    CudaImport ipc;
  };

  const std::shared_ptr<const CudaContext> context_;
  // Declared before the mappings into them, and so destroyed after these.
  CudaAddresses addresses_;
  uint64_t base_;
  size_t reserved_bytes_;
  MemberRanges ranges_;
  bool warming_up_;
  Scratch scratch_;
  std::vector<HeldBack> held_back_;
  std::map<size_t, CudaMapping> mappings_;  // Keyed by offset.
  CudaImport ipc_;
};

absl::StatusOr<Scratch> MapScratch(const std::shared_ptr<const CudaContext>& context, CUdeviceptr base,
                                   const MemberMemoryOptions& options) {
  Scratch scratch;
  size_t offset_bytes = 0;
  while (offset_bytes < options.reserve_bytes) {
    const size_t bytes = std::min(options.scratch_bytes, options.reserve_bytes - offset_bytes);
    if (offset_bytes == 0 || bytes < options.scratch_bytes) {
      ASSIGN_OR_RETURN(CudaAllocation memory, CreateMemory(context, bytes));
      scratch.memory.push_back(std::move(memory));
    }
    ASSIGN_OR_RETURN(CudaMapping mapping,
                     MapMemory(context, scratch.memory.back(), base + offset_bytes, bytes));
    scratch.mappings.push_back(std::move(mapping));
    offset_bytes += bytes;
  }
  return scratch;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveCudaMemory(const std::string& uuid_bytes,
                                                                const MemberMemoryOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<const CudaContext> context, CudaContext::OpenUuid(uuid_bytes));
  ASSIGN_OR_RETURN(const CurrentContext current, context->MakeCurrent());
  ASSIGN_OR_RETURN(size_t granularity_bytes, MemoryGranularity(*context));
  granularity_bytes = std::max(granularity_bytes, kSlabGranularityBytes);
  RETURN_IF_ERROR(CheckReservation(options, granularity_bytes));
  if (options.warmup_scratch &&
      (options.scratch_bytes == 0 || options.scratch_bytes % granularity_bytes != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("scratch_bytes: ", options.scratch_bytes,
                                                   " is not a positive multiple of ", granularity_bytes));
  }
  ASSIGN_OR_RETURN(CudaAddresses addresses, ReserveAddresses(context, options.reserve_bytes));
  Scratch scratch;
  if (options.warmup_scratch) {
    ASSIGN_OR_RETURN(scratch, MapScratch(context, addresses.get(), options));
  }
  return std::make_unique<CudaMember>(std::move(context), std::move(addresses), options.reserve_bytes,
                                      granularity_bytes, options.warmup_scratch, std::move(scratch));
}

}  // namespace kvpool
