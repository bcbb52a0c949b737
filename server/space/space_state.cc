#include "server/space/space_state.h"

#include <utility>

#include "server/pool/hand_over.h"
#include "server/replacement/policy.h"

namespace kvpool {

SpaceState::SpaceState(const SpaceFacts* facts, const PoolOptions& options,
                       std::unique_ptr<ReplacementPolicy> policy, uint64_t now)
    : facts(*facts),
      pool(options, std::move(policy)),
      growth(facts, &pool),
      old_sessions(&pool),
      sessions(facts, &pool, &growth, now),
      pressure(&pool, &growth, &sessions),
      below(facts, &pool),
      checks(facts, &pool, &growth),
      give_back(facts, &pool, &growth, &sessions, &below, &checks),
      hold(kHoldBounds),
      hold_work(kHoldBounds),
      reclaim(kCallBounds),
      lifetime(kLifeBounds),
      idle_before_evict(kLifeBounds),
      reuse_gap(kLifeBounds),
      decision_time(kCallBounds) {}

std::unique_ptr<ReplacementPolicy> SpaceState::FinishHandOver(BlockPool::HandOver* hand_over,
                                                              uint32_t events) {
  std::map<std::string, EvictedBlocks> before = evicted_by_policy();
  std::unique_ptr<ReplacementPolicy> old = hand_over->Finish(&pool, events);
  if (old == nullptr) return nullptr;
  evicted_before_ = std::move(before);
  evicted_at_switch_ = pool.counters().evicted;
  return old;
}

std::map<std::string, EvictedBlocks> SpaceState::evicted_by_policy() const {
  std::map<std::string, EvictedBlocks> by_policy = evicted_before_;
  EvictedBlocks& under_this = by_policy[std::string(pool.policy().name())];
  for (int i = 0; i < kEvictReasons; ++i) {
    under_this[i] += pool.counters().evicted[i] - evicted_at_switch_[i];
  }
  return by_policy;
}

void SpaceState::Observe(const std::vector<Eviction>& evictions) {
  for (const Eviction& eviction : evictions) {
    lifetime.Observe(eviction.lifetime_ms / 1000.0);
    idle_before_evict.Observe(eviction.idle_ms / 1000.0);
  }
  below.Left(evictions);
}

}  // namespace kvpool
