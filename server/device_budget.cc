#include "server/device_budget.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {

DeviceBudget::DeviceBudget(const std::vector<Capacity>& capacities) {
  for (const Capacity& capacity : capacities) entries_.push_back({capacity.device, capacity.bytes, 0});
}

uint64_t DeviceBudget::RoomLocked(absl::Span<const size_t> rank_devices, size_t* tightest) const {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  for (const size_t device : rank_devices) {
    const uint64_t sharers = std::count(rank_devices.begin(), rank_devices.end(), device);
    const Entry& entry = entries_[device];
    const uint64_t share = (entry.capacity - entry.used) / sharers;
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
  const uint64_t room = RoomLocked(rank_devices, &tightest);
  const uint64_t bytes = std::min(want.bytes, room / want.unit * want.unit);
  if (bytes == 0) {
    const Entry& entry = entries_[tightest];
    return absl::ResourceExhaustedError(
        absl::StrCat("device ", entry.device, ": ", want.unit, " bytes asked for each rank, ",
                     entry.capacity - entry.used, " of ", entry.capacity, " bytes left"));
  }
  for (const size_t device : rank_devices) entries_[device].used += bytes;
  return bytes;
}

void DeviceBudget::Give(absl::Span<const size_t> rank_devices, uint64_t bytes) {
  MutexLock lock(&mu_);
  for (const size_t device : rank_devices) {
    KVPOOL_CHECK(entries_[device].used >= bytes, "device %s", entries_[device].device.c_str());
    entries_[device].used -= bytes;
  }
}

uint64_t DeviceBudget::Room(absl::Span<const size_t> rank_devices) const {
  MutexLock lock(&mu_);
  size_t tightest = 0;
  return RoomLocked(rank_devices, &tightest);
}

uint64_t DeviceBudget::used(size_t device) const {
  MutexLock lock(&mu_);
  return entries_[device].used;
}

}  // namespace kvpool
