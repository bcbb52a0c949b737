#include "server/pool/decision.h"

#include <optional>

#include "proto/support/check.h"

namespace kvpool {

bool Decision::Prepare(BlockPool* pool, DecisionRecord* record, TimeMs now) {
  judge_ = pool->judge();
  if (judge_ == nullptr || pool->decided() > 0) return false;
  const std::optional<Breaker::Ticket> ticket = record->breaker.Admit(now);
  if (!ticket.has_value()) {
    ++record->not_asked;
    return false;
  }
  ticket_ = *ticket;
  if (pool->ShowCandidates(now, &candidates_)) return true;
  record->breaker.OnNone(ticket_);
  return false;
}

void Decision::Think(const Stopwatch& stopwatch, uint64_t budget_us) {
  KVPOOL_CHECK(judge_ != nullptr, "Prepare was not called");
  in_time_ = judge_->Rank(candidates_, stopwatch, budget_us, &ranking_);
}

void Decision::Apply(BlockPool* pool, DecisionRecord* record, TimeMs now) {
  record->breaker.OnDecision(ticket_, now, in_time_);
  ++(in_time_ ? record->in_time : record->late);
  // The policy may be another one by now.
  if (in_time_ && pool->judge() == judge_) pool->Decide(candidates_, ranking_);
}

}  // namespace kvpool
