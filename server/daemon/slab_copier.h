// Copies between slabs and host memory, each by the device that has the slab: by the processor in host memory, and on a GPU by its
// copy engines, beside what engines compute (cuda/block_copier.h).
//
// A GPU that is lost ends the process, as everywhere (server/scoring/lost_gpu.h): nobody hears of such a copy.
#ifndef KVPOOL_SERVER_DAEMON_SLAB_COPIER_H_
#define KVPOOL_SERVER_DAEMON_SLAB_COPIER_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda/block_copier.h"
#include "cuda/device.h"
#include "server/tiers/buffers.h"

namespace kvpool {

// Copy is thread-safe.
class SlabCopier {
 public:
  // The devices outlive it. An error names the GPU that can't, and has the reason.
  static absl::StatusOr<std::unique_ptr<SlabCopier>> Open(absl::Span<const std::unique_ptr<Device>> devices);

  // Memory for buffers, so much at once. Where there are GPUs it is page-locked for all of them, and taken now; what can't be
  // locked is told to the log, and copied all the same, at a fraction of the speed.
  std::shared_ptr<BufferMemory> MakeMemory(uint64_t bytes);

  struct Range {
    const Device* device = nullptr;
    uint64_t slab_address = 0;  // Slab::address has the slab's first.
    char* host = nullptr;
    uint64_t bytes = 0;
  };
  // Copies in any order. OK: all bytes are where they should be, for every stream that begins from now on. Else each range may
  // be copied or not, or in part, and none is under way any more. REQUIRES: slabs and memory stay as long as it runs, and no two
  // ranges that are written overlap.
  absl::Status Copy(CopyDirection direction, absl::Span<const Range> ranges);

 private:
  struct Gpu {
    const Device* device = nullptr;
    std::unique_ptr<BlockCopier> copier;
  };
  explicit SlabCopier(std::vector<Gpu> gpus) : gpus_(std::move(gpus)) {}
  // Begins what `ranges` have of one GPU; null: that is nothing.
  static absl::StatusOr<std::unique_ptr<FenceEvent>> Begin(const Gpu& gpu, CopyDirection direction,
                                                           absl::Span<const Range> ranges);
  bool OnGpu(const Range& range) const;
  static void EndIfLost(const Gpu& gpu, const absl::Status& status);

  // Locked memory stays until the copiers, which end the locks, are gone.
  std::vector<std::shared_ptr<BufferMemory>> locked_;
  const std::vector<Gpu> gpus_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_SLAB_COPIER_H_
