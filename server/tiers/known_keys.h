// What a daemon knows of a store that others write to as well: which keys were there a moment ago, and which were not. At most
// kMost of them, the least recently used one goes first.
#ifndef KVPOOL_SERVER_TIERS_KNOWN_KEYS_H_
#define KVPOOL_SERVER_TIERS_KNOWN_KEYS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "server/tiers/tier.h"

namespace kvpool {

// Not thread-safe. A key is known by a hash of 64 bits: two that share it are taken for one, which costs a load that misses or
// a value that is not written.
class KnownKeys {
 public:
  // 200 bytes each.
  static constexpr size_t kMost = 1 << 18;
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::chrono::milliseconds there, not_there;  // So long it is believed.
  };
  // Its tables have their room at once: to grow one takes some 10 ms.
  explicit KnownKeys(const Options& options);

  TierPresence Find(const TierKey& key, Clock::time_point now);
  // The answer is on its way. False: it was already.
  bool Ask(const TierKey& key, Clock::time_point now);
  // `asked` is what erased() said when the question was asked. If the key was erased since, the answer may be older than that, and
  // is not believed where it says that the value is there.
  void Learn(const TierKey& key, bool there, Clock::time_point now, uint64_t asked);
  // So many keys were erased, or may have been.
  uint64_t erased() const { return erased_; }
  // Nothing is known of it, and nothing learned from what was asked before.
  void Erased(const TierKey& key);
  // It may be there: the store was to keep it, or to take it away, and did not say which of both it is. It stays in doubt until
  // Settle, whatever is learned of it. At most kMost are: once there were more, lost_doubts is true for good.
  void Doubt(const TierKey& key);
  bool lost_doubts() const { return lost_doubts_; }
  void Settle(const TierKey& key) { doubted_.erase(key); }
  // Nobody answered.
  void Forget(const TierKey& key);
  // So many are there.
  uint64_t there() const { return there_; }

 private:
  enum class State : uint8_t { kAsked, kThere, kNotThere };
  struct Known {
    TierKey key;
    uint64_t hash = 0;
    State state = State::kAsked;
    Clock::time_point until;
  };
  using Place = std::list<Known>::iterator;
  struct InOrder {
    bool operator()(const TierKey& a, const TierKey& b) const {
      return std::tie(a.space, a.block, a.group, a.raw) < std::tie(b.space, b.block, b.group, b.raw);
    }
  };

 public:
  // How far somebody has come who looks at all keys.
  class Walk {
   public:
    Walk() = default;
    Walk(const Walk&) = delete;
    Walk& operator=(const Walk&) = delete;

   private:
    friend class KnownKeys;
    bool begun_ = false;
    Place at_;
    std::optional<TierKey> doubted_;  // The last of those.
  };
  // Looks at `most` more keys, and appends the owner's that are there or in doubt, and those that somebody asks about. False: it has
  // seen all. Between two steps anything may change: what is used meanwhile may come twice. A walk goes on until it has seen all.
  bool Step(Walk* walk, const TierOwner& owner, size_t most, std::vector<TierKey>* out);

 private:
  void Set(const TierKey& key, State state, Clock::time_point until);
  void Drop(Place place);

  const Options options_;
  std::list<Known> order_;  // The least recently used one is the first.
  absl::flat_hash_map<uint64_t, Place> places_;
  std::vector<Walk*> walks_;  // Those under way.
  absl::btree_set<TierKey, InOrder> doubted_;
  bool lost_doubts_ = false;
  uint64_t erased_ = 0;
  // By hash, which of them a key was. Beyond kMost they are forgotten, and no question from before counts: erased_from_.
  absl::flat_hash_map<uint64_t, uint64_t> erased_at_;
  uint64_t erased_from_ = 0;
  uint64_t there_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_KNOWN_KEYS_H_
