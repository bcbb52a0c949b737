// Memory of the fake driver: an allocation is a memfd, and a device address is an address of the process.
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "tests/support/fake_cuda/state.h"

namespace kvpool::fake {
namespace {

constexpr char kMemoryName[] = "fake-cuda-memory";
constexpr unsigned char kOldByte = 0xbd;

bool IsWhole(size_t bytes) { return bytes != 0 && bytes % kGranularityBytes == 0; }

// REQUIRES: state.mu is held.
std::shared_ptr<Memory> Allocate(State& state, int device, size_t bytes) {
  DeviceState& owner = state.devices[device];
  if (bytes > state.settings.device_bytes - owner.used_bytes) return nullptr;
  const int fd = ::memfd_create(kMemoryName, MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  owner.used_bytes += bytes;
  auto memory = std::make_shared<Memory>(fd, bytes, device, &owner);
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  owner.residue.LeaveIn(fd, bytes);
  return memory;
}

bool IsDeviceMemory(int fd) {
  char target[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  return ::readlink(link.c_str(), target, sizeof target - 1) > 0 &&
         std::strstr(target, kMemoryName) != nullptr;
}

// Makes a range inaccessible: a reservation, or the end of a mapping. GPU addresses mean nothing in a
// forked child.
bool Protect(void* address, size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return ::mmap(address, bytes, PROT_NONE, kFlags, -1, 0) != MAP_FAILED &&
         ::madvise(address, bytes, MADV_DONTFORK) == 0;
}

bool MapAt(void* address, const Memory& memory, size_t bytes, int protection) {
  return ::mmap(address, bytes, protection, MAP_SHARED | MAP_FIXED, memory.fd, 0) != MAP_FAILED &&
         ::madvise(address, bytes, MADV_DONTFORK) == 0;
}

// Reserves addresses aligned like a GPU's; 0 where there are not that many.
CUdeviceptr ReserveAligned(size_t bytes) {
  const size_t padded_bytes = bytes + kGranularityBytes;
  if (padded_bytes < bytes) return 0;
  void* start = ::mmap(nullptr, padded_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 0;
  const auto first = reinterpret_cast<uintptr_t>(start);
  const uintptr_t aligned = (first + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
  if (aligned > first) ::munmap(start, aligned - first);
  const uintptr_t end = first + padded_bytes;
  if (end > aligned + bytes) ::munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
  ::madvise(reinterpret_cast<void*>(aligned), bytes, MADV_DONTFORK);
  return aligned;
}

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Maps memory wherever there is room. REQUIRES: state.mu is held.
CUdeviceptr MapAnywhere(const Memory& memory) {
  const CUdeviceptr address = ReserveAligned(memory.bytes);
  if (address != 0 && !MapAt(Pointer(address), memory, memory.bytes, PROT_READ | PROT_WRITE)) {
    ::munmap(Pointer(address), memory.bytes);
    return 0;
  }
  return address;
}

// The content of an IPC handle. The exporter's fd is opened through /proc. As with the driver, that works
// while the exporter lives, and the memory stays after its death.
struct IpcContent {
  char magic[8];
  pid_t pid;
  int fd;
  int device;
  ino_t inode;
  size_t bytes;
};
constexpr char kIpcMagic[8] = "fakeipc";
static_assert(sizeof(IpcContent) <= sizeof(CUipcMemHandle));

}  // namespace
}  // namespace kvpool::fake

using namespace kvpool::fake;  // NOLINT: entry points must be in the global namespace

CUresult CUDAAPI cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return Call("cuMemGetInfo", Needs::kContext, [&](State& state) {
    const std::lock_guard lock(state.mu);
    *total_bytes = state.settings.device_bytes;
    *free_bytes = state.settings.device_bytes - state.devices[CurrentDevice()].used_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags) {
  return Call("cuMemGetAllocationGranularity", Needs::kInit, [&](State& state) {
    if (prop->location.id < 0 || prop->location.id >= state.settings.device_count)
      return CUDA_ERROR_INVALID_VALUE;
    *bytes = kGranularityBytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                             const CUmemAllocationProp* prop, unsigned long long flags) {
  return Call("cuMemCreate", Needs::kInit, [&](State& state) {
    const bool known = prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                       prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id >= 0 &&
                       prop->location.id < state.settings.device_count &&
                       prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (!known || !IsWhole(bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(state.mu);
    std::shared_ptr<Memory> memory = Allocate(state, prop->location.id, bytes);
    if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = state.next_handle++;
    state.handles[*handle] = std::move(memory);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return Call("cuMemRelease", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto found = state.handles.find(handle);
    if (found == state.handles.end()) return CUDA_ERROR_INVALID_VALUE;
    // What this process has made is looked at once more when it is freed.
    if (!found->second->is_own()) found->second->CloseFd();
    state.handles.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
  return Call("cuMemExportToShareableHandle", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto found = state.handles.find(handle);
    if (found == state.handles.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const int fd = ::fcntl(found->second->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memcpy(out, &fd, sizeof fd);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle,
                                                CUmemAllocationHandleType type) {
  return Call("cuMemImportFromShareableHandle", Needs::kContext, [&](State& state) {
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(os_handle));
    struct stat status;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || ::fstat(fd, &status) != 0 ||
        !IsDeviceMemory(fd)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::lock_guard lock(state.mu);
    *handle = state.next_handle++;
    state.handles[*handle] = std::make_shared<Memory>(copy, status.st_size, CurrentDevice(), nullptr);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                                     unsigned long long flags) {
  return Call("cuMemAddressReserve", Needs::kInit, [&](State& state) {
    if (!IsWhole(bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(state.mu);
    *address = ReserveAligned(bytes);
    if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    state.reservations[*address] = bytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  return Call("cuMemAddressFree", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto found = state.reservations.find(address);
    const auto inside = state.mappings.lower_bound(address);
    if (found == state.reservations.end() || found->second != bytes ||
        (inside != state.mappings.end() && inside->first < address + bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    state.reservations.erase(found);
    ::munmap(Pointer(address), bytes);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return Call("cuMemMap", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto found = state.handles.find(handle);
    const auto reservation = state.reservations.upper_bound(address);
    if (found == state.handles.end() || reservation == state.reservations.begin() || offset != 0 ||
        flags != 0 || !IsWhole(bytes) || address % kGranularityBytes != 0 || bytes > found->second->bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const auto& [start, reserved_bytes] = *std::prev(reservation);
    if (address + bytes > start + reserved_bytes) return CUDA_ERROR_INVALID_VALUE;
    const auto next = state.mappings.lower_bound(address);
    const bool hits_next = next != state.mappings.end() && next->first < address + bytes;
    const bool hits_previous =
        next != state.mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
    if (hits_next || hits_previous) return CUDA_ERROR_INVALID_VALUE;
    if (!MapAt(Pointer(address), *found->second, bytes, PROT_NONE)) return CUDA_ERROR_MAP_FAILED;
    state.mappings[address] = {.bytes = bytes, .memory = found->second, .protection = PROT_NONE};
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                                size_t count) {
  return Call("cuMemSetAccess", Needs::kInit, [&](State& state) {
    const std::lock_guard lock(state.mu);
    // kvpool gives access to one mapping at a time; the driver takes ranges of several.
    const auto found = state.mappings.find(address);
    if (found == state.mappings.end() || found->second.bytes != bytes || count != 1)
      return CUDA_ERROR_INVALID_VALUE;
    int protection = PROT_NONE;
    if (access->flags == CU_MEM_ACCESS_FLAGS_PROT_READ) protection = PROT_READ;
    if (access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection = PROT_READ | PROT_WRITE;
    if (::mprotect(Pointer(address), bytes, protection) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    found->second.protection = protection;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t bytes) {
  return Call("cuMemUnmap", Needs::kInit, [&](State& state) {
    // A GPU does not wait for its streams: what they reach there later is a fault.
    const std::unique_lock nobody_reaches(MappingsInUse());
    const std::lock_guard lock(state.mu);
    const auto found = state.mappings.find(address);
    if (found == state.mappings.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!Protect(Pointer(address), bytes)) return CUDA_ERROR_MAP_FAILED;
    state.mappings.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  return Call("cuMemAlloc", Needs::kContext, [&](State& state) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(state.mu);
    // The smallest thing that a driver takes for an allocation is a page of its own.
    const size_t whole_bytes = (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
    std::shared_ptr<Memory> memory =
        whole_bytes < bytes ? nullptr : Allocate(state, CurrentDevice(), whole_bytes);
    *address = memory != nullptr ? MapAnywhere(*memory) : 0;
    if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (state.settings.kernels == Kernels::kPtx) memory->shadow = std::make_unique<Shadow>(whole_bytes);
    state.mappings[*address] = {
        .bytes = whole_bytes, .memory = std::move(memory), .protection = PROT_READ | PROT_WRITE};
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  return Call("cuMemFree", Needs::kContext, [&](State& state) {
    DrainStreams();
    const std::lock_guard lock(state.mu);
    const auto found = state.mappings.find(address);
    if (found == state.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(Pointer(address), found->second.bytes);
    state.mappings.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemHostAlloc(void** pointer, size_t bytes, unsigned int) {
  return Call("cuMemHostAlloc", Needs::kContext, [&](State& state) {
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(address, kOldByte, bytes);
    const std::lock_guard lock(state.mu);
    state.pinned[address] = bytes;
    *pointer = address;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemFreeHost(void* pointer) {
  return Call("cuMemFreeHost", Needs::kContext, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto found = state.pinned.find(pointer);
    if (found == state.pinned.end()) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(pointer, found->second);
    state.pinned.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemHostRegister(void* memory, size_t bytes, unsigned int flags) {
  return Call("cuMemHostRegister", Needs::kContext, [&](State& state) {
    if (bytes == 0 || (flags & ~CU_MEMHOSTREGISTER_PORTABLE) != 0) return CUDA_ERROR_INVALID_VALUE;
    // Pages that are not there can't be locked.
    const auto page_bytes = static_cast<uintptr_t>(::getpagesize());
    const uintptr_t in_page = reinterpret_cast<uintptr_t>(memory) % page_bytes;
    std::vector<unsigned char> there((in_page + bytes) / page_bytes + 1);
    if (::mincore(static_cast<char*>(memory) - in_page, in_page + bytes, there.data()) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const std::lock_guard lock(state.mu);
    uintptr_t first;
    if (!FindRegistered(state, memory, bytes, &first) || first != 0) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    state.registered[reinterpret_cast<uintptr_t>(memory)] = {
        .bytes = bytes, .device = (flags & CU_MEMHOSTREGISTER_PORTABLE) != 0 ? -1 : CurrentDevice()};
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemHostUnregister(void* memory) {
  return Call("cuMemHostUnregister", Needs::kContext, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const bool known = state.registered.erase(reinterpret_cast<uintptr_t>(memory)) == 1;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  return Call("cuIpcGetMemHandle", Needs::kContext, [&](State& state) {
    const std::lock_guard lock(state.mu);
    const auto found = state.mappings.find(address);
    // Only memory of cuMemAlloc has a handle; VMM memory lies in a reservation.
    const auto reservation = state.reservations.upper_bound(address);
    const bool reserved = reservation != state.reservations.begin() &&
                          address < std::prev(reservation)->first + std::prev(reservation)->second;
    struct stat status;
    if (found == state.mappings.end() || reserved || ::fstat(found->second.memory->fd, &status) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    found->second.memory->shadow.reset();  // Other processes write it, too, from now on.
    IpcContent content = {.pid = ::getpid(),
                          .fd = found->second.memory->fd,
                          .device = found->second.memory->device,
                          .inode = status.st_ino,
                          .bytes = found->second.bytes};
    std::memcpy(content.magic, kIpcMagic, sizeof content.magic);
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags) {
  return Call("cuIpcOpenMemHandle", Needs::kContext, [&](State& state) {
    IpcContent content;
    std::memcpy(&content, &handle, sizeof content);
    if (std::memcmp(content.magic, kIpcMagic, sizeof content.magic) != 0 ||
        flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (content.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    const std::string key(handle.reserved, sizeof handle.reserved);
    const std::lock_guard lock(state.mu);
    for (auto& [start, import] : state.imports) {
      if (import.handle != key) continue;
      ++import.opened;
      *address = start;
      return CUDA_SUCCESS;
    }
    const std::string path = "/proc/" + std::to_string(content.pid) + "/fd/" + std::to_string(content.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    auto memory = std::make_shared<Memory>(fd, content.bytes, CurrentDevice(), nullptr);
    struct stat status;
    if (::fstat(fd, &status) != 0 || status.st_ino != content.inode || content.device != CurrentDevice()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *address = MapAnywhere(*memory);
    if (*address == 0) return CUDA_ERROR_MAP_FAILED;
    Import& import = state.imports[*address];
    import.mapping.bytes = content.bytes;
    import.mapping.memory = std::move(memory);
    import.handle = key;
    import.opened = 1;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
  return Call("cuIpcCloseMemHandle", Needs::kContext, [&](State& state) {
    DrainStreams();
    const std::lock_guard lock(state.mu);
    const auto found = state.imports.find(address);
    if (found == state.imports.end()) return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.opened > 0) return CUDA_SUCCESS;
    ::munmap(Pointer(address), found->second.mapping.bytes);
    state.imports.erase(found);
    return CUDA_SUCCESS;
  });
}
