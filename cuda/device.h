// Where KV memory lives: one GPU, or host memory.
//
// A device makes slabs. A slab is one physical allocation, visible to the daemon from its making and to a
// member process once that process has imported the slab's handle. Whoever holds a mapping or an open fd
// holds the memory: the death of the daemon frees nothing that an engine still maps.
//
//   made by            handed over as                 imported by
//   MakeSlab           a file descriptor (dup'ed)     MemberMemory::MapSlab
//   MakeIpcSlab        64 bytes of CUipcMemHandle     MemberMemory::MapIpcSlab   (cuda only, one a space)
//
// Thread-safe. Calls may take milliseconds: never under a lock that a verb takes.
#ifndef KVPOOL_CUDA_DEVICE_H_
#define KVPOOL_CUDA_DEVICE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

using IpcHandle = std::array<std::byte, 64>;

// One physical allocation on a device, owned and mapped by this process; all zero when made. Destroying it
// unmaps it here and gives up this process's hold; the memory itself goes when the last importer lets go.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual size_t bytes() const = 0;
  // Where it is mapped in this process: a host address, or a device address. 0 where the device maps nothing.
  virtual uint64_t address() const = 0;
  // A new fd for the memory, to be passed to a member; FAILED_PRECONDITION for IPC slabs.
  virtual absl::StatusOr<UniqueFd> Export() const = 0;
  // The handle of an IPC slab; FAILED_PRECONDITION for others.
  virtual absl::StatusOr<IpcHandle> ipc_handle() const = 0;
};

class KvCompute;
struct KvComputeOptions;

class Device {
 public:
  virtual ~Device() = default;
  // "host", or the GPU's UUID as "GPU-8-4-4-4-12".
  virtual const std::string& id() const = 0;
  // For people: "host memory", "NVIDIA H200".
  virtual const std::string& name() const = 0;
  // The UUID's 16 bytes; empty for host.
  virtual std::string uuid_bytes() const = 0;
  // Slab sizes are multiples of this: the allocation granularity, at least 2 MiB.
  virtual size_t granularity_bytes() const = 0;
  // Memory in all, and what is free of it now as the system reports it.
  virtual size_t total_bytes() const = 0;
  virtual absl::StatusOr<size_t> free_bytes() const = 0;
  // Zeroed, and the zeros are in memory, before this returns. RESOURCE_EXHAUSTED: the device is out of
  // memory, with the bytes asked for and the bytes free. INVALID_ARGUMENT: bytes is 0 or not a multiple of
  // the granularity.
  virtual absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) = 0;
  // One allocation to be handed out as an IPC handle. UNIMPLEMENTED on host.
  virtual absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) = 0;
  // What scores and moves K and V in this device's slabs (cuda/kv_compute.h). UNIMPLEMENTED: it can't.
  virtual absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) = 0;
};

// A member process's view of one space on one device: a reservation of addresses that slabs are mapped into.
// address(b) = base + b * block_stride_bytes holds across slabs. Until FinishWarmup the whole range is
// private scratch, if it was asked for, and slabs that arrive are imported and held back. Host ranges are
// MADV_DONTFORK. Thread-compatible: one thread maps.
class MemberMemory {
 public:
  virtual ~MemberMemory() = default;
  virtual uint64_t base() const = 0;
  virtual size_t reserved_bytes() const = 0;
  // Imports `fd` (closed in any case) and maps it at base + offset_bytes; during warm-up it is imported now
  // and mapped by FinishWarmup. INVALID_ARGUMENT: the fd is not memory of this size (a GPU's driver tells only
  // that it is less), or the range is not reserved or already mapped. FAILED_PRECONDITION: an IPC handle is
  // mapped.
  virtual absl::Status MapSlab(UniqueFd fd, size_t offset_bytes, size_t bytes) = 0;
  // Opens an IPC handle as the whole space; base() moves to where the driver put it. Cuda only, before any
  // other mapping and without warm-up scratch, else FAILED_PRECONDITION; so too if the handle was made by a
  // process of this process's own id, in another container or not.
  virtual absl::Status MapIpcSlab(const IpcHandle& handle, size_t bytes) = 0;
  // Replaces scratch by the slabs held back, over the same addresses. The caller's device work on scratch
  // must be done. After an error it may be asked again.
  virtual absl::Status FinishWarmup() = 0;
};

struct MemberMemoryOptions {
  size_t reserve_bytes = 0;  // Multiple of the granularity.
  bool warmup_scratch = false;
  // Physical memory behind scratch on a GPU: one allocation of this size, mapped over and over across the
  // range.
  size_t scratch_bytes = 0;
};

// True for a GPU error after which its context, and all that was in it, is unusable for the rest of the
// process: the daemon must say so and end. Every later call meets it again, free_bytes() among them: what a
// destructor could not report is found there.
bool IsSticky(const absl::Status& status);

// Host memory. `capacity_bytes` is what total_bytes() reports.
struct HostDeviceOptions {
  size_t capacity_bytes = 0;
  bool try_huge_pages = true;  // Falls back to ordinary pages when the pool of huge pages is short.
};
std::unique_ptr<Device> MakeHostDevice(const HostDeviceOptions& options);
absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveHostMemory(const MemberMemoryOptions& options);

// GPUs, through the driver API. "0" (an ordinal, resolved to its UUID at once) or "GPU-…". With no driver:
// UNAVAILABLE with the loader's words; in a binary built without CUDA: UNIMPLEMENTED, "built without CUDA".
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const std::string& ordinal_or_uuid);
absl::StatusOr<int> CudaDeviceCount();
// What this process, with its CUDA_VISIBLE_DEVICES, calls the GPU: the number that CUDA's runtime and DLPack know it by.
absl::StatusOr<int> CudaOrdinal(const std::string& uuid_bytes);
// `uuid_bytes` as Device::uuid_bytes() gave them; the member's primary context is used.
absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveCudaMemory(const std::string& uuid_bytes,
                                                                const MemberMemoryOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DEVICE_H_
