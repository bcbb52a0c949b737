// An engine in virtual time, on a pool of the daemon's.
#ifndef KVPOOL_SERVER_SIM_ENGINE_H_
#define KVPOOL_SERVER_SIM_ENGINE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policies/async_policy.h"

namespace kvpool::sim {

// It serves one request at a time. A policy that decides outside the lock is asked ahead of the
// lease, as the daemon does it; others are asked as the lease goes.
class Engine {
 public:
  // The time that decisions take is added to *decision_ns. Both outlive it.
  Engine(BlockPool* pool, double* decision_ns)
      : pool_(*pool), decision_ns_(*decision_ns), session_(*pool->AddSession({})) {}

  // Serves a request for the first `asked` blocks of the chain and answers how many leading ones were
  // resident. `hints` is empty or parallel to the chain.
  uint64_t Serve(uint64_t now_ms, absl::Span<const uint32_t> chain, uint32_t asked,
                 absl::Span<const UseHint> hints);

 private:
  // Releases the tail first, and blocks with one hint together.
  void Release(uint64_t now_ms, absl::Span<const BlockRef> held);
  void ReclaimFor(uint32_t blocks, uint64_t now_ms);

  BlockPool& pool_;
  double& decision_ns_;
  const Holder session_;
  Decision decision_;
  Breaker breaker_;
  std::vector<BlockKey> keys_;
  MatchOutcome match_;
  std::vector<SealEntry> entries_;
  std::vector<SealVerdict> outcomes_;
  // Parallel to the blocks that are held.
  std::vector<UseHint> hints_;
  std::vector<Verdict> verdicts_;
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_ENGINE_H_
