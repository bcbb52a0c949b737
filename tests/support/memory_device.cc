#include "tests/support/memory_device.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cuda/kv_compute.h"
#include "cuda/sticky.h"

namespace kvpool {
namespace {

absl::Status Lost() {
  absl::Status lost = absl::DataLossError("CUDA_ERROR_ECC_UNCORRECTABLE");
  MarkSticky(&lost);
  return lost;
}

// Memory of this process: only tests of tiers look at what is in a block.
class MemorySlab final : public Slab {
 public:
  MemorySlab(size_t bytes, bool ipc, MemoryDevice::Script* script)
      : bytes_(bytes),
        ipc_(ipc),
        script_(*script),
        memory_(static_cast<char*>(std::calloc(bytes, 1)), &std::free) {
    script_.memory = memory_.get();
    ++script_.alive;
    script_.used_bytes += bytes_;
  }
  ~MemorySlab() override {
    if (script_.on_destroy) script_.on_destroy();
    --script_.alive;
    if (script_.keep_used == 0) {
      script_.used_bytes -= bytes_;
    } else {
      --script_.keep_used;
    }
  }
  bool Discard() override {
    ++script_.discarded;
    return !script_.like_gpu;
  }
  size_t bytes() const override { return bytes_; }
  uint64_t address() const override { return reinterpret_cast<uint64_t>(memory_.get()); }
  absl::StatusOr<UniqueFd> Export() const override {
    if (ipc_) return absl::FailedPreconditionError("an IPC slab has no fd");
    if (script_.lost) return Lost();
    if (script_.fail_export) return absl::ResourceExhaustedError("dup: Too many open files");
    UniqueFd fd(open("/dev/null", O_RDWR | O_CLOEXEC));
    if (!fd.valid()) return absl::ErrnoToStatus(errno, "open");
    return fd;
  }
  absl::StatusOr<IpcHandle> ipc_handle() const override {
    if (!ipc_) return absl::FailedPreconditionError("no IPC slab");
    return IpcHandle{std::byte{42}};
  }

 private:
  const size_t bytes_;
  const bool ipc_;
  MemoryDevice::Script& script_;
  const std::unique_ptr<char, decltype(&std::free)> memory_;
};

}  // namespace

absl::StatusOr<size_t> MemoryDevice::free_bytes() const {
  if (script_.lost) return Lost();
  return total_bytes() - script_.used_bytes;
}

absl::StatusOr<std::unique_ptr<Slab>> MemoryDevice::MakeSlab(size_t bytes) {
  if (script_.on_make) script_.on_make();
  if (script_.lost) return Lost();
  if (script_.fail_after == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("out of memory: ", bytes, " bytes asked for, 0 free"));
  }
  if (script_.fail_after > 0) --script_.fail_after;
  return std::make_unique<MemorySlab>(bytes, /*ipc=*/false, &script_);
}

absl::StatusOr<std::unique_ptr<Slab>> MemoryDevice::MakeIpcSlab(size_t bytes) {
  return std::make_unique<MemorySlab>(bytes, /*ipc=*/true, &script_);
}

absl::Status MemoryDevice::CopyAll(absl::Span<const Copy> copies) {
  for (const Copy& copy : copies) {
    std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<KvCompute>> MemoryDevice::MakeKvCompute(const KvComputeOptions&) {
  return absl::UnimplementedError(
      absl::StrCat("device ", id_, " maps no memory: nothing can be scored there"));
}

}  // namespace kvpool
