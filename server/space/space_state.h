// All of a space that changes, but for the verbs: the pool, and seven parts around it, each of which knows
// those above it.
//
//   growth     slabs, and whether to make another       (growth.h)
//   old_sessions   what engines of an earlier daemon hold   (old_sessions.h)
//   sessions   who is in the space, and is to be told   (sessions.h)
//   pressure   watermarks, and what follows from them   (pressure.h)
//   below      what has left the pool, and comes back   (below.h)
//   checks     whether blocks hold what was sealed      (content_checks.h)
//   give_back  slabs that are to be the device's again  (give_back.h)
//
// Not thread-safe: the space's mutex is around it. Time comes in as an argument, or with the turn.
#ifndef KVPOOL_SERVER_SPACE_SPACE_STATE_H_
#define KVPOOL_SERVER_SPACE_SPACE_STATE_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/base/histogram.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policies/async_policy.h"
#include "server/space/below.h"
#include "server/space/content_checks.h"
#include "server/space/give_back.h"
#include "server/space/growth.h"
#include "server/space/old_sessions.h"
#include "server/space/pressure.h"
#include "server/space/sessions.h"
#include "server/space/space_facts.h"
#include "server/space/turn.h"

namespace kvpool {

// Blocks reclaimed under one hold of the space's mutex: some 20 us.
inline constexpr uint32_t kReclaimSlice = 256;

// What was counted since the space was made, beside PoolCounters. Nothing but uint64_t and arrays of it, as there.
struct SpaceCounters {
  std::array<uint64_t, 24> operations{};      // Indexed by v1::Operation::VerbCase.
  std::array<uint64_t, 24> errors{};          // The operations that were refused or failed, but on a device.
  std::array<uint64_t, 24> refused_blocks{};  // Those that an operation was not applied to, but to others.
  std::array<uint64_t, 8> shortfalls{};       // Indexed by v1::Shortfall.
  uint64_t batches = 0;
  uint64_t growth_failures = 0;  // Slabs that a device refused although the budget had room.
};

class SpaceState {
 public:
  // `facts` outlive it.
  SpaceState(const SpaceFacts* facts, const PoolOptions& options, std::unique_ptr<ReplacementPolicy> policy,
             uint64_t now);

  // Before a turn's mutex is let go: pressure is up to date, and `deferred` has the streams to wake.
  void EndTurn(Turn& turn) {
    pressure.Update(turn);
    sessions.CollectWakes(turn);
  }
  // Answers the policy before, to be destroyed outside the mutex; or null, as hand_over.h has it.
  std::unique_ptr<ReplacementPolicy> FinishHandOver(BlockPool::HandOver* hand_over, uint32_t events);
  // Evicted blocks, by the policy of the time.
  std::map<std::string, EvictedBlocks> evicted_by_policy() const;
  void Observe(const std::vector<Eviction>& evictions);

  const SpaceFacts& facts;
  BlockPool pool;
  Growth growth;
  OldSessions old_sessions;
  Sessions sessions;
  Pressure pressure;
  Below below;
  ContentChecks checks;
  GiveBack give_back;

  // ---- What metrics read. Nothing branches on it, but for the breaker and a log line said once.
  SpaceCounters counters;
  Histogram hold;       // Seconds that one hold of the space's mutex took,
  Histogram hold_work;  // and of a processor's time.
  Histogram reclaim, lifetime, idle_before_evict, reuse_gap;
  Breaker decisions;
  Histogram decision_time;  // Seconds a decision took.

 private:
  std::map<std::string, EvictedBlocks> evicted_before_;  // Policies that others have followed did this.
  EvictedBlocks evicted_at_switch_{};                    // The pool's counters when the present policy came.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_STATE_H_
