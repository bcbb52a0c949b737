#include "server/tiers/buffer_arena.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace kvpool {

absl::StatusOr<std::shared_ptr<BufferArena>> BufferArena::Make(uint64_t bytes) {
  bytes = WholePages(bytes);
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", bytes, " bytes"));
  // A child would get copies of pages that a device is writing to, or leave us the copies.
  ::madvise(data, bytes, MADV_DONTFORK);
  return std::shared_ptr<BufferArena>(new BufferArena(static_cast<char*>(data), bytes));
}

BufferArena::~BufferArena() { ::munmap(data_, bytes_); }

void BufferArena::SpreadOver(absl::Span<const int> nodes) {
  uint64_t mask = 0;
  for (const int node : nodes) {
    if (node >= 0 && node < kMostNodes) mask |= uint64_t{1} << node;
  }
  // glibc has no wrapper for it.
  if (mask != 0) ::syscall(SYS_mbind, data_, bytes_, MPOL_INTERLEAVE, &mask, kMostNodes + 1, 0);
}

char* BufferArena::Take(uint64_t bytes) {
  MutexLock lock(&mu_);
  const auto gap =
      std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& at) { return at.second >= bytes; });
  if (gap == gaps_.end()) return nullptr;
  const auto [offset, room] = *gap;
  gaps_.erase(gap);
  if (room > bytes) gaps_[offset + bytes] = room - bytes;
  return data_ + offset;
}

void BufferArena::Return(char* data, uint64_t bytes) {
  MutexLock lock(&mu_);
  auto offset = static_cast<uint64_t>(data - data_);
  const auto after = gaps_.lower_bound(offset);
  if (after != gaps_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      gaps_.erase(before);
    }
  }
  if (after != gaps_.end() && after->first == offset + bytes) {
    bytes += after->second;
    gaps_.erase(after);
  }
  gaps_[offset] = bytes;
}

}  // namespace kvpool
