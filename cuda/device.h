// The place where KV memory lives: one GPU, or host memory.
//
// A device makes slabs. A slab is one physical allocation. The daemon sees it from the start, a member
// process (an engine) once it has imported the slab's handle. The memory lives as long as any process maps it
// or holds its fd: the death of the daemon frees nothing that an engine still maps.
//
//   made by          handed over as                 imported by
//   MakeSlab         a file descriptor (dup'ed)     MemberMemory::MapSlab, until UnmapSlab
//   MakeIpcSlab      64 bytes of CUipcMemHandle     MemberMemory::MapIpcSlab; cuda only, one for each space
//
// The functions that headers of this folder declare are defined in host/ for host memory, and in driver/ for
// GPUs. In a build without nvcc cuda/CMakeLists.txt takes the last column in place of the column before it.
//
//   declared                               in host/             in driver/             in driver/, no nvcc
//   MakeHostDevice, OpenCudaDevice         host_device.cc       cuda_device.cc         cuda_absent.cc
//   CudaDeviceCount                                             cuda_device.cc         cuda_absent.cc
//   ReserveHostMemory, ReserveCudaMemory   host_member.cc       cuda_member.cc         cuda_member_absent.cc
//   CudaOrdinal                                                 cuda_context.cc        cuda_member_absent.cc
//   MakeHostStamper, OpenCudaStamper       host_stamper.cc      cuda_stamper.cc        cuda_absent.cc
//   OpenCudaFenceEvents                                         cuda_fence_events.cc   cuda_member_absent.cc
//   OpenCudaBlockCopier                                         cuda_block_copier.cc   cuda_member_absent.cc
//   MakeHostKvCompute                      host_kv_compute.cc
//
// IsSticky is defined in sticky.cc. A GPU's KvCompute is driver/cuda_kv_compute.cc, by Device::MakeKvCompute.
//
// A device is thread-safe. Its calls may take milliseconds: none is made under a lock that a verb takes.
#ifndef KVPOOL_CUDA_DEVICE_H_
#define KVPOOL_CUDA_DEVICE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

using IpcHandle = std::array<std::byte, 64>;

// One physical allocation on a device, owned and mapped by this process; all zero when made. Its destructor
// unmaps it here and gives up this process's hold; the memory itself is freed when the last importer lets go.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual size_t bytes() const = 0;
  // Its address in this process, on the host or on the device; 0 where the device maps nothing.
  virtual uint64_t address() const = 0;
  // A new fd for the memory, which can be passed to a member; FAILED_PRECONDITION for IPC slabs.
  virtual absl::StatusOr<UniqueFd> Export() const = 0;
  // The handle of an IPC slab; FAILED_PRECONDITION for others.
  virtual absl::StatusOr<IpcHandle> ipc_handle() const = 0;
  // The memory goes back to the system with this slab, whoever else has it open or mapped: a child that an engine has forked, or a
  // peer that kept the descriptor. It holds zeros from then on, and new memory, of whoever touches it. False: nothing like it can be
  // done, as on a GPU. There it comes back when all have let go of it.
  virtual bool Discard() { return false; }
};

class KvCompute;
struct KvComputeOptions;

class Device {
 public:
  virtual ~Device() = default;
  // "host", or the GPU's UUID as "GPU-8-4-4-4-12".
  virtual const std::string& id() const = 0;
  // A name for people: "host memory", "NVIDIA H200".
  virtual const std::string& name() const = 0;
  // The UUID's 16 bytes; empty for host.
  virtual std::string uuid_bytes() const = 0;
  // Slab sizes are multiples of this: the allocation granularity, at least 2 MiB.
  virtual size_t granularity_bytes() const = 0;
  // The memory of the device, and how much of it is free now as the system reports it.
  virtual size_t total_bytes() const = 0;
  virtual absl::StatusOr<size_t> free_bytes() const = 0;
  // The slab is zeroed, and the zeros are in memory, before this returns. RESOURCE_EXHAUSTED: the device is
  // out of memory, with the bytes asked for and the bytes free. INVALID_ARGUMENT: `bytes` is 0 or not a
  // multiple of the granularity.
  virtual absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) = 0;
  // The slab behind a descriptor that a slab of this device had exported, in this process or in one that has ended; with what
  // is in it. UNIMPLEMENTED: this device can't. INVALID_ARGUMENT: it is not memory of this size (a GPU's driver tells only
  // that it is less, and with an error of its own).
  virtual absl::StatusOr<std::unique_ptr<Slab>> AdoptSlab(UniqueFd fd, size_t bytes) {
    return absl::UnimplementedError(absl::StrCat(id(), ": slabs of an earlier daemon can't be had here"));
  }
  // What is known to speak against that: whose work goes on after a process has ended may write into its memory then.
  virtual absl::Status OutlivesProcesses() const { return absl::OkStatus(); }
  // One allocation that is handed out as an IPC handle. UNIMPLEMENTED on host.
  virtual absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) = 0;
  // Copies between slabs of this device, which do not overlap; the bytes are there when it returns.
  struct Copy {
    uint64_t from = 0, to = 0;  // Addresses, as Slab::address has them.
    uint64_t bytes = 0;
  };
  // UNIMPLEMENTED: this device can't.
  virtual absl::Status CopyAll(absl::Span<const Copy>) {
    return absl::UnimplementedError(absl::StrCat(id(), ": blocks can't be copied here"));
  }
  // Scores and moves K and V in this device's slabs (cuda/kv_compute.h). UNIMPLEMENTED: this device can't.
  virtual absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) = 0;
};

// A member process's view of one space on one device: a reservation of addresses, into which slabs are mapped
// so that address(b) = base + b * block_stride_bytes holds across slabs. With warmup_scratch the whole range
// is private scratch until FinishWarmup, and slabs that arrive are imported and held back. Host ranges are
// MADV_DONTFORK. Thread-compatible: one thread maps.
class MemberMemory {
 public:
  virtual ~MemberMemory() = default;
  virtual uint64_t base() const = 0;
  virtual size_t reserved_bytes() const = 0;
  // Imports `fd`, which is closed in any case, and maps it at base + offset_bytes; during warm-up it is
  // imported now and mapped by FinishWarmup. INVALID_ARGUMENT: the fd is not memory of this size (a GPU's
  // driver tells only that it is less), or the range is not reserved or already mapped. FAILED_PRECONDITION:
  // an IPC handle is mapped.
  virtual absl::Status MapSlab(UniqueFd fd, size_t offset_bytes, size_t bytes) = 0;
  // Gives up the slab that was mapped there, or held back: the process keeps nothing of it. The addresses stay reserved, and are
  // not to be touched until another slab is mapped over them. INVALID_ARGUMENT: no slab is mapped that begins there and has
  // this size. FAILED_PRECONDITION: an IPC handle is mapped. REQUIRES: none of the caller's work touches the slab. A GPU's driver
  // does not wait for what is queued: what reaches the slab later loses the context.
  virtual absl::Status UnmapSlab(size_t offset_bytes, size_t bytes) = 0;
  // Waits until what this process has queued on the device is done. FAILED_PRECONDITION: a stream captures a graph, so that nobody
  // can wait, and the graph is broken.
  virtual absl::Status FinishWork() { return absl::OkStatus(); }
  // Opens an IPC handle as the whole space; base() moves to the address that the driver chose.
  // FAILED_PRECONDITION on host, after any other mapping, with warm-up scratch, or if the handle was made by
  // a process of this process's own id, in another container or not.
  virtual absl::Status MapIpcSlab(const IpcHandle& handle, size_t bytes) = 0;
  // Replaces scratch by the slabs held back, at the same addresses. REQUIRES: the caller's device work on
  // scratch is done. It may be called again after an error.
  virtual absl::Status FinishWarmup() = 0;
};

struct MemberMemoryOptions {
  size_t reserve_bytes = 0;  // a multiple of the granularity
  bool warmup_scratch = false;
  // The physical memory of scratch on a GPU: one allocation of this size, mapped again and again across
  // the range.
  size_t scratch_bytes = 0;
};

// True for a GPU error after which its context, and everything in it, is unusable for the rest of the
// process: the daemon must say so and end. Every later call meets the error again, free_bytes() included,
// which is where an error that a destructor met is seen.
bool IsSticky(const absl::Status& status);

// Host memory. `capacity_bytes` is what total_bytes() reports.
struct HostDeviceOptions {
  size_t capacity_bytes = 0;
  bool try_huge_pages = true;  // ordinary pages where the pool of huge pages is short
};
std::unique_ptr<Device> MakeHostDevice(const HostDeviceOptions& options);
absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveHostMemory(const MemberMemoryOptions& options);

// A GPU, through the driver API: "0" (an ordinal, resolved to its UUID at once) or "GPU-…". UNAVAILABLE:
// there is no driver, with the loader's words. UNIMPLEMENTED: "built without CUDA".
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const std::string& ordinal_or_uuid);
absl::StatusOr<int> CudaDeviceCount();
// The GPU's number in this process, which depends on its CUDA_VISIBLE_DEVICES: CUDA's runtime and DLPack go
// by it.
absl::StatusOr<int> CudaOrdinal(const std::string& uuid_bytes);
// `uuid_bytes` are those of Device::uuid_bytes(). The mappings belong to this process's primary context.
absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveCudaMemory(const std::string& uuid_bytes,
                                                                const MemberMemoryOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_DEVICE_H_
