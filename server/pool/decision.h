// One decision of a policy that thinks, from outside: Prepare and Apply under the pool's lock, Think without it.
//
//   { lock; if (!decision.Prepare(&pool, &record, now)) reclaim; }
//   else {
//     decision.Think(stopwatch, budget_us);
//     { lock; decision.Apply(&pool, &record, now); reclaim; }
//   }
//
// What was decided are the next victims, whoever reclaims them. A decision that comes too late changes nothing: the
// next victims are LRU's.
#ifndef KVPOOL_SERVER_POOL_DECISION_H_
#define KVPOOL_SERVER_POOL_DECISION_H_

#include <cstdint>
#include <memory>

#include "server/pool/block_pool.h"
#include "server/replacement/parts/breaker.h"
#include "server/replacement/thinking_policy.h"

namespace kvpool {

inline constexpr uint64_t kDecisionBudgetUs = 500;

// What came of the decisions about one pool. The pool's lock is around it.
struct DecisionRecord {
  Breaker breaker;
  uint64_t in_time = 0;
  uint64_t late = 0;       // Timeouts.
  uint64_t not_asked = 0;  // The breaker was open.
};

class Decision {
 public:
  // False: nothing is to be thought about now. The policy does not think, the next victims are decided on, nothing is on
  // offer, or the breaker is open.
  bool Prepare(BlockPool* pool, DecisionRecord* record, TimeMs now);
  // REQUIRES: Prepare answered true. Takes no lock.
  void Think(const Stopwatch& stopwatch, uint64_t budget_us);
  // REQUIRES: Think was called.
  void Apply(BlockPool* pool, DecisionRecord* record, TimeMs now);
  // How many victims one decision is for: so many to reclaim, in time or not, before the next.
  uint32_t victims() const { return candidates_.may_leave; }

 private:
  std::shared_ptr<const Judge> judge_;
  Candidates candidates_;
  Ranking ranking_;
  Breaker::Ticket ticket_ = 0;
  bool in_time_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_DECISION_H_
