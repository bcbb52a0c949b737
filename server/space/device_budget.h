// How much memory of each device d the daemon may use, and does. A slab's is taken before the slab is made,
// and given back after it is destroyed, so that always
//
//   used(d) <= capacity(d)
//   used(d) by one tenant's spaces <= its share * capacity(d)
//
// A take that would break one of them for any device takes nothing. Where a share has become less, the tenant may be above it, and
// takes nothing until it is below.
//
// Thread-safe; its mutex is a leaf.
#ifndef KVPOOL_SERVER_SPACE_DEVICE_BUDGET_H_
#define KVPOOL_SERVER_SPACE_DEVICE_BUDGET_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
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
  // Which part of each device a tenant may have: above 0, up to 1. It takes no lock.
  using ShareOf = std::function<double(std::string_view tenant)>;
  DeviceBudget(const std::vector<Capacity>& capacities, ShareOf share_of);
  void SetShares(ShareOf share_of);

  struct Want {
    std::string_view tenant;
    // So much is wanted for each rank; where there is no room for it, the largest multiple of `unit` that
    // there is room for.
    uint64_t bytes = 0;
    uint64_t unit = 0;
    bool is_there =
        false;  // The slabs of an earlier daemon: the tenant has them, whatever its share has become.
  };
  // Takes the same from the device of each rank (one device may serve several) and answers the bytes for
  // each. RESOURCE_EXHAUSTED, with the numbers: there is no room for a unit.
  absl::StatusOr<uint64_t> Take(absl::Span<const size_t> rank_devices, const Want& want);
  void Give(absl::Span<const size_t> rank_devices, std::string_view tenant, uint64_t bytes);
  // The most bytes for each rank that Take could answer.
  uint64_t Room(absl::Span<const size_t> rank_devices, std::string_view tenant) const {
    return RoomWithout({}, rank_devices, tenant);
  }
  // The same, if `emptied` had room without end. The tenant's share counts on them, too.
  uint64_t RoomWithout(absl::Span<const size_t> emptied, absl::Span<const size_t> rank_devices,
                       std::string_view tenant) const;
  // What is left of the tenant's share, for each rank.
  uint64_t RoomOfTenant(absl::Span<const size_t> rank_devices, std::string_view tenant) const {
    return RoomWithout(rank_devices, rank_devices, tenant);
  }

  // So many bytes of each rank are beyond the tenant's share, on the device where that is most.
  uint64_t Above(absl::Span<const size_t> rank_devices, std::string_view tenant) const;

  uint64_t capacity(size_t device) const { return entries_[device].capacity; }
  uint64_t used(size_t device) const;

 private:
  struct OfTenant {
    uint64_t used = 0, capacity = 0;
    uint64_t left() const { return capacity - std::min(capacity, used); }
  };
  struct Entry {
    std::string device;
    uint64_t capacity = 0;
    // Guarded by mu_, both.
    uint64_t used = 0;
    std::map<std::string, OfTenant, std::less<>> by_tenant;  // Tenants without any are not there.

    uint64_t left() const { return capacity - used; }
  };
  OfTenant Of(const Entry& entry, std::string_view tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The least that a rank has of what is left of its device.
  static uint64_t Least(absl::Span<const size_t> rank_devices,
                        absl::FunctionRef<uint64_t(size_t device)> left, size_t* tightest);

  mutable Mutex mu_;
  ShareOf share_of_ ABSL_GUARDED_BY(mu_);
  std::vector<Entry> entries_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_DEVICE_BUDGET_H_
