// A bucket of an S3-compatible store as a tier that nodes share (s3_value.h: how a value lies there).
//
// One thread has all connections and everything that is under way, so that nothing of it needs a lock; whoever asks leaves the
// question in a queue.
//
// What is there is known only to the store, which others write to as well. Exists answers from what was stored, found or asked about
// a moment ago (known_keys.h); other keys are asked about, for the next one who wants to know. While the store does not answer, nothing
// is there.
#ifndef KVPOOL_SERVER_TIERS_S3_TIER_H_
#define KVPOOL_SERVER_TIERS_S3_TIER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"
#include "server/tiers/known_keys.h"
#include "server/tiers/s3_client.h"
#include "server/tiers/s3_erasure.h"
#include "server/tiers/s3_upload.h"
#include "server/tiers/tier.h"

namespace kvpool {

class S3Tier final : public Tier {
 public:
  struct Options {
    S3Client::Options client;
    AwsCredentialSource::Options credentials;
    std::string prefix = "kvpool";
    // Larger values go in parts of this; one of 64 MiB does not, encrypted or not. S3 takes no part that is smaller than 5 MiB, but
    // the last.
    uint64_t part_bytes = (64 << 20) + 4096;
    std::chrono::milliseconds probe{5000};  // Open waits for the store's word so long at most.
    KnownKeys::Options known{.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)};
  };
  // Values that may wait. The buffers that they come in have a bound in bytes besides.
  static constexpr size_t kMostWaiting = 16384;
  // Keys that are to be asked about.
  static constexpr size_t kMostAsked = 65536;
  // Objects that are no values, and are to be deleted.
  static constexpr size_t kMostDeletions = 1024;
  static constexpr uint64_t kMostValueBytes = UINT32_MAX;

  // INVALID_ARGUMENT, with the flag's name in front: a file that can't be read, no credentials, or the store's refusal: wrong keys, no bucket, another clock. A
  // store that does not answer may come later, and the log says so.
  static absl::StatusOr<std::unique_ptr<S3Tier>> Open(const Options& options);
  // What is under way is answered as failed, at once.
  ~S3Tier() override;

  std::string_view name() const override { return "s3"; }
  uint64_t most_value_bytes() const override { return kMostValueBytes; }
  std::string path() const override { return TextOf(options_.client.endpoint); }
  std::string describe() const override;
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override
      ABSL_LOCKS_EXCLUDED(known_mu_);
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override ABSL_LOCKS_EXCLUDED(mu_);
  void Store(std::vector<TierStore> stores, Done done) override ABSL_LOCKS_EXCLUDED(mu_);
  void Drain() override ABSL_LOCKS_EXCLUDED(mu_);
  // All that the bucket lists of the owner, whoever wrote it.
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop = nullptr) override ABSL_LOCKS_EXCLUDED(mu_, known_mu_);
  // What the bucket lists. UNAVAILABLE says why it does not.
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override ABSL_LOCKS_EXCLUDED(mu_);
  TierUsage usage() override ABSL_LOCKS_EXCLUDED(mu_, known_mu_);

 private:
  // A value on its way.
  struct Task {
    TierKey key;
    std::shared_ptr<TierBuffer> into;         // One of the two is there,
    std::shared_ptr<const TierBuffer> value;  // and goes when it is answered.
    bool replaces = false;                    // See TierStore.
    Deadline deadline = Deadline::max();
    std::chrono::steady_clock::time_point since;
    size_t index = 0;
    std::shared_ptr<const Done> done;
    bool over = false;      // It is answered.
    bool believed = false;  // The store was not asked.
    uint64_t asked = 0;     // See KnownKeys::Learn.
    // What follows is the thread's.
    std::string name;                                                // See S3ObjectName.
    std::multimap<Deadline, std::shared_ptr<Task>>::iterator timer;  // Good if `timed`.
    bool timed = false;
  };
  using TaskRef = std::shared_ptr<Task>;
  // One call of Erase. All but `over` is the thread's until that is set.
  struct Erasing {
    TierOwner owner;
    std::vector<TierKey> keys;
    std::vector<TaskRef> before;  // Stores that were under way: their values are deleted behind them.
    bool begun = false;
    std::shared_ptr<S3Erasure> work;
    TierErased answer;
    bool over = false;
    std::atomic<bool> gave_up{false};  // Its caller does not wait any more.
  };
  using ErasingRef = std::shared_ptr<Erasing>;
  // One call of CountOf, in the same way.
  struct Counting {
    TierOwner owner;
    bool begun = false;
    uint64_t count = 0, pages = 0;
    absl::Status status;
    bool over = false;
  };
  using CountingRef = std::shared_ptr<Counting>;

  S3Tier(const Options& options, std::unique_ptr<S3Client> client);
  void Enqueue(std::vector<TaskRef> tasks) ABSL_LOCKS_EXCLUDED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void SumSome();
  void AnswerAll(const std::vector<TaskRef>& came);
  // The load or store of a task begins.
  void Begin(const TaskRef& task);
  void BeginLoad(const TaskRef& task);
  void BeginStore(const TaskRef& task);
  void Upload(const TaskRef& task);
  void Answer(const TaskRef& task, TierResult result) ABSL_LOCKS_EXCLUDED(mu_, known_mu_);
  void AskAbout(const TierKey& key) ABSL_LOCKS_EXCLUDED(known_mu_);
  // Nobody waits for it. What stays is found again by the next load.
  void Delete(const TaskRef& task);
  void Advance(const ErasingRef& erasing) ABSL_LOCKS_EXCLUDED(mu_, known_mu_);
  void End(const ErasingRef& erasing) ABSL_LOCKS_EXCLUDED(mu_);
  void Count(const CountingRef& counting, const std::string& token);
  void End(const CountingRef& counting, absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  // What is known of many is changed in parts.
  void Erased(absl::Span<const std::string> names) ABSL_LOCKS_EXCLUDED(known_mu_);
  void ForgetAll(const TierOwner& owner) ABSL_LOCKS_EXCLUDED(known_mu_);
  // What an answer that is no success amounts to. Null: there was none.
  TierResult ResultOf(const S3Response* response);

  const Options options_;
  Mutex mu_;
  Mutex known_mu_;
  CondVar idle_, ended_;
  std::vector<TaskRef> inbox_ ABSL_GUARDED_BY(mu_);
  size_t waiting_ ABSL_GUARDED_BY(mu_) = 0;                // Tasks that are not answered.
  std::vector<ErasingRef> erasings_ ABSL_GUARDED_BY(mu_);  // Those that are not over.
  std::vector<CountingRef> countings_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  TierCounters counters_ ABSL_GUARDED_BY(mu_);
  Histogram load_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  Histogram store_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  KnownKeys known_ ABSL_GUARDED_BY(known_mu_);
  std::vector<TierKey> asks_ ABSL_GUARDED_BY(known_mu_);
  size_t asked_ ABSL_GUARDED_BY(known_mu_) = 0;  // Keys whose answer is to come.
  std::atomic<bool> down_{false};
  // The thread's.
  const std::unique_ptr<S3Client> client_;
  std::multimap<Deadline, TaskRef> deadlines_;
  absl::flat_hash_set<TaskRef> under_way_;
  std::deque<std::shared_ptr<S3Upload>> sums_;  // Values that are to be summed, the first one first.
  size_t deletions_ = 0;                        // Those that are not answered.
  std::chrono::steady_clock::time_point warn_again_;
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_TIER_H_
