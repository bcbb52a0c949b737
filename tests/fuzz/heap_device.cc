#include "tests/fuzz/heap_device.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "cuda/kv_compute.h"

namespace kvpool::fuzz {
namespace {

class HeapSlab final : public Slab {
 public:
  HeapSlab(size_t bytes, size_t alignment) : bytes_(bytes), data_(std::aligned_alloc(alignment, bytes)) {
    std::memset(data_, 0, bytes);
  }
  ~HeapSlab() override { std::free(data_); }
  size_t bytes() const override { return bytes_; }
  uint64_t address() const override { return reinterpret_cast<uint64_t>(data_); }
  absl::StatusOr<UniqueFd> Export() const override { return UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC)); }
  absl::StatusOr<IpcHandle> ipc_handle() const override {
    return absl::FailedPreconditionError("memory of the heap has no IPC handle");
  }

 private:
  const size_t bytes_;
  void* const data_;
};

class HeapDevice final : public Device {
 public:
  HeapDevice(std::string id, size_t granularity_bytes)
      : id_(std::move(id)), granularity_bytes_(granularity_bytes) {}
  const std::string& id() const override { return id_; }
  const std::string& name() const override { return id_; }
  std::string uuid_bytes() const override { return ""; }
  size_t granularity_bytes() const override { return granularity_bytes_; }
  size_t total_bytes() const override { return size_t{1} << 30; }
  absl::StatusOr<size_t> free_bytes() const override { return total_bytes(); }
  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override {
    return std::make_unique<HeapSlab>(bytes, granularity_bytes_);
  }
  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t) override {
    return absl::UnimplementedError("IPC slabs exist on cuda devices only");
  }
  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override {
    return MakeHostKvCompute(options);
  }

 private:
  const std::string id_;
  const size_t granularity_bytes_;
};

}  // namespace

std::unique_ptr<Device> MakeHeapDevice(std::string id, size_t granularity_bytes) {
  return std::make_unique<HeapDevice>(std::move(id), granularity_bytes);
}

}  // namespace kvpool::fuzz
