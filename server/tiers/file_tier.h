// A folder on a disk as a tier.
//
//   PATH/lock        one daemon at a time
//   PATH/key         the secret of a tier without one of its own (--tier-key-file)
//   PATH/N.slots     segments (segment.h), each of slots of one size; with their records they stay within the capacity
//   PATH/N.records
//
// Values of one size share segments. The least recently used value of a size gives way to the next of that size; a segment
// that was not used for longer than anything of another size is given to that one, whole.
//
// What there is, and in which order, is in memory: 300 bytes a value. The next daemon reads it from the records of the
// segments, which are written again after uses that moved a value far.
#ifndef KVPOOL_SERVER_TIERS_FILE_TIER_H_
#define KVPOOL_SERVER_TIERS_FILE_TIER_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"
#include "server/base/sockets.h"
#include "server/tiers/file_io.h"
#include "server/tiers/segment.h"
#include "server/tiers/tier.h"

namespace kvpool {

class FileTier final : public Tier {
 public:
  struct Options {
    std::string path;
    uint64_t capacity_bytes = 0;
    int threads = 4;       // So many reads and writes are under way at once.
    FileIo* io = nullptr;  // Outlives it; null: the system's.
    std::chrono::milliseconds pause_after_error =
        std::chrono::seconds(10);  // Another file is made no sooner.
  };
  static constexpr uint64_t kLeastCapacityBytes = 1 << 20;
  // Values that may wait for a thread. The buffers that they come in have a bound in bytes besides.
  static constexpr size_t kMostWaiting = 16384;
  static constexpr uint64_t kMostValueBytes = UINT32_MAX;  // A record's size has 32 bits.

  // Makes the folder if there is none, and takes up what an earlier daemon left in it. ALREADY_EXISTS: another daemon has
  // it. Errors begin with the flag's name.
  static absl::StatusOr<std::unique_ptr<FileTier>> Open(const Options& options);
  ~FileTier() override;

  std::string_view name() const override { return "file"; }
  uint64_t most_value_bytes() const override { return std::min(capacity_bytes_, kMostValueBytes); }
  std::string path() const override { return path_; }
  std::string describe() const override;
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override
      ABSL_LOCKS_EXCLUDED(known_mu_);
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override
      ABSL_LOCKS_EXCLUDED(queue_mu_);
  void Store(std::vector<TierStore> stores, Done done) override ABSL_LOCKS_EXCLUDED(queue_mu_);
  void Drain() override ABSL_LOCKS_EXCLUDED(queue_mu_);
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop = nullptr) override
      ABSL_LOCKS_EXCLUDED(erase_mu_, mu_, queue_mu_, known_mu_);
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override ABSL_LOCKS_EXCLUDED(mu_);
  TierUsage usage() override ABSL_LOCKS_EXCLUDED(queue_mu_, known_mu_);

 private:
  // One call of Erase, for as long as it lasts.
  struct Erasure {
    TierErased answer;
    size_t left = 0;  // Values that are still read.
  };
  // One file, and what is free in it.
  struct File {
    std::unique_ptr<Segment> segment;
    uint64_t number = 0;
    uint64_t used = 0;    // The time of the last use of a value in it.
    uint32_t busy = 0;    // So many read or write it at this moment: it stays.
    bool stays = false;   // It could not be removed.
    bool wiping = false;  // Some of its free slots are not among these.
    std::vector<uint32_t> free;
    std::vector<uint32_t> failed;  // Free ones that could not be written.
  };
  struct Value {
    Segment::Record record;
    File* file = nullptr;
    uint32_t slot = 0;
    uint64_t used = 0;  // The time of its last use.
    uint32_t readers = 0;
    bool written = false;
    bool dropped = false;        // It is found no more, and goes when its last reader is done.
    Erasure* erasure = nullptr;  // Who waits until it has gone; the slot is wiped with the free ones then.
  };
  using Values = std::list<Value>;
  struct Size {
    Values values;  // The least recently used one is the first.
    std::vector<File*> files;
  };
  struct Task {
    TierLoad load;  // One of the two has a buffer.
    TierStore store;
    Deadline deadline;
    std::chrono::steady_clock::time_point since;  // It waits from then on.
    size_t index = 0;
    std::shared_ptr<const Done> done;
  };
  using Place = Values::iterator;

  FileTier(const Options& options, FileLock lock);
  absl::Status Recover() ABSL_LOCKS_EXCLUDED(mu_);
  void Adopt(std::unique_ptr<Segment> segment, uint64_t number, const std::vector<Segment::Filled>& filled)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Enqueue(std::vector<Task> tasks, std::deque<Task>* queue) ABSL_LOCKS_EXCLUDED(queue_mu_);
  // It is answered.
  void EndTask(uint64_t number) ABSL_LOCKS_EXCLUDED(queue_mu_);
  void Work() ABSL_LOCKS_EXCLUDED(mu_, queue_mu_);
  TierResult RunLoad(const Task& task) ABSL_LOCKS_EXCLUDED(mu_);
  TierResult RunStore(const Task& task) ABSL_LOCKS_EXCLUDED(mu_);
  void Use(Place value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Tells the next daemon of it, if it matters. REQUIRES: the value has a reader.
  void WriteUse(Place value) ABSL_LOCKS_EXCLUDED(mu_);
  // The file with a slot for a value of this size; null: there is no room. `error` gets what the disk said.
  File* TakeSlot(uint64_t slot_bytes, uint32_t* slot, absl::Status* error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  File* MakeFile(uint64_t slot_bytes, absl::Status* error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The file of another size that was not used since `before`, emptied and removed. False: there is none, or it can't be.
  bool TakeColdFile(uint64_t slot_bytes, uint64_t before) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // With its values. False: it can't be removed, and stays.
  bool RemoveFile(File* file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // It is found no more; its slot is free, at once or when its readers are done.
  void Drop(Place value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The numbers of all files that are there now.
  std::vector<uint64_t> FileNumbers() ABSL_LOCKS_EXCLUDED(mu_);
  // The file, which stays until Release; null: it is gone.
  File* Hold(uint64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  void Release(File* file) ABSL_LOCKS_EXCLUDED(mu_);
  // What was asked for of the owner's and has not begun is answered; what has begun is waited for.
  void RefuseWaiting(const TierOwner& owner) ABSL_LOCKS_EXCLUDED(queue_mu_);
  // Waits until what has begun is answered.
  void AwaitBegun() ABSL_LOCKS_EXCLUDED(queue_mu_);
  // All free slots are wiped: what lay there may have been anybody's. CANCELLED: `stop` is true.
  absl::Status WipeAll(const std::atomic<bool>* stop) ABSL_LOCKS_EXCLUDED(mu_, queue_mu_);
  absl::Status WipeFree(File* file, const std::atomic<bool>* stop) ABSL_LOCKS_EXCLUDED(mu_);
  // The files that could not be read, for people; empty: none.
  std::string LeftAlone() ABSL_LOCKS_EXCLUDED(mu_);
  void Know(const TierKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) ABSL_LOCKS_EXCLUDED(known_mu_);
  void Forget(const TierKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) ABSL_LOCKS_EXCLUDED(known_mu_);
  void Count(const Task& task, TierResult result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(queue_mu_);

  const std::string path_;
  const uint64_t capacity_bytes_;
  const uint64_t segment_bytes_;
  const std::chrono::milliseconds pause_after_error_;
  FileIo system_io_;
  FileIo* const io_;
  const FileLock lock_;
  const bool direct_;

  // Files are made and removed, and records emptied, under mu_, which only its own threads take. Nothing touches the disk under
  // known_mu_ and queue_mu_: whoever asks what there is, or gives it work, does not wait for a disk.
  Mutex erase_mu_;  // One Erase at a time: each sees all slots that are free.
  Mutex mu_ ABSL_ACQUIRED_AFTER(erase_mu_);
  Mutex known_mu_ ABSL_ACQUIRED_AFTER(mu_);
  Mutex queue_mu_;
  absl::flat_hash_set<TierKey> known_ ABSL_GUARDED_BY(known_mu_);  // The values that may be loaded.
  CondVar work_, idle_, ended_;
  CondVar erased_;  // It belongs to mu_.
  std::deque<Task> loads_ ABSL_GUARDED_BY(queue_mu_), stores_ ABSL_GUARDED_BY(queue_mu_);  // Loads go first.
  uint64_t begun_ ABSL_GUARDED_BY(queue_mu_) = 0;  // The number of the last task that a thread took,
  std::set<uint64_t> under_way_ ABSL_GUARDED_BY(queue_mu_);  // and those of all that are not answered.
  bool stopping_ ABSL_GUARDED_BY(queue_mu_) = false;
  TierCounters counters_ ABSL_GUARDED_BY(queue_mu_);  // All but `evicted`.
  Histogram load_seconds_ ABSL_GUARDED_BY(queue_mu_){kTierBounds};
  Histogram store_seconds_ ABSL_GUARDED_BY(queue_mu_){kTierBounds};
  std::atomic<uint64_t> evicted_{0}, value_bytes_{0};
  absl::flat_hash_map<TierKey, Place> found_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Size> sizes_ ABSL_GUARDED_BY(mu_);  // Keyed by slot_bytes.
  std::map<uint64_t, std::unique_ptr<File>> files_ ABSL_GUARDED_BY(mu_);
  uint64_t file_bytes_ ABSL_GUARDED_BY(mu_) = 0;              // Those of files that are left alone count too.
  std::vector<std::string> left_alone_ ABSL_GUARDED_BY(mu_);  // Paths of files that could not be read.
  // Slots that became free later than their value went, or that a value could not be written to whole: so often.
  uint64_t late_slots_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_file_ ABSL_GUARDED_BY(mu_) = 0;  // The number of the next one that is made.
  uint64_t clock_ ABSL_GUARDED_BY(mu_) = 0;      // It moves with each use and write.
  bool said_error_ ABSL_GUARDED_BY(mu_) = false;
  std::chrono::steady_clock::time_point make_again_
      ABSL_GUARDED_BY(mu_);  // The disk refused a file: until then there is room for room_bytes_ of them.
  uint64_t room_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::chrono::steady_clock::time_point failed_again_
      ABSL_GUARDED_BY(mu_);  // A slot could not be written: not before then.
  std::vector<std::thread> threads_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_FILE_TIER_H_
