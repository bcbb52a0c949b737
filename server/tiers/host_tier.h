// Host memory as a tier: it is gone with the daemon.
//
// Values lie in memory of their own size, the least recently used one gives way to the next, and a value of the same size
// takes over its memory, whose pages are there already. Whoever asks makes the copies, and nobody waits for another's.
#ifndef KVPOOL_SERVER_TIERS_HOST_TIER_H_
#define KVPOOL_SERVER_TIERS_HOST_TIER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"
#include "server/tiers/tier.h"

namespace kvpool {

class HostTier final : public Tier {
 public:
  static constexpr uint64_t kLeastCapacityBytes = 1 << 20;

  explicit HostTier(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  std::string_view name() const override { return "host"; }
  bool lasting() const override { return false; }
  uint64_t most_value_bytes() const override { return capacity_bytes_ / kTierPageBytes * kTierPageBytes; }
  std::string path() const override { return "memory"; }
  std::string describe() const override;
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override;
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override;
  void Store(std::vector<TierStore> stores, Done done) override;
  // All is answered when it was asked for.
  void Drain() override {}
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop = nullptr) override;
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override;
  TierUsage usage() override;

 private:
  // Of whole pages, all zero behind the value, and wiped when it goes.
  struct Memory {
    explicit Memory(uint64_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    char* const data;  // Null: there is none.
    const uint64_t bytes;
    uint32_t readers = 0;  // mu_ is around it.
  };
  struct Value;
  using Values = std::list<Value>;
  struct Value {
    TierKey key;
    uint64_t bytes = 0;
    std::shared_ptr<Memory> memory;
    std::list<Values::iterator>::iterator of_owner;
  };

  // `held` gets what it reads, with one more reader.
  TierResult LoadOne(const TierLoad& load, std::shared_ptr<Memory>* held) ABSL_LOCKS_EXCLUDED(mu_);
  TierResult StoreOne(const TierStore& store) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes so many pages' room: memory of a value of that size that gave way, or none, which is to be made. False: there is no room.
  bool TakeRoom(uint64_t pages, std::shared_ptr<Memory>* memory, std::vector<std::shared_ptr<Memory>>* gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<Memory> Remove(Values::iterator value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Count(bool load, uint64_t bytes, TierResult result, std::chrono::steady_clock::time_point since)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint64_t capacity_bytes_;
  Mutex mu_;  // Nothing is copied, wiped or made under it.
  CondVar read_;
  absl::flat_hash_map<TierKey, Values::iterator> found_ ABSL_GUARDED_BY(mu_);
  Values values_ ABSL_GUARDED_BY(mu_);  // The least recently used one is the first.
  absl::flat_hash_map<TierOwner, std::list<Values::iterator>> owners_ ABSL_GUARDED_BY(mu_);
  uint64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // Pages of values, and of those that are being stored.
  uint64_t value_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t erasures_ ABSL_GUARDED_BY(mu_) = 0;  // How many have begun.
  TierCounters counters_ ABSL_GUARDED_BY(mu_);
  Histogram load_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  Histogram store_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_HOST_TIER_H_
