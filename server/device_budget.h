// Memory given to the daemon, by device. Taken before a slab is made, given back after it is destroyed:
//
//   used(d) <= capacity(d)      always; a take that would break it for any device takes nothing
//
// Thread-safe; its mutex is a leaf.
#ifndef KVPOOL_SERVER_DEVICE_BUDGET_H_
#define KVPOOL_SERVER_DEVICE_BUDGET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/mutex.h"

namespace kvpool {

class DeviceBudget {
 public:
  struct Capacity {
    std::string device;
    uint64_t bytes = 0;
  };
  explicit DeviceBudget(const std::vector<Capacity>& capacities);

  struct Want {
    uint64_t bytes = 0;  // For each rank, if there is room …
    uint64_t unit = 0;   // … or else a smaller multiple of this.
  };
  // Takes the same from the device of each rank (one device may serve several) and answers the bytes for
  // each. RESOURCE_EXHAUSTED, with the numbers: not even a unit.
  absl::StatusOr<uint64_t> Take(absl::Span<const size_t> rank_devices, const Want& want);
  void Give(absl::Span<const size_t> rank_devices, uint64_t bytes);
  // Bytes for each rank that Take would answer at most.
  uint64_t Room(absl::Span<const size_t> rank_devices) const;

  uint64_t capacity(size_t device) const { return entries_[device].capacity; }
  uint64_t used(size_t device) const;

 private:
  struct Entry {
    std::string device;
    uint64_t capacity = 0;
    uint64_t used = 0;  // Guarded by mu_.
  };
  uint64_t RoomLocked(absl::Span<const size_t> rank_devices, size_t* tightest) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::vector<Entry> entries_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DEVICE_BUDGET_H_
