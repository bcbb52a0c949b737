// One decision of a policy that thinks, from outside: Prepare and Apply under the pool's lock, Think without it.
//
//   Decision decision;
//   { lock; if (!decision.Prepare(&pool, &record, now)) …the pool's own Reclaim… }
//   decision.Think(stopwatch, budget_us);
//   { lock; decision.Apply(&pool, &record, now, count, reason, &log); }
//
// A decision that came too late is LRU's: as many blocks leave, by the order of last use.
#ifndef KVPOOL_SERVER_POOL_DECISION_H_
#define KVPOOL_SERVER_POOL_DECISION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "server/pool/block_pool.h"
#include "server/replacement/breaker.h"
#include "server/replacement/thinking_policy.h"

namespace kvpool {

inline constexpr uint64_t kDecisionBudgetUs = 500;

// What came of the decisions about one pool. The pool's lock is around it.
struct DecisionRecord {
  Breaker breaker;
  uint64_t decided = 0;    // In time.
  uint64_t late = 0;       // Timeouts.
  uint64_t not_asked = 0;  // The breaker was open.
};

class Decision {
 public:
  // False: nothing is to be thought about, BlockPool::Reclaim is as good: the policy does not think, the breaker is
  // open, or what leaves is clear already.
  bool Prepare(BlockPool* pool, DecisionRecord* record, TimeMs now);
  // REQUIRES: Prepare answered true. Takes no lock.
  void Think(const Stopwatch& stopwatch, uint64_t budget_us);
  // REQUIRES: Think was called. Answers how many blocks were freed, at most `count`.
  uint32_t Apply(BlockPool* pool, DecisionRecord* record, TimeMs now, uint32_t count, EvictReason reason,
                 std::vector<Eviction>* log);

 private:
  std::shared_ptr<const Judge> judge_;
  Candidates candidates_;
  std::vector<uint32_t> order_;
  bool in_time_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_DECISION_H_
