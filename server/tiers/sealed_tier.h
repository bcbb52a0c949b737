// A tier whose values only holders of its keys can read: each is sealed (sealed_value.h) on its way to the tier behind, and
// opened on its way back.
//
// Its own threads do that, since a store that nodes share has one for all its connections. Sealed values lie in buffers of its
// own, of which there are so many bytes each way at most: what is more waits, loads in front of stores.
//
//   a load finds                             it is answered   what is there
//   a value, sealed with a key of the tenant kDone            stays
//   one that was sealed with another key     kMiss            stays, as the key may come back, and is shut
//   one that its tag does not cover          kCorrupt         is shut
//
// What is shut is not there for anybody who asks, until the keys change, a store of the same key takes its place, or a minute has
// passed: another node may have put a good one there.
#ifndef KVPOOL_SERVER_TIERS_SEALED_TIER_H_
#define KVPOOL_SERVER_TIERS_SEALED_TIER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"
#include "server/tiers/buffers.h"
#include "server/tiers/encryption_keys.h"
#include "server/tiers/tier.h"

namespace kvpool {

class SealedTier final : public Tier {
 public:
  struct Options {
    // Sealed values on their way up take so much, and those on their way down again.
    uint64_t buffer_bytes = 0;
    int threads = 2;  // One seals or opens some 3 GB/s.
    std::chrono::milliseconds shut_for = std::chrono::minutes(1);
  };
  // Values that may wait. The buffers that they come in have a bound in bytes besides.
  static constexpr size_t kMostWaiting = 16384;
  // Names of what is shut, 100 bytes each. For one more some other is forgotten, which costs a load to be known again. To make room
  // for so many takes half a millisecond, for which whoever asks what is there may wait.
  static constexpr size_t kMostShut = 16384;

  // RESOURCE_EXHAUSTED and the like: there is no room for the buffers.
  static absl::StatusOr<std::unique_ptr<SealedTier>> Make(std::unique_ptr<Tier> behind,
                                                          std::shared_ptr<EncryptionKeyFile> keys,
                                                          const Options& options);
  ~SealedTier() override;

  std::string_view name() const override { return behind_->name(); }
  bool lasting() const override { return behind_->lasting(); }
  uint64_t most_value_bytes() const override;
  std::string path() const override { return behind_->path(); }
  std::string describe() const override;
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override
      ABSL_LOCKS_EXCLUDED(shut_mu_);
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override ABSL_LOCKS_EXCLUDED(mu_);
  void Store(std::vector<TierStore> stores, Done done) override ABSL_LOCKS_EXCLUDED(mu_);
  void Drain() override ABSL_LOCKS_EXCLUDED(mu_);
  // What a daemon without keys has written goes as well.
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop = nullptr) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override { return behind_->CountOf(owner); }
  // Bytes of what is there are those of sealed values.
  TierUsage usage() override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A value on its way.
  struct Task {
    TierKey key;
    std::shared_ptr<TierBuffer> into;         // One of the two is there.
    std::shared_ptr<const TierBuffer> value;  // It goes when it is sealed.
    uint64_t bytes = 0;                       // The value's.
    bool replaces = false;                    // See TierStore.
    Deadline deadline = Deadline::max();
    std::chrono::steady_clock::time_point since;
    size_t index = 0;
    std::shared_ptr<const Done> done;
    std::shared_ptr<TierBuffer> sealed;
    TierResult loaded = TierResult::kMiss;  // What the tier behind has answered to the load.
  };
  using TaskRef = std::shared_ptr<Task>;
  // What a thread does next.
  struct Step {
    enum class Kind : uint8_t { kNone, kOpen, kLoad, kStore };
    Kind kind = Kind::kNone;
    TaskRef task;
    uint64_t number = 0;
  };
  // Why a value that is none is none: nobody has the key of it.
  enum class Counted : uint8_t { kAsAnswered, kNoKey };

  SealedTier(std::unique_ptr<Tier> behind, std::shared_ptr<EncryptionKeyFile> keys,
             std::shared_ptr<BufferMemory> up, std::shared_ptr<BufferMemory> down, const Options& options);
  void Enqueue(std::vector<TaskRef> tasks, std::deque<TaskRef>* queue) ABSL_LOCKS_EXCLUDED(mu_);
  void Work() ABSL_LOCKS_EXCLUDED(mu_);
  Step Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes a buffer for the first of the queue and the value out of it. Nothing: there is no buffer.
  TaskRef TakeFirst(std::deque<TaskRef>* queue, BufferStock* stock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // It is under way from then on, until EndStep.
  uint64_t BeginStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndStep(uint64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  void RunLoad(const TaskRef& task) ABSL_LOCKS_EXCLUDED(mu_, shut_mu_);
  void RunOpen(const TaskRef& task) ABSL_LOCKS_EXCLUDED(mu_, shut_mu_);
  void RunStore(const TaskRef& task) ABSL_LOCKS_EXCLUDED(mu_, shut_mu_);
  void Answer(const TaskRef& task, TierResult result, Counted counted = Counted::kAsAnswered)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until all steps that have begun are over.
  void AwaitBegun() ABSL_LOCKS_EXCLUDED(mu_);
  void RefuseWaiting(const TierOwner& owner) ABSL_LOCKS_EXCLUDED(mu_);
  // What is shut is so for these keys; with others it is forgotten.
  bool IsShut(const TierKey& key, const std::shared_ptr<const EncryptionKeys>& keys)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shut_mu_);
  void Shut(const TierKey& key, const std::shared_ptr<const EncryptionKeys>& keys)
      ABSL_LOCKS_EXCLUDED(shut_mu_);
  void TellOfDamage() ABSL_LOCKS_EXCLUDED(mu_);

  const uint64_t most_sealed_bytes_;
  const std::chrono::milliseconds shut_for_;
  const std::shared_ptr<EncryptionKeyFile> keys_;
  BufferStock up_, down_;
  Mutex mu_;  // Nothing is sealed, opened or asked for under it.
  CondVar work_, idle_, ended_;
  std::deque<TaskRef> loads_ ABSL_GUARDED_BY(mu_), stores_ ABSL_GUARDED_BY(mu_);
  std::deque<Step> loaded_ ABSL_GUARDED_BY(mu_);  // Loads that the tier behind has answered: they go first.
  size_t waiting_ ABSL_GUARDED_BY(mu_) = 0;       // Tasks that are not answered.
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;       // The number of the last step that has begun,
  std::set<uint64_t> under_way_ ABSL_GUARDED_BY(mu_);  // and those of all that are not over.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  TierCounters counters_ ABSL_GUARDED_BY(mu_);  // All but `evicted`.
  Histogram load_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  Histogram store_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  std::chrono::steady_clock::time_point tell_at_ ABSL_GUARDED_BY(mu_);  // No damage is told of before.
  Mutex shut_mu_;
  std::weak_ptr<const EncryptionKeys> shut_by_ ABSL_GUARDED_BY(shut_mu_);  // Keys that are gone stay gone.
  // Until when each is shut.
  absl::flat_hash_map<TierKey, std::chrono::steady_clock::time_point> shut_ ABSL_GUARDED_BY(shut_mu_);
  std::vector<std::thread> threads_;
  // It goes first: its buffers come back while there is somebody to tell.
  const std::unique_ptr<Tier> behind_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_SEALED_TIER_H_
