// A policy too slow to be asked under the pool's lock decides ahead: outside the lock, on a copy,
// within a budget.
//
//   { lock; asked = decision.Prepare(pool.async_policy(), &breaker, now); if (!asked) reclaim; }
//   if (asked) {
//     decision.Rank(elapsed_us);                                   no lock is held
//     { lock; decision.Apply(pool.async_policy(), &breaker, now); reclaim; }
//   }
//
// Prepare copies the coldest blocks on offer and what is known of them, Rank orders the copy, and Apply names
// the first of the order as the next victims. Each leaves when its turn comes, unless it was used or
// withdrawn after it was copied. The victim is LRU's wherever no decision is at hand: Rank exceeded the
// budget, every block decided on has left, or a lease cannot wait.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_ASYNC_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_ASYNC_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "proto/support/block_ref.h"
#include "server/replacement/policy.h"

namespace kvpool {

// What one decision is about, coldest block first.
struct Candidates {
  std::vector<BlockId> blocks;
  // Parallel to the blocks: the number of each one's last use. No two uses of a policy share a number.
  std::vector<uint64_t> last_uses;
  // One row per block, as the policy's ranker reads it.
  std::vector<float> features;
  // Most blocks that one decision may have leave.
  uint32_t may_leave = 0;
  // The recent average: what the room of one block brings until another content takes it.
  float hits_per_insert = 0;
};

struct Ranking {
  // Indexes of all candidates, the first to leave first.
  std::vector<uint32_t> order;
  // How many at the end of the order are worth more than what would take their room.
  uint32_t spared = 0;
};

// Orders candidates; null as soon as `late` answers true. It is called without the lock, so
// it changes nothing.
using Ranker = std::function<std::optional<Ranking>(const Candidates&, absl::FunctionRef<bool()> late)>;

// All but the ranker is called under the pool's lock.
class AsyncPolicy : public ReplacementPolicy {
 public:
  AsyncPolicy* async() final { return this; }
  // The same one for the policy's whole life, and a caller may use it beyond that.
  virtual std::shared_ptr<const Ranker> ranker() const = 0;
  // Sets all of `out`, whose vectors are empty. REQUIRES: offered() > 0.
  virtual void Show(uint64_t now_ms, Candidates* out) = 0;
  // The first `may_leave` of the ranking replace what was decided on before. The spared ones count as used.
  void Decide(const Candidates& candidates, const Ranking& ranking);
  // Takes the next victim that was decided on and is as it was shown, or kNullBlock: the next
  // is then Victim()'s.
  BlockId NextDecided();
  // Blocks decided on whose turn has not come, those that changed since among them.
  uint32_t decided() const { return static_cast<uint32_t>(decided_.size() - next_); }

 protected:
  // The number of the last use of a block on offer; 0 if it is not on offer.
  virtual uint64_t LastUseOnOffer(BlockId block) const = 0;
  // REQUIRES: on offer.
  virtual void OnSpared(BlockId block) = 0;

 private:
  struct Decided {
    BlockId block;
    uint64_t last_use;
  };
  std::vector<Decided> decided_;
  size_t next_ = 0;
};

// A circuit breaker: whether the policy is asked at all.
//
//   closed      it is asked; kTripAfter late decisions in a row open the breaker
//   open        it is not asked until the cool-down is over
//   half-open   one decision is tried: in time, it closes the breaker; late, it opens the breaker for twice
//               as long
//
// A decision that was admitted before the breaker opened is counted and changes no state: it tells
// how things were.
class Breaker {
 public:
  enum class State : uint8_t { kClosed, kHalfOpen, kOpen };
  // A machine that is busy for a moment delays one decision or two, not eight in a row.
  static constexpr uint32_t kTripAfter = 8;
  static constexpr uint64_t kFirstCoolDownMs = 1000, kMostCoolDownMs = 60000;
  struct Counts {
    uint64_t in_time = 0, late = 0, not_asked = 0;
  };

  State state(uint64_t now_ms) const;
  // False: do not ask now. In half-open the first caller is the one that tries.
  bool Admit(uint64_t now_ms);
  // What came of an admitted decision. `epoch`: epoch() at its admission.
  void Report(uint64_t epoch, uint64_t now_ms, bool in_time);
  // How often the breaker has opened from closed.
  uint64_t epoch() const { return epoch_; }
  const Counts& counts() const { return counts_; }

 private:
  Counts counts_;
  bool open_ = false, trying_ = false;
  uint32_t late_in_a_row_ = 0;
  uint64_t opened_ms_ = 0, cool_down_ms_ = kFirstCoolDownMs, epoch_ = 0;
};

class Decision {
 public:
  static constexpr uint64_t kBudgetUs = 500;

  // False: there is nothing to decide. `policy` is null, blocks decided on are left, nothing is on offer, or
  // the breaker is open.
  bool Prepare(AsyncPolicy* policy, Breaker* breaker, uint64_t now_ms);
  // `elapsed_us` answers the time since the decision began. REQUIRES: Prepare answered true.
  void Rank(absl::FunctionRef<uint64_t()> elapsed_us);
  // A late decision changes nothing, nor does one that another policy has made. REQUIRES: Rank was called.
  void Apply(AsyncPolicy* policy, Breaker* breaker, uint64_t now_ms);
  // How many blocks to reclaim, whether it was in time or late, before the next decision.
  uint32_t victims() const { return candidates_.may_leave; }

 private:
  std::shared_ptr<const Ranker> ranker_;
  Candidates candidates_;
  std::optional<Ranking> ranking_;
  uint64_t epoch_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_ASYNC_POLICY_H_
