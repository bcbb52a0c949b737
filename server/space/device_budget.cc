#include "server/space/device_budget.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {

DeviceBudget::DeviceBudget(const std::vector<Capacity>& capacities, double tenant_share) {
  for (const Capacity& c : capacities) {
    // A share of 1 is all of it, whatever a double makes of the product.
    const auto share = static_cast<uint64_t>(tenant_share * static_cast<double>(c.bytes));
    entries_.push_back({.device = c.device,
                        .capacity = c.bytes,
                        .tenant_capacity = tenant_share >= 1 ? c.bytes : std::min(c.bytes, share)});
  }
}

uint64_t DeviceBudget::Entry::left_of(std::string_view tenant) const {
  const auto it = used_by_tenant.find(tenant);
  return tenant_capacity - (it == used_by_tenant.end() ? 0 : it->second);
}

uint64_t DeviceBudget::RoomLocked(absl::Span<const size_t> rank_devices, std::string_view tenant,
                                  size_t* tightest) const {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  for (const size_t device : rank_devices) {
    const uint64_t sharers = std::count(rank_devices.begin(), rank_devices.end(), device);
    const Entry& entry = entries_[device];
    const uint64_t share = std::min(entry.left(), entry.left_of(tenant)) / sharers;
    if (share < room) {
      room = share;
      *tightest = device;
    }
  }
  return room;
}

absl::StatusOr<uint64_t> DeviceBudget::Take(absl::Span<const size_t> rank_devices, const Want& want) {
  MutexLock lock(&mu_);
  size_t tightest = 0;
  const uint64_t room = RoomLocked(rank_devices, want.tenant, &tightest);
  const uint64_t bytes = std::min(want.bytes, room / want.unit * want.unit);
  if (bytes == 0) {
    const Entry& entry = entries_[tightest];
    if (entry.left_of(want.tenant) < entry.left()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("device ", entry.device, ": ", want.unit, " bytes asked for each rank, ",
                       entry.left_of(want.tenant), " left of the ", entry.tenant_capacity, " that tenant ",
                       absl::string_view(want.tenant.data(), want.tenant.size()), " may have"));
    }
    return absl::ResourceExhaustedError(absl::StrCat("device ", entry.device, ": ", want.unit,
                                                     " bytes asked for each rank, ", entry.left(), " of ",
                                                     entry.capacity, " bytes left"));
  }
  for (const size_t device : rank_devices) {
    entries_[device].used += bytes;
    entries_[device].used_by_tenant[std::string(want.tenant)] += bytes;
  }
  return bytes;
}

void DeviceBudget::Give(absl::Span<const size_t> rank_devices, std::string_view tenant, uint64_t bytes) {
  MutexLock lock(&mu_);
  for (const size_t device : rank_devices) {
    Entry& entry = entries_[device];
    const auto by = entry.used_by_tenant.find(tenant);
    KVPOOL_CHECK(entry.used >= bytes && by != entry.used_by_tenant.end() && by->second >= bytes, "device %s",
                 entry.device.c_str());
    entry.used -= bytes;
    by->second -= bytes;
    if (by->second == 0) entry.used_by_tenant.erase(by);
  }
}

uint64_t DeviceBudget::Room(absl::Span<const size_t> rank_devices, std::string_view tenant) const {
  MutexLock lock(&mu_);
  size_t tightest = 0;
  return RoomLocked(rank_devices, tenant, &tightest);
}

uint64_t DeviceBudget::RoomWithout(absl::Span<const size_t> emptied, absl::Span<const size_t> rank_devices,
                                   std::string_view tenant) const {
  MutexLock lock(&mu_);
  uint64_t room = std::numeric_limits<uint64_t>::max();
  for (const size_t device : rank_devices) {
    const uint64_t sharers = std::count(rank_devices.begin(), rank_devices.end(), device);
    const Entry& entry = entries_[device];
    uint64_t left = entry.left_of(tenant);
    if (std::count(emptied.begin(), emptied.end(), device) == 0) left = std::min(left, entry.left());
    room = std::min(room, left / sharers);
  }
  return room;
}

uint64_t DeviceBudget::used(size_t device) const {
  MutexLock lock(&mu_);
  return entries_[device].used;
}

}  // namespace kvpool
