#include "server/replacement/policies/async_policy.h"

#include <algorithm>

#include "absl/types/span.h"
#include "proto/support/check.h"

namespace kvpool {

void AsyncPolicy::Decide(const Candidates& candidates, const Ranking& ranking) {
  const absl::Span<const uint32_t> order = ranking.order;
  const size_t leave = std::min<size_t>(candidates.may_leave, order.size());
  decided_.clear();
  next_ = 0;
  for (const uint32_t i : order.first(leave)) {
    decided_.push_back({candidates.blocks[i], candidates.last_uses[i]});
  }
  for (const uint32_t i : order.last(std::min<size_t>(ranking.spared, order.size() - leave))) {
    if (LastUseOnOffer(candidates.blocks[i]) == candidates.last_uses[i]) OnSpared(candidates.blocks[i]);
  }
}

BlockId AsyncPolicy::NextDecided() {
  while (next_ < decided_.size()) {
    const Decided& next = decided_[next_++];
    if (LastUseOnOffer(next.block) == next.last_use) return next.block;
  }
  return kNullBlock;
}

Breaker::State Breaker::state(uint64_t now_ms) const {
  if (!open_) return State::kClosed;
  return trying_ || now_ms - opened_ms_ >= cool_down_ms_ ? State::kHalfOpen : State::kOpen;
}

bool Breaker::Admit(uint64_t now_ms) {
  if (trying_ || state(now_ms) == State::kOpen) return ++counts_.not_asked, false;
  trying_ = open_;
  return true;
}

void Breaker::Report(uint64_t epoch, uint64_t now_ms, bool in_time) {
  ++(in_time ? counts_.in_time : counts_.late);
  if (epoch != epoch_) return;
  trying_ = false;
  if (in_time) {
    open_ = false;
    late_in_a_row_ = 0;
    cool_down_ms_ = kFirstCoolDownMs;
  } else if (open_) {
    opened_ms_ = now_ms;
    cool_down_ms_ = std::min(2 * cool_down_ms_, kMostCoolDownMs);
  } else if (++late_in_a_row_ >= kTripAfter) {
    open_ = true;
    opened_ms_ = now_ms;
    ++epoch_;
  }
}

bool Decision::Prepare(AsyncPolicy* policy, Breaker* breaker, uint64_t now_ms) {
  if (policy == nullptr || policy->decided() > 0 || policy->offered() == 0) return false;
  if (!breaker->Admit(now_ms)) return false;
  epoch_ = breaker->epoch();
  ranker_ = policy->ranker();
  candidates_.blocks.clear();
  candidates_.last_uses.clear();
  candidates_.features.clear();
  policy->Show(now_ms, &candidates_);
  return true;
}

void Decision::Rank(absl::FunctionRef<uint64_t()> elapsed_us) {
  KVPOOL_CHECK(ranker_ != nullptr, "Prepare was not called");
  ranking_ = (*ranker_)(candidates_, [&] { return elapsed_us() > kBudgetUs; });
}

void Decision::Apply(AsyncPolicy* policy, Breaker* breaker, uint64_t now_ms) {
  breaker->Report(epoch_, now_ms, ranking_.has_value());
  if (ranking_.has_value() && policy != nullptr && policy->ranker() == ranker_) {
    policy->Decide(candidates_, *ranking_);
  }
}

}  // namespace kvpool
