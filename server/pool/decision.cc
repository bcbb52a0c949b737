#include "server/pool/decision.h"

#include <algorithm>

#include "proto/support/check.h"

namespace kvpool {

bool Decision::Prepare(BlockPool* pool, DecisionRecord* record, TimeMs now) {
  judge_ = pool->judge();
  if (judge_ == nullptr) return false;
  if (!record->breaker.Admit(now)) {
    ++record->not_asked;
    return false;
  }
  if (pool->ShowCandidates(now, &candidates_)) return true;
  record->breaker.OnNone();
  return false;
}

void Decision::Think(const Stopwatch& stopwatch, uint64_t budget_us) {
  KVPOOL_CHECK(judge_ != nullptr, "Prepare was not called");
  in_time_ = judge_->Rank(candidates_, stopwatch, budget_us, &order_);
}

uint32_t Decision::Apply(BlockPool* pool, DecisionRecord* record, TimeMs now, uint32_t count,
                         EvictReason reason, std::vector<Eviction>* log) {
  record->breaker.OnDecision(now, in_time_);
  ++(in_time_ ? record->decided : record->late);
  // The policy may be another one by now.
  if (in_time_ && pool->judge() == judge_) {
    const uint32_t freed = pool->Reclaim(now, count, candidates_, order_, reason, log);
    // All of them were used meanwhile: somebody must leave nevertheless.
    if (freed > 0 || count == 0) return freed;
  }
  return pool->Reclaim(now, std::min(count, candidates_.may_leave), reason, log);
}

}  // namespace kvpool
