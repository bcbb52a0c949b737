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
//
//   per_token * n + per_token_pair * (n * front + n^2 / 2)
//   per_token = 2 P / F, per_token_pair = 4 L d / F
//
// for a model of P weights and L layers of width d, at F floating-point operations a microsecond. The default
// is an 8B model (L = 32, d = 4096) at 400 TFLOP/s.
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
  uint64_t regret = 0;          // evicted blocks that were asked for later
  double prefill_us = 0;        // the time to compute everything without a cache
  double prefill_saved_us = 0;  // the part of it that the hits save
  double decision_ns = 0;       // time in the policy, with all its upkeep, per evicted block
  double bytes_per_block = 0;   // the policy's bookkeeping
  double seconds = 0;           // duration of the replay

  double block_ratio() const { return blocks == 0 ? 0 : static_cast<double>(hit_blocks) / blocks; }
  double token_ratio() const { return tokens == 0 ? 0 : static_cast<double>(hit_tokens) / tokens; }
  // Counts a request of which `hits` leading blocks were resident, unless it is part of the warm-up.
  void Count(const Workload& workload, const Request& request, uint64_t hits, const PrefillCost& cost);
};

struct ReplayOptions {
  std::string policy;
  uint32_t capacity_blocks = 0;
  uint64_t seed = 1;
  PrefillCost cost;
  std::shared_ptr<const Weights> weights;  // null: those built in

  // PolicyOptions::cost_per_depth. In a sample one_in times as many blocks lie in front of a block
  // as are seen.
  double cost_per_depth(const Workload& workload) const {
    return cost.us_per_token_pair * workload.tokens_per_block * workload.one_in / cost.us_per_token;
  }
};

// INVALID_ARGUMENT: a request has more blocks than the capacity.
absl::Status CheckFits(const Workload& workload, uint32_t capacity_blocks);

// Each request matches its chain, leases and seals what is missing, and releases all of it before the next.
// INVALID_ARGUMENT: an unknown policy, or a request has more blocks than the capacity.
absl::StatusOr<Result> Replay(const Workload& workload, const ReplayOptions& options);

// Replays with a policy that the caller made. REQUIRES: every request fits into the capacity.
Result ReplayWith(const Workload& workload, const ReplayOptions& options,
                  std::unique_ptr<ReplacementPolicy> policy);

// The bounds, which Replay takes as the policies "opt" and "infinite".
//
// opt: after each request, of the blocks that were resident and those of the request, the ones with the
// soonest next use stay (Belady 1966). A parent is used whenever its child is, so they form prefixes. No
// policy that must hold a request's blocks while it runs can do better.
Result ReplayOptimal(const Workload& workload, uint32_t capacity_blocks, const PrefillCost& cost);
Result ReplayInfinite(const Workload& workload, const PrefillCost& cost);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_REPLAY_H_
