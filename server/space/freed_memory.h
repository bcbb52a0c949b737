// The end of slabs. What a GPU's slab was made of comes back when the last process has let go of it, which a process that said so may
// not have done: so its bytes are given to the budget once the device's free memory has risen by them. Free memory is everybody's,
// and what others take in the same moment hides the rise; after kUnseenMs the bytes are given on all the same, and that is logged.
// Then the driver has the last word: it refuses a slab for which there is no memory.
//
// Thread-safe; the budget's mutex is taken within its own.
#ifndef KVPOOL_SERVER_SPACE_FREED_MEMORY_H_
#define KVPOOL_SERVER_SPACE_FREED_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cuda/device.h"
#include "proto/support/mutex.h"
#include "server/base/clock.h"
#include "server/space/device_budget.h"
#include "server/space/space_facts.h"

namespace kvpool {

class FreedMemory {
 public:
  // Engines that load weights beside it are done, or go on for minutes.
  static constexpr uint64_t kUnseenMs = 10'000;

  // All outlive it.
  FreedMemory(const std::vector<std::unique_ptr<Device>>* devices, DeviceBudget* budget, const Clock* clock)
      : devices_(*devices), budget_(*budget), clock_(*clock), made_(devices->size()) {}

  // A slab of so many bytes was made for each of these ranks, on their devices.
  void OnMade(absl::Span<const size_t> rank_devices, uint64_t bytes);
  // Slabs of so many bytes each. `of_all`: nobody is to have them any more, though copies that this process makes may read them for
  // a while yet; else others keep the memory, and the budget is to know nothing of it.
  void Destroy(const SpaceFacts& facts, uint64_t bytes, std::vector<std::shared_ptr<Slab>> by_rank,
               bool of_all);
  // Gives what has come free since.
  void Collect();
  // So many bytes of the device are used as far as the budget knows, and are in no slab.
  uint64_t unfreed_bytes(size_t device) const;

 private:
  struct Awaited {
    std::vector<size_t> rank_devices;
    std::string tenant;
    uint64_t bytes = 0;  // Each rank had so many.
    uint64_t until_ms = 0;
    std::map<size_t, int64_t> before;  // FreeAndMade of each device while the slabs were there.
  };
  // Free memory and what slabs have, which this daemon changes neither by making slabs nor by destroying them. Only differences
  // count: slabs of an earlier daemon are not in it. None: the device does not answer, as one that is lost.
  std::optional<int64_t> FreeAndMade(size_t device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasRisen(const Awaited& awaited) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::vector<std::unique_ptr<Device>>& devices_;
  DeviceBudget& budget_;
  const Clock& clock_;
  mutable Mutex mu_;
  std::vector<int64_t> made_ ABSL_GUARDED_BY(mu_);     // Indexed by device.
  std::vector<Awaited> awaited_ ABSL_GUARDED_BY(mu_);  // The oldest is the first.
  std::atomic<bool> any_{false};                       // awaited_ is not empty.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_FREED_MEMORY_H_
