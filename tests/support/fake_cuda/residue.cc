#include "tests/support/fake_cuda/residue.h"

#include <unistd.h>

#include <algorithm>

namespace kvpool::fake {
namespace {

constexpr uint64_t kPattern = 0xbadc0ffeebadc0ff;

}  // namespace

Residue::Residue() : pages_(kPages) {
  for (Page& page : pages_) page.fill(kPattern);
}

void Residue::Keep(int fd, size_t bytes) {
  size_t read = 0;
  off_t at = 0;
  const auto end = static_cast<off_t>(bytes);
  while (read < kMostPagesRead && (at = ::lseek(fd, at, SEEK_DATA)) >= 0 && at < end) {
    for (const off_t hole = std::min(end, ::lseek(fd, at, SEEK_HOLE)); at < hole && read < kMostPagesRead;
         at += kPageBytes, ++read) {
      Page page;
      if (::pread(fd, page.data(), kPageBytes, at) != static_cast<ssize_t>(kPageBytes)) return;
      if (std::ranges::all_of(page, [](uint64_t word) { return word == 0; })) continue;
      pages_[next_] = page;
      next_ = (next_ + 1) % kPages;
    }
  }
}

void Residue::LeaveIn(int fd, size_t bytes) const {
  const size_t there = bytes / kPageBytes;
  const size_t count = std::min(kPages, there);
  for (size_t i = 0; i < count; ++i) {
    // From the first page to the last one.
    const size_t page = count == 1 ? 0 : i * (there - 1) / (count - 1);
    // The youngest first: they are in every allocation, however small.
    const Page& left = pages_[(next_ + kPages - 1 - i) % kPages];
    (void)!::pwrite(fd, left.data(), kPageBytes, static_cast<off_t>(page * kPageBytes));
  }
}

}  // namespace kvpool::fake
