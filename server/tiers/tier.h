// Memory below the pool: slower, larger, and it may outlive the daemon. tests/tiers/contract_test.cc holds every tier to this.
//
//   A value is whole or it is a miss: what Load fills a buffer with are the bytes that Store was given under this key, or
//   the result is not kDone. A value may be gone at any time. Storing a key that is there changes nothing, unless that is asked
//   for: one key, one content (tier_key.h).
//
// All is asynchronous, each value of a batch by itself and in any order. Every value is answered exactly once, on a
// thread of the tier or of the caller. A tier keeps the buffers that it was given until it has answered: whoever does not wait
// any more just lets go of his. Thread-safe.
#ifndef KVPOOL_SERVER_TIERS_TIER_H_
#define KVPOOL_SERVER_TIERS_TIER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/histogram.h"
#include "server/tiers/buffers.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

enum class TierResult : uint8_t {
  kDone,
  kMiss,     // It is not there, or not any more.
  kCorrupt,  // It was there, and not as it was stored: torn, or changed by others. It is there no more.
  kLate,     // Its deadline passed before it was looked at.
  kFull,     // There is no room for it, or too much waits already.
  kFailed,   // The store said no.
};

// Is there likely to be a value?
enum class TierPresence : uint8_t {
  kNo,
  kYes,
  kUnknown,  // The tier will know soon. Whoever has time tries to load it: that is a miss after one round trip.
};

// When a block is written: shortly before it would leave the pool, as soon as it is sealed, or once so many requests had its
// tokens, of which the one that computed it is the first.
enum class TierWrite : uint8_t { kEvict, kSeal, kReuse };
struct TierRule {
  static constexpr uint32_t kLeastUses = 2, kMostUses = 63;
  TierWrite when = TierWrite::kEvict;
  uint32_t uses = kLeastUses;  // kReuse has it.
};

struct TierLoad {
  TierKey key;
  std::shared_ptr<TierBuffer> into;  // Has the value's size: a value of another one is a miss.
};
struct TierStore {
  TierKey key;
  std::shared_ptr<const TierBuffer> value;
  // What is there under this key is of no use to anybody and gives way, unless it is being written at this moment.
  bool replaces = false;
};

// What was counted since it was opened, and what it has. Nothing but uint64_t: see server/base/counters.h.
struct TierCounters {
  uint64_t stored = 0, stored_bytes = 0, loaded = 0, loaded_bytes = 0;
  uint64_t evicted = 0, missed = 0, corrupt = 0, late = 0, full = 0, failed = 0;
  uint64_t no_key = 0;  // Those of which nobody has the key: misses, and values that were not taken.

  // The answer to a load or a store of a value.
  void Count(bool load, uint64_t value_bytes, TierResult result);
};
struct TierUsage {
  // Where others write as well, `values` are those that are known to be there, and the other two are 0: nobody knows.
  uint64_t values = 0, bytes = 0, capacity_bytes = 0;
  uint64_t waiting = 0;  // Loads and stores that are not answered.
  // Servers that it consists of, and those that are left alone as they don't answer; none where it is no server.
  uint64_t nodes = 0, nodes_down = 0;
  TierCounters counters;
  HistogramSnapshot load, store;  // Seconds from when a value was asked for, or given, to the answer.
};

// What became of all that one tenant had.
struct TierErased {
  uint64_t values = 0, bytes = 0;  // These are gone.
  uint64_t failed = 0;  // These are found no more, and it is not certain that their bytes are gone.
  // What the tier may have still, for people to read, whether another call would help or not; empty: nothing.
  std::string remains;
  bool complete = true;  // False: another call may find more.
  bool wiped = false;    // All bytes that are nobody's were overwritten.
};

class Tier {
 public:
  // What is under way is answered first.
  virtual ~Tier() = default;
  // A label of metrics: "file", "resp", "s3".
  virtual std::string_view name() const = 0;
  // What it has is there for the next daemon.
  virtual bool lasting() const { return true; }
  // It takes no value of more bytes.
  virtual uint64_t most_value_bytes() const = 0;
  // Where it is: a folder, a server.
  virtual std::string path() const = 0;
  // Where it is and how it works, for the log.
  virtual std::string describe() const = 0;
  // It answers from memory, at once: no promise. `found` is as long as `keys`.
  virtual void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) = 0;
  using Done = std::function<void(size_t index, TierResult result)>;
  using Deadline = std::chrono::steady_clock::time_point;
  virtual void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) = 0;
  virtual void Store(std::vector<TierStore> stores, Done done) = 0;
  // Waits until all is answered that was asked for before.
  virtual void Drain() = 0;
  // None of the owner's values that were stored, or given to Store, before it was called is found from then on: that is, when
  // this returns, which may take as long as the store does. `keys` are others that may be there. Their bytes are overwritten,
  // where the store can do that. What was asked for and has not begun is answered with kMiss. It may be called again after
  // one that failed, or that a daemon did not live to end: bytes
  // that it left are overwritten then. Once `stop` is true, which may be null, it ends soon, and is not complete.
  virtual TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                           const std::atomic<bool>* stop = nullptr) = 0;
  // So many are there, as far as the tier knows: it looks anew.
  virtual absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) = 0;
  virtual TierUsage usage() = 0;
};

inline void TierCounters::Count(bool load, uint64_t value_bytes, TierResult result) {
  switch (result) {
    case TierResult::kDone:
      ++(load ? loaded : stored);
      (load ? loaded_bytes : stored_bytes) += value_bytes;
      return;
    case TierResult::kMiss:
      ++missed;
      return;
    case TierResult::kCorrupt:
      ++corrupt;
      return;
    case TierResult::kLate:
      ++late;
      return;
    case TierResult::kFull:
      ++full;
      return;
    case TierResult::kFailed:
      ++failed;
      return;
  }
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_TIER_H_
