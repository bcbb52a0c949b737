// A policy that thinks: too slow to be asked under the pool's lock, so what it judges is a snapshot. One decision:
//
//   Show    under the lock     copies the coldest blocks on offer, with what is known of them
//   Rank    without it         orders them, within a budget
//   apply   under the lock     those that are as they were shown leave, by ref, generation and last use
//
// What is not decided in time, and whoever needs a victim right now, takes Victim(): that of LRU.
#ifndef KVPOOL_SERVER_REPLACEMENT_THINKING_POLICY_H_
#define KVPOOL_SERVER_REPLACEMENT_THINKING_POLICY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "proto/support/block_ref.h"
#include "server/replacement/policy.h"

namespace kvpool {

// What one decision is about, coldest first.
struct Candidates {
  std::vector<BlockRef> blocks;
  std::vector<uint64_t> last_uses;  // Parallel to the blocks; moves with each use.
  std::vector<float> features;      // A row for each block, as its judge reads them.
  uint32_t may_leave = 0;           // How many one decision may have leave.
  float hits_per_insert = 0;        // Lately: what the room of a block brings until another takes it.

  void Clear() {
    blocks.clear();
    last_uses.clear();
    features.clear();
  }
};

// What came of it.
struct Ranking {
  std::vector<uint32_t> order;  // Indexes of all candidates, the first to leave first.
  uint32_t spared = 0;          // So many of the last are worth more than what would take their room.
};

// Time since a decision began. A policy has no clock: its caller brings one, or none in virtual time.
class Stopwatch {
 public:
  virtual ~Stopwatch() = default;
  virtual uint64_t elapsed_us() const = 0;
};

// The part of a policy that needs no lock: it does not change.
class Judge {
 public:
  virtual ~Judge() = default;
  // False once the stopwatch shows more than the budget.
  virtual bool Rank(const Candidates& candidates, const Stopwatch& stopwatch, uint64_t budget_us,
                    Ranking* ranking) const = 0;
};

class ThinkingPolicy : public ReplacementPolicy {
 public:
  ThinkingPolicy* thinking() final { return this; }
  virtual std::shared_ptr<const Judge> judge() const = 0;
  // Sets all of `out`, which is empty: ids, whose generations are the pool's to add, and what is known of them.
  // REQUIRES: something is on offer.
  virtual void Show(uint64_t now_ms, Candidates* out) = 0;
  virtual uint64_t last_use(BlockId block) const = 0;
  // A decision was applied, and spared it. REQUIRES: on offer.
  virtual void OnSpared(BlockId block) = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_THINKING_POLICY_H_
