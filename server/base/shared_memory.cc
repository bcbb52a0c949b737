#include "server/base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status SystemError(const std::string& doing) {
  return absl::UnavailableError(absl::StrCat(doing, ": ", strerror(errno)));
}

}  // namespace

absl::StatusOr<SharedMemory> SharedMemory::Make(const std::string& name, size_t bytes) {
  UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return SystemError("memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return SystemError(absl::StrCat("ftruncate of a memfd to ", bytes, " bytes"));
  }
  // Nobody can shrink it under those who map it.
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return SystemError("sealing a memfd");
  return Map(std::move(fd));
}

absl::StatusOr<SharedMemory> SharedMemory::Map(UniqueFd fd) {
  struct stat file;
  if (fstat(fd.get(), &file) != 0) return SystemError("looking at a memfd");
  const int seals = fcntl(fd.get(), F_GET_SEALS);  // -1: no memfd.
  if (seals < 0 || (seals & kSeals) != kSeals || file.st_size <= 0) {
    return absl::InvalidArgumentError("a descriptor is not of memory that another daemon has made");
  }
  const auto bytes = static_cast<size_t>(file.st_size);
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (at == MAP_FAILED) return SystemError(absl::StrCat("mapping a memfd of ", bytes, " bytes"));
  // A forked child must not keep it, nor a core file show it.
  (void)madvise(at, bytes, MADV_DONTFORK);
  (void)madvise(at, bytes, MADV_DONTDUMP);
  return SharedMemory(std::move(fd), static_cast<char*>(at), bytes);
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace kvpool
