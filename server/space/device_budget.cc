#include "server/space/device_budget.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {

DeviceBudget::DeviceBudget(const std::vector<Capacity>& capacities, ShareOf share_of)
    : share_of_(std::move(share_of)) {
  for (const Capacity& c : capacities) entries_.push_back({.device = c.device, .capacity = c.bytes});
}

DeviceBudget::OfTenant DeviceBudget::Of(const Entry& entry, std::string_view tenant) const {
  if (const auto it = entry.by_tenant.find(tenant); it != entry.by_tenant.end()) return it->second;
  const double share = share_of_(tenant);
  // A share of 1 is all of it, whatever a double makes of the product.
  const auto bytes = static_cast<uint64_t>(share * static_cast<double>(entry.capacity));
  return {.capacity = share >= 1 ? entry.capacity : std::min(entry.capacity, bytes)};
}

void DeviceBudget::SetShares(ShareOf share_of) {
  MutexLock lock(&mu_);
  share_of_ = std::move(share_of);
  for (Entry& entry : entries_) {
    auto had = std::exchange(entry.by_tenant, {});
    for (const auto& [tenant, of_tenant] : had) {
      OfTenant now = Of(entry, tenant);
      now.used = of_tenant.used;
      entry.by_tenant.emplace(tenant, now);
    }
  }
}

uint64_t DeviceBudget::Least(absl::Span<const size_t> rank_devices,
                             absl::FunctionRef<uint64_t(size_t device)> left, size_t* tightest) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const size_t device : rank_devices) {
    const uint64_t sharers = std::count(rank_devices.begin(), rank_devices.end(), device);
    const uint64_t of_rank = left(device) / sharers;
    if (of_rank >= least) continue;
    least = of_rank;
    if (tightest != nullptr) *tightest = device;
  }
  return least;
}

absl::StatusOr<uint64_t> DeviceBudget::Take(absl::Span<const size_t> rank_devices, const Want& want) {
  MutexLock lock(&mu_);
  size_t tightest = 0;
  const auto left = [&](size_t device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const Entry& entry = entries_[device];
    return want.is_there ? entry.left() : std::min(entry.left(), Of(entry, want.tenant).left());
  };
  const uint64_t room = Least(rank_devices, left, &tightest);
  const uint64_t bytes = std::min(want.bytes, room / want.unit * want.unit);
  if (bytes == 0) {
    const Entry& entry = entries_[tightest];
    if (const OfTenant of = Of(entry, want.tenant); !want.is_there && of.left() < entry.left()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("device ", entry.device, ": ", want.unit, " bytes asked for each rank, ", of.left(),
                       " left of the ", of.capacity, " that tenant ",
                       absl::string_view(want.tenant.data(), want.tenant.size()), " may have"));
    }
    return absl::ResourceExhaustedError(absl::StrCat("device ", entry.device, ": ", want.unit,
                                                     " bytes asked for each rank, ", entry.left(), " of ",
                                                     entry.capacity, " bytes left"));
  }
  for (const size_t device : rank_devices) {
    Entry& entry = entries_[device];
    entry.used += bytes;
    entry.by_tenant.try_emplace(std::string(want.tenant), Of(entry, want.tenant)).first->second.used += bytes;
  }
  return bytes;
}

void DeviceBudget::Give(absl::Span<const size_t> rank_devices, std::string_view tenant, uint64_t bytes) {
  MutexLock lock(&mu_);
  for (const size_t device : rank_devices) {
    Entry& entry = entries_[device];
    const auto by = entry.by_tenant.find(tenant);
    KVPOOL_CHECK(entry.used >= bytes && by != entry.by_tenant.end() && by->second.used >= bytes, "device %s",
                 entry.device.c_str());
    entry.used -= bytes;
    by->second.used -= bytes;
    if (by->second.used == 0) entry.by_tenant.erase(by);
  }
}

uint64_t DeviceBudget::RoomWithout(absl::Span<const size_t> emptied, absl::Span<const size_t> rank_devices,
                                   std::string_view tenant) const {
  MutexLock lock(&mu_);
  const auto left = [&](size_t device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const Entry& entry = entries_[device];
    const uint64_t of_tenant = Of(entry, tenant).left();
    const bool is_emptied = std::count(emptied.begin(), emptied.end(), device) > 0;
    return is_emptied ? of_tenant : std::min(of_tenant, entry.left());
  };
  return Least(rank_devices, left, nullptr);
}

uint64_t DeviceBudget::Above(absl::Span<const size_t> rank_devices, std::string_view tenant) const {
  MutexLock lock(&mu_);
  uint64_t above = 0;
  for (const size_t device : rank_devices) {
    const uint64_t sharers = std::count(rank_devices.begin(), rank_devices.end(), device);
    const OfTenant of = Of(entries_[device], tenant);
    above = std::max(above, (of.used - std::min(of.used, of.capacity) + sharers - 1) / sharers);
  }
  return above;
}

uint64_t DeviceBudget::used(size_t device) const {
  MutexLock lock(&mu_);
  return entries_[device].used;
}

}  // namespace kvpool
