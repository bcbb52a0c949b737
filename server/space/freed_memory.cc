#include "server/space/freed_memory.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "server/base/log.h"

namespace kvpool {

void FreedMemory::OnMade(absl::Span<const size_t> rank_devices, uint64_t bytes) {
  MutexLock lock(&mu_);
  for (const size_t device : rank_devices) made_[device] += static_cast<int64_t>(bytes);
}

std::optional<int64_t> FreedMemory::FreeAndMade(size_t device) const {
  const absl::StatusOr<size_t> free = devices_[device]->free_bytes();
  if (!free.ok()) return std::nullopt;
  return static_cast<int64_t>(*free) + made_[device];
}

bool FreedMemory::HasRisen(const Awaited& awaited) const {
  for (const auto& [device, before] : awaited.before) {
    const std::optional<int64_t> now = FreeAndMade(device);
    const auto ranks = std::count(awaited.rank_devices.begin(), awaited.rank_devices.end(), device);
    // The sum is as before if all has come free, and less by all of it if nothing has. What others took or let go of in the same
    // moments is mostly less than a slab, so half of one tells which of both it is.
    if (now.has_value() && *now < before - ranks * static_cast<int64_t>(awaited.bytes) / 2) return false;
  }
  return true;
}

void FreedMemory::Destroy(const SpaceFacts& facts, uint64_t bytes, std::vector<std::shared_ptr<Slab>> by_rank,
                          bool of_all) {
  bool measured = false;
  for (const std::shared_ptr<Slab>& slab : by_rank) measured = (of_all && !slab->Discard()) || measured;
  // To unmap what is large takes a while, in which other spaces make slabs.
  if (!measured) by_rank.clear();
  Awaited awaited{.rank_devices = facts.rank_devices, .tenant = facts.tenant, .bytes = bytes};
  MutexLock lock(&mu_);
  for (const size_t device : facts.rank_devices) {
    if (!measured || awaited.before.contains(device)) continue;
    if (const std::optional<int64_t> sum = FreeAndMade(device); sum.has_value())
      awaited.before.emplace(device, *sum);
  }
  by_rank.clear();
  for (const size_t device : facts.rank_devices) made_[device] -= static_cast<int64_t>(bytes);
  if (HasRisen(awaited)) {
    budget_.Give(facts.rank_devices, facts.tenant, bytes);
    return;
  }
  LogWarning("memory of a slab is not free yet", {{"space", facts.id},
                                                  {"tenant", facts.tenant},
                                                  {"bytes", bytes},
                                                  {"ranks", facts.rank_devices.size()}});
  awaited.until_ms = clock_.NowMs() + kUnseenMs;
  awaited_.push_back(std::move(awaited));
  any_.store(true, std::memory_order_relaxed);
}

void FreedMemory::Collect() {
  if (!any_.load(std::memory_order_relaxed)) return;
  MutexLock lock(&mu_);
  const uint64_t now = clock_.NowMs();
  for (auto it = awaited_.begin(); it != awaited_.end();) {
    const bool risen = HasRisen(*it);
    if (!risen && now < it->until_ms) {
      ++it;
      continue;
    }
    const Awaited came = std::move(*it);
    it = awaited_.erase(it);
    if (!risen) {
      LogWarning("memory of a slab is given on, though the device does not show that it is free",
                 {{"tenant", came.tenant}, {"bytes", came.bytes}, {"ranks", came.rank_devices.size()}});
    } else {
      // It is no sign that those behind it have come free, too.
      for (auto& behind : awaited_) {
        for (auto& [device, before] : behind.before) {
          before += static_cast<int64_t>(came.bytes) *
                    std::count(came.rank_devices.begin(), came.rank_devices.end(), device);
        }
      }
    }
    budget_.Give(came.rank_devices, came.tenant, came.bytes);
  }
  any_.store(!awaited_.empty(), std::memory_order_relaxed);
}

uint64_t FreedMemory::unfreed_bytes(size_t device) const {
  if (!any_.load(std::memory_order_relaxed)) return 0;
  MutexLock lock(&mu_);
  uint64_t bytes = 0;
  for (const Awaited& awaited : awaited_)
    bytes += awaited.bytes * std::count(awaited.rank_devices.begin(), awaited.rank_devices.end(), device);
  return bytes;
}

}  // namespace kvpool
