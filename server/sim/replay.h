// One trace through one pool with one policy, in virtual time.
#ifndef KVPOOL_SERVER_SIM_REPLAY_H_
#define KVPOOL_SERVER_SIM_REPLAY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/replacement/policy.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Microseconds to compute the tokens [front, front + n) of a prompt whose first `front` are there:
// per_token * n + per_token_pair * (n * front + n^2 / 2). For a model of P weights, L layers of width d, at F
// floating-point operations a microsecond: per_token = 2P / F, per_token_pair = 4 L d / F. The default is an 8B
// model (L 32, d 4096) at 400 TFLOP/s.
struct PrefillCost {
  double us_per_token = 40;
  double us_per_token_pair = 1.31e-3;

  double us(uint64_t front, uint64_t n) const {
    const auto f = static_cast<double>(front), m = static_cast<double>(n);
    return us_per_token * m + us_per_token_pair * (m * f + m * m / 2);
  }
};

struct Result {
  std::string policy;
  uint64_t capacity_blocks = 0;
  uint64_t requests = 0;
  uint64_t blocks = 0, hit_blocks = 0;
  uint64_t tokens = 0, hit_tokens = 0;
  uint64_t evictions = 0;
  uint64_t regret = 0;          // Evicted blocks that were asked for later.
  double prefill_us = 0;        // To compute all without a cache.
  double prefill_saved_us = 0;  // Of which the hits need none.
  double decision_ns = 0;       // In the policy, all its upkeep included, per block evicted.
  double bytes_per_block = 0;   // Of the policy's bookkeeping.
  double seconds = 0;           // That the replay took.

  double block_ratio() const { return blocks == 0 ? 0 : static_cast<double>(hit_blocks) / blocks; }
  double token_ratio() const { return tokens == 0 ? 0 : static_cast<double>(hit_tokens) / tokens; }
  // Counts a request of the workload, behind its warm-up, of which `hits` leading blocks were resident.
  void Count(const Workload& workload, const Request& request, uint64_t hits, const PrefillCost& cost);
};

struct ReplayOptions {
  std::string policy;
  uint32_t capacity_blocks = 0;
  uint64_t seed = 1;
  PrefillCost cost;
  std::shared_ptr<const Weights> weights;  // Null: those built in.

  // As policies want it: see PolicyOptions. In front of a block of a sample lie so many more than are seen.
  double cost_per_depth(const Workload& workload) const {
    return cost.us_per_token_pair * workload.tokens_per_block * workload.one_in / cost.us_per_token;
  }
};

// INVALID_ARGUMENT: a request has more blocks than the capacity.
absl::Status CheckFits(const Workload& workload, uint32_t capacity_blocks);

// Each request matches its chain, leases and seals what is missing, and gives all of it back before the next.
// INVALID_ARGUMENT: an unknown policy, or a request has more blocks than the capacity.
absl::StatusOr<Result> Replay(const Workload& workload, const ReplayOptions& options);

// The same with a policy of the caller's. REQUIRES: every request fits into the capacity.
Result ReplayWith(const Workload& workload, const ReplayOptions& options,
                  std::unique_ptr<ReplacementPolicy> policy);

// The bounds, "opt" and "infinite" in place of a policy's name.
//
// opt: after each request, of what was resident and what the request brought, the blocks whose next use is
// soonest stay (Belady 1966). A parent is used whenever its child is, so they are prefixes; nobody who must
// hold a request's blocks while it runs can do better.
Result ReplayOptimal(const Workload& workload, uint32_t capacity_blocks, const PrefillCost& cost);
Result ReplayInfinite(const Workload& workload, const PrefillCost& cost);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_REPLAY_H_
