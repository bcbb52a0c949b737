// Host memory as a device: each slab is one memfd, sealed so that nobody can shrink it under a reader.
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "cuda/host/host_mapping.h"
#include "cuda/host/host_memory.h"
#include "cuda/kv_compute.h"
#include "cuda/member_ranges.h"
#include "proto/support/status_macros.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14; glibc has it since 2.35.
#define MADV_POPULATE_WRITE 23
#endif

namespace kvpool {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The bytes of the capacity that slabs have taken. Slabs share its ownership, since they may outlive
// their device.
class Budget {
 public:
  explicit Budget(size_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  bool Take(size_t bytes) {
    size_t used = used_bytes_.load();
    do {
      if (bytes > capacity_bytes_ - used) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
    return true;
  }
  void Return(size_t bytes) { used_bytes_ -= bytes; }
  size_t capacity_bytes() const { return capacity_bytes_; }
  size_t free_bytes() const { return capacity_bytes_ - used_bytes_.load(); }

 private:
  const size_t capacity_bytes_;
  std::atomic<size_t> used_bytes_ = 0;
};

// A share of the budget, which its destructor returns.
class Share {
 public:
  Share(std::shared_ptr<Budget> budget, size_t bytes) : budget_(std::move(budget)), bytes_(bytes) {}
  Share(Share&&) = default;
  ~Share() {
    if (budget_ != nullptr) budget_->Return(bytes_);
  }

 private:
  std::shared_ptr<Budget> budget_;
  size_t bytes_;
};

struct Memory {
  UniqueFd fd;
  HostMapping mapping;
};

class HostSlab : public Slab {
 public:
  HostSlab(Memory memory, Share share) : share_(std::move(share)), memory_(std::move(memory)) {}

  size_t bytes() const override { return memory_.mapping.bytes(); }
  uint64_t address() const override { return memory_.mapping.address(); }
  absl::StatusOr<UniqueFd> Export() const override {
    UniqueFd copy(::fcntl(memory_.fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return absl::ErrnoToStatus(errno, "exporting a slab: dup of its memfd");
    return copy;
  }
  absl::StatusOr<IpcHandle> ipc_handle() const override {
    return absl::FailedPreconditionError(
        "host slabs are handed over as file descriptors, not as IPC handles");
  }
  ~HostSlab() override {
    if (discard_ && ::fallocate(memory_.fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                                static_cast<off_t>(bytes())) != 0) {
      std::fprintf(stderr, "kvpool: discarding a slab of %zu bytes: %s\n", bytes(), std::strerror(errno));
    }
  }
  bool Discard() override { return discard_ = true; }

 private:
  // In this order the memory is freed before its share of the budget is returned.
  Share share_;
  Memory memory_;
  std::atomic<bool> discard_{false};
};

// Allocates every page now: this process's control group is charged, and a shortage is an error here instead
// of a SIGBUS in the process that touches the page first.
absl::Status Populate(const Memory& memory) {
  const size_t bytes = memory.mapping.bytes();
  if (::madvise(memory.mapping.data(), bytes, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
  if (errno == EINVAL && ::fallocate(memory.fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0)
    return absl::OkStatus();
  // EFAULT: touching a page would have raised SIGBUS, since none was left.
  return absl::ErrnoToStatus(errno == EFAULT ? ENOMEM : errno, absl::StrCat("populating ", bytes, " bytes"));
}

absl::StatusOr<Memory> MakeMemory(size_t bytes, unsigned int page_flags) {
  UniqueFd fd(::memfd_create("kvpool-slab", MFD_CLOEXEC | MFD_ALLOW_SEALING | page_flags));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("ftruncate of a memfd to ", bytes, " bytes"));
  }
  ASSIGN_OR_RETURN(HostMapping mapping, HostMapping::MapShared(fd.get(), bytes));
  Memory memory = {.fd = std::move(fd), .mapping = std::move(mapping)};
  RETURN_IF_ERROR(Populate(memory));
  if (::fcntl(memory.fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ErrnoToStatus(errno, "sealing a memfd");
  }
  return memory;
}

class HostDevice : public Device {
 public:
  HostDevice(size_t capacity_bytes, bool try_huge_pages)
      : budget_(std::make_shared<Budget>(capacity_bytes)), try_huge_pages_(try_huge_pages) {}

  const std::string& id() const override { return id_; }
  const std::string& name() const override { return name_; }
  std::string uuid_bytes() const override { return ""; }
  size_t granularity_bytes() const override { return kSlabGranularityBytes; }
  size_t total_bytes() const override { return budget_->capacity_bytes(); }
  absl::StatusOr<size_t> free_bytes() const override {
    ASSIGN_OR_RETURN(const HostMemory memory, ReadHostMemory(""));
    const size_t huge_bytes = try_huge_pages_ ? memory.huge_free_bytes : 0;
    return std::min(budget_->free_bytes(), memory.available_bytes + huge_bytes);
  }

  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override {
    if (bytes == 0 || bytes % kSlabGranularityBytes != 0) {
      return absl::InvalidArgumentError(absl::StrCat("slab bytes: ", bytes, " is not a positive multiple of ",
                                                     kSlabGranularityBytes,
                                                     ", the granularity of host memory"));
    }
    if (!budget_->Take(bytes)) {
      return absl::ResourceExhaustedError(absl::StrCat("host memory: ", bytes, " bytes asked, ",
                                                       budget_->free_bytes(), " of the capacity of ",
                                                       budget_->capacity_bytes(), " free"));
    }
    Share share(budget_, bytes);
    ASSIGN_OR_RETURN(Memory memory, MakePages(bytes));
    return std::make_unique<HostSlab>(std::move(memory), std::move(share));
  }
  absl::StatusOr<std::unique_ptr<Slab>> AdoptSlab(UniqueFd fd, size_t bytes) override {
    struct stat file;
    if (::fstat(fd.get(), &file) != 0) return absl::ErrnoToStatus(errno, "looking at a slab's memfd");
    // Without the seals somebody could shrink it under its readers.
    if (static_cast<size_t>(file.st_size) != bytes || (::fcntl(fd.get(), F_GET_SEALS) & kSeals) != kSeals) {
      return absl::InvalidArgumentError(absl::StrCat("adopting a slab of ", bytes,
                                                     " bytes: the descriptor has ", file.st_size,
                                                     ", or is no sealed memory"));
    }
    if (!budget_->Take(bytes)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host memory: a slab of ", bytes, " bytes to be adopted, ", budget_->free_bytes(),
                       " of the capacity of ", budget_->capacity_bytes(), " free"));
    }
    Share share(budget_, bytes);
    ASSIGN_OR_RETURN(HostMapping mapping, HostMapping::MapShared(fd.get(), bytes));
    return std::make_unique<HostSlab>(Memory{.fd = std::move(fd), .mapping = std::move(mapping)},
                                      std::move(share));
  }
  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t) override {
    return absl::UnimplementedError("IPC slabs exist on cuda devices only");
  }
  absl::Status CopyAll(absl::Span<const Copy> copies) override {
    for (const Copy& copy : copies) {
      std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override {
    return MakeHostKvCompute(options);
  }

 private:
  absl::StatusOr<Memory> MakePages(size_t bytes) const {
    if (try_huge_pages_) {
      // mmap takes all of the slab's huge pages from their pool or none, so a short pool is an error here.
      absl::StatusOr<Memory> memory = MakeMemory(bytes, MFD_HUGETLB | MFD_HUGE_2MB);
      if (memory.ok()) return memory;
    }
    // In a control group over its limit the kernel kills a process instead of returning ENOMEM, so the memory
    // is checked first.
    ASSIGN_OR_RETURN(const HostMemory now, ReadHostMemory(""));
    if (bytes > now.available_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("host memory: ", bytes, " bytes asked, ",
                                                       now.available_bytes, " of ", now.total_bytes,
                                                       " available on this machine"));
    }
    absl::StatusOr<Memory> memory = MakeMemory(bytes, 0);
    if (memory.ok()) return memory;
    return absl::Status(
        memory.status().code(),
        absl::StrCat("host memory: ", bytes, " bytes asked, ", now.available_bytes, " of ", now.total_bytes,
                     " available on this machine: ", memory.status().message()));
  }

  const std::string id_ = "host";
  const std::string name_ = "host memory";
  const std::shared_ptr<Budget> budget_;
  const bool try_huge_pages_;
};

}  // namespace

std::unique_ptr<Device> MakeHostDevice(const HostDeviceOptions& options) {
  return std::make_unique<HostDevice>(options.capacity_bytes, options.try_huge_pages);
}

}  // namespace kvpool
