#include "server/daemon/slab_copier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/scoring/lost_gpu.h"
#include "server/tiers/buffer_arena.h"

namespace kvpool {

absl::StatusOr<std::unique_ptr<SlabCopier>> SlabCopier::Open(
    absl::Span<const std::unique_ptr<Device>> devices) {
  std::vector<Gpu> gpus;
  for (const std::unique_ptr<Device>& device : devices) {
    if (device->uuid_bytes().empty()) continue;
    absl::StatusOr<std::unique_ptr<BlockCopier>> copier = OpenCudaBlockCopier(device->id());
    if (!copier.ok()) {
      return absl::Status(
          copier.status().code(),
          absl::StrCat("device ", device->id(), " copies nothing to a tier: ", copier.status().message()));
    }
    gpus.push_back({.device = device.get(), .copier = *std::move(copier)});
  }
  return std::unique_ptr<SlabCopier>(new SlabCopier(std::move(gpus)));
}

std::shared_ptr<BufferMemory> SlabCopier::MakeMemory(uint64_t bytes) {
  if (gpus_.empty()) return std::make_shared<HeapMemory>();
  const absl::StatusOr<std::shared_ptr<BufferArena>> made = BufferArena::Make(bytes);
  if (!made.ok()) {
    LogWarning("buffers of the tier are not page-locked", {{"bytes", bytes}, {"error", made.status()}});
    return std::make_shared<HeapMemory>();
  }
  const std::shared_ptr<BufferArena>& arena = *made;
  std::vector<int> nodes;
  for (const Gpu& gpu : gpus_) nodes.push_back(gpu.copier->numa_node());
  arena->SpreadOver(nodes);
  const auto address = reinterpret_cast<uint64_t>(arena->data());
  const Gpu& first = gpus_.front();
  const absl::Status locked = first.copier->Register(address, arena->bytes());
  EndIfLost(first, locked);
  if (!locked.ok()) {
    LogWarning("buffers of the tier are not page-locked", {{"bytes", arena->bytes()}, {"error", locked}});
    return arena;
  }
  locked_.push_back(arena);
  for (const Gpu& gpu : gpus_) {
    if (&gpu != &first) gpu.copier->ShareRegistered(address, arena->bytes());
  }
  return arena;
}

absl::StatusOr<std::unique_ptr<FenceEvent>> SlabCopier::Begin(const Gpu& gpu, CopyDirection direction,
                                                              absl::Span<const Range> ranges) {
  std::vector<CopyRange> of_gpu;
  for (const Range& range : ranges) {
    if (range.device != gpu.device) continue;
    of_gpu.push_back({.device_address = range.slab_address,
                      .host_address = reinterpret_cast<uint64_t>(range.host),
                      .bytes = range.bytes});
  }
  if (of_gpu.empty()) return nullptr;
  return gpu.copier->Submit(direction, of_gpu, /*after=*/nullptr);
}

absl::Status SlabCopier::Copy(CopyDirection direction, absl::Span<const Range> ranges) {
  absl::Status copied;
  std::vector<std::unique_ptr<FenceEvent>> tickets;
  for (const Gpu& gpu : gpus_) {
    absl::StatusOr<std::unique_ptr<FenceEvent>> begun = Begin(gpu, direction, ranges);
    EndIfLost(gpu, begun.status());
    copied.Update(begun.status());
    tickets.push_back(begun.ok() ? *std::move(begun) : nullptr);
  }
  // Meanwhile what is in host memory.
  for (const Range& range : ranges) {
    if (OnGpu(range)) continue;
    void* const slab = reinterpret_cast<void*>(range.slab_address);
    const bool up = direction == CopyDirection::kToDevice;
    std::memcpy(up ? slab : range.host, up ? range.host : slab, range.bytes);
  }
  for (size_t i = 0; i < gpus_.size(); ++i) {
    if (tickets[i] == nullptr) continue;
    const absl::Status waited = tickets[i]->Wait();
    EndIfLost(gpus_[i], waited);
    copied.Update(waited);
    // The memory goes to others, and copies that could not be waited for may be under way.
    if (!waited.ok()) EndIfLost(gpus_[i], gpus_[i].copier->Drain());
  }
  return copied;
}

bool SlabCopier::OnGpu(const Range& range) const {
  return std::any_of(gpus_.begin(), gpus_.end(), [&](const Gpu& gpu) { return gpu.device == range.device; });
}

void SlabCopier::EndIfLost(const Gpu& gpu, const absl::Status& status) {
  if (!status.ok())
    EndIfGpuIsLost(status, absl::StrCat("device ", gpu.device->id(), ": copies for the tier"));
}

}  // namespace kvpool
