// A device of plain memory with small granules, which fails on command. For tests of the daemon's logic,
// where no process maps anything.
#ifndef KVPOOL_TESTS_SUPPORT_MEMORY_DEVICE_H_
#define KVPOOL_TESTS_SUPPORT_MEMORY_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cuda/device.h"

namespace kvpool {

class MemoryDevice final : public Device {
 public:
  struct Script {
    // How many slabs are made before MakeSlab fails like a device out of memory; -1: it never does.
    std::atomic<int> fail_after{-1};
    std::atomic<bool> lost{false};         // Everything fails, like on a GPU whose context is gone.
    std::atomic<bool> fail_export{false};  // Exports fail, like at the limit of open files.
    std::atomic<int> alive{0};             // Slabs that exist.
    std::atomic<int> discarded{0};         // Slabs that went back to the system, whoever has them.
    std::atomic<bool> like_gpu{false};     // What is discarded is free only when all have let go of it.
    std::atomic<uint64_t> used_bytes{0};   // The system reports so many: more, if others use the device too.
    std::atomic<int> keep_used{0};  // So many slabs that are destroyed next are still some other process's.
    std::atomic<char*> memory{nullptr};  // Where the last slab lies.
    std::string uuid_bytes;              // Empty: it is host memory.
    std::function<void()> on_make;       // Runs inside MakeSlab, which it can slow down.
    std::function<void()> on_destroy;    // Runs before a slab is destroyed.
  };
  // `script` outlives the device.
  MemoryDevice(std::string id, size_t granularity_bytes, Script* script)
      : id_(std::move(id)), granularity_bytes_(granularity_bytes), script_(*script) {}

  const std::string& id() const override { return id_; }
  const std::string& name() const override { return id_; }
  std::string uuid_bytes() const override { return script_.uuid_bytes; }
  size_t granularity_bytes() const override { return granularity_bytes_; }
  size_t total_bytes() const override { return size_t{1} << 40; }
  absl::StatusOr<size_t> free_bytes() const override;
  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) override;
  absl::Status CopyAll(absl::Span<const Copy> copies) override;
  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override;

 private:
  const std::string id_;
  const size_t granularity_bytes_;
  Script& script_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_MEMORY_DEVICE_H_
