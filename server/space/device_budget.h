// Memory given to the daemon, by device. Taken before a slab is made, given back after it is destroyed:
//
//   used(d) <= capacity(d)
//   used(d) by one tenant's spaces <= tenant_share * capacity(d)
//
// always; a take that would break one of them for any device takes nothing.
//
// Thread-safe; its mutex is a leaf.
#ifndef KVPOOL_SERVER_SPACE_DEVICE_BUDGET_H_
#define KVPOOL_SERVER_SPACE_DEVICE_BUDGET_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
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
  DeviceBudget(const std::vector<Capacity>& capacities, double tenant_share);

  struct Want {
    std::string_view tenant;
    uint64_t bytes = 0;  // For each rank, if there is room …
    uint64_t unit = 0;   // … or else a smaller multiple of this.
  };
  // Takes the same from the device of each rank (one device may serve several) and answers the bytes for
  // each. RESOURCE_EXHAUSTED, with the numbers: not even a unit.
  absl::StatusOr<uint64_t> Take(absl::Span<const size_t> rank_devices, const Want& want);
  void Give(absl::Span<const size_t> rank_devices, std::string_view tenant, uint64_t bytes);
  // Bytes for each rank that Take would answer at most.
  uint64_t Room(absl::Span<const size_t> rank_devices, std::string_view tenant) const;
  // The same if devices had room without end: what is left of the tenant's share.
  uint64_t RoomOfTenant(absl::Span<const size_t> rank_devices, std::string_view tenant) const;

  uint64_t capacity(size_t device) const { return entries_[device].capacity; }
  uint64_t used(size_t device) const;

 private:
  struct Entry {
    std::string device;
    uint64_t capacity = 0;
    uint64_t tenant_capacity = 0;
    uint64_t used = 0;  // Guarded by mu_, as is the next.
    std::map<std::string, uint64_t, std::less<>> used_by_tenant;

    uint64_t left() const { return capacity - used; }
    uint64_t left_of(std::string_view tenant) const;
  };
  uint64_t RoomLocked(absl::Span<const size_t> rank_devices, std::string_view tenant, size_t* tightest) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::vector<Entry> entries_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_DEVICE_BUDGET_H_
