// A member's view of a space in host memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "cuda/host/host_mapping.h"
#include "cuda/member_ranges.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

const char* KindOf(mode_t mode) {
  if (S_ISREG(mode)) return "a file";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "neither a file nor a pipe nor a socket";  // epoll, eventfd, pidfd, …
}

// A slab must be a memfd of exactly this size that can't shrink: otherwise its sender could truncate it, and
// the next access would raise SIGBUS.
absl::Status CheckSlabFd(int fd, size_t bytes) {
  struct stat status;
  if (::fstat(fd, &status) != 0)
    return absl::InvalidArgumentError(absl::StrCat("slab fd ", fd, " is not open"));
  const int seals = S_ISREG(status.st_mode) ? ::fcntl(fd, F_GET_SEALS) : -1;
  if (seals < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab fd ", fd, " is ", KindOf(status.st_mode), ", not a memfd"));
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab fd ", fd, ": the memfd is not sealed against shrinking"));
  }
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab fd ", fd, " holds ", status.st_size, " bytes, ", bytes, " were announced"));
  }
  if ((::fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
    return absl::InvalidArgumentError(absl::StrCat("slab fd ", fd, " is not open for reading and writing"));
  }
  return absl::OkStatus();
}

class HostMember : public MemberMemory {
 public:
  explicit HostMember(HostMapping range, bool warmup)
      : range_(std::move(range)), ranges_(range_.bytes(), kSlabGranularityBytes), warming_up_(warmup) {}

  uint64_t base() const override { return range_.address(); }
  size_t reserved_bytes() const override { return range_.bytes(); }

  absl::Status MapSlab(UniqueFd fd, size_t offset_bytes, size_t bytes) override {
    RETURN_IF_ERROR(ranges_.CheckFree(offset_bytes, bytes));
    RETURN_IF_ERROR(CheckSlabFd(fd.get(), bytes));
    if (warming_up_) {
      held_back_.push_back({std::move(fd), offset_bytes, bytes});
    } else {
      RETURN_IF_ERROR(MapOver(fd.get(), offset_bytes, bytes));
    }
    ranges_.Add(offset_bytes, bytes);
    return absl::OkStatus();
  }

  absl::Status UnmapSlab(size_t offset_bytes, size_t bytes) override {
    RETURN_IF_ERROR(ranges_.CheckMapped(offset_bytes, bytes));
    if (warming_up_) {
      std::erase_if(held_back_, [&](const HeldBack& slab) { return slab.offset_bytes == offset_bytes; });
    } else {
      RETURN_IF_ERROR(Protect(offset_bytes, bytes));
    }
    ranges_.Remove(offset_bytes);
    return absl::OkStatus();
  }

  absl::Status MapIpcSlab(const IpcHandle&, size_t) override {
    return absl::UnimplementedError("IPC handles exist on cuda devices only");
  }

  absl::Status FinishWarmup() override {
    if (!warming_up_) return absl::FailedPreconditionError("FinishWarmup: this member is not warming up");
    RETURN_IF_ERROR(Protect(0, range_.bytes()));
    for (const HeldBack& slab : held_back_)
      RETURN_IF_ERROR(MapOver(slab.fd.get(), slab.offset_bytes, slab.bytes));
    held_back_.clear();
    warming_up_ = false;
    return absl::OkStatus();
  }

 private:
  // A slab that arrived during warm-up, whose fd holds its memory until it is mapped.
  struct HeldBack {
    UniqueFd fd;
    size_t offset_bytes;
    size_t bytes;
  };

  // Drops what is mapped there: the range is inaccessible until slabs are mapped over it. One call does both, so that
  // no other mapping of the process comes between.
  absl::Status Protect(size_t offset_bytes, size_t bytes) {
    void* const address = range_.data() + offset_bytes;
    if (::mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED) {
      return absl::ErrnoToStatus(errno, absl::StrCat("dropping ", bytes, " bytes at offset ", offset_bytes));
    }
    return KeepPrivate(address, bytes);
  }

  absl::Status MapOver(int fd, size_t offset_bytes, size_t bytes) {
    // MAP_POPULATE fills the page tables now, so that an engine's first pass does not fault on each page.
    void* address = ::mmap(range_.data() + offset_bytes, bytes, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0);
    if (address == MAP_FAILED) {
      return absl::ErrnoToStatus(
          errno, absl::StrCat("mapping a slab of ", bytes, " bytes at offset ", offset_bytes));
    }
    return KeepPrivate(address, bytes);
  }

  const HostMapping range_;
  MemberRanges ranges_;
  bool warming_up_;
  std::vector<HeldBack> held_back_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MemberMemory>> ReserveHostMemory(const MemberMemoryOptions& options) {
  RETURN_IF_ERROR(CheckReservation(options, kSlabGranularityBytes));
  ASSIGN_OR_RETURN(HostMapping range, HostMapping::Reserve(options.reserve_bytes, kSlabGranularityBytes));
  // Scratch is reserved pages of zeros, which cost memory only where the engine's warm-up writes.
  if (options.warmup_scratch && ::mprotect(range.data(), range.bytes(), PROT_READ | PROT_WRITE) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("warm-up scratch of ", range.bytes(), " bytes"));
  }
  return std::make_unique<HostMember>(std::move(range), options.warmup_scratch);
}

}  // namespace kvpool
