// Two models with bursts of requests, each with an engine of its own, on one pool or on two halves of it: what their engines
// need not compute, and how many first tokens come in time.
//
// All of it is the daemon's own: pools, growth, reclaim, who gives memory to whom. Engines and time are made: an engine
// serves one request after the other, as they come. It matches, leases what it misses, computes for as long as PrefillCost
// says, seals, and releases. So figures depend on the requests and on what the daemon decides, and on no machine.
#ifndef KVPOOL_TESTS_SERVICE_GOODPUT_H_
#define KVPOOL_TESTS_SERVICE_GOODPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "proto/formats/trace.h"
#include "server/sim/replay.h"

namespace kvpool::goodput {

inline constexpr uint32_t kSlabBlocks = 16;

// Two sets of conversations, none in both, in which requests keep their times. A conversation belongs to the model whose burst
// it begins in, and one in so many to the other. Bursts take turns, and last from half to one and a half of burst_ms.
struct BurstOptions {
  uint64_t seed = 1;
  uint64_t burst_ms = 360 * 1000;
  uint32_t one_in = 10;
};
using Arrivals = std::vector<replay::Request>;
std::vector<Arrivals> SplitInBursts(const Arrivals& requests, const BurstOptions& options);

struct ServeOptions {
  uint32_t slabs = 0;  // Memory of the daemon: so many slabs of kSlabBlocks blocks.
  std::string policy = "lru";
  // Each session's guarantee: the largest request of the conversation trace has 247 blocks.
  uint32_t guaranteed_blocks = 272;
  uint32_t weight = 0;  // Each space's.
  // An 8B model on four GPUs.
  sim::PrefillCost cost = {.us_per_token = 10, .us_per_token_pair = 0.33e-3};
  uint64_t ttft_ms = 2000;  // A first token that comes later comes too late.
};

struct Outcome {
  uint64_t requests = 0, in_time = 0;
  uint64_t tokens = 0, hit_tokens = 0;
  double compute_us = 0, saved_us = 0;  // Prefill that was computed, and that was not.
  uint64_t waited_for_memory_ms = 0;    // Requests stood still so long, since blocks were not there.
  uint64_t slabs_given = 0;             // Slabs that its space gave back.

  Outcome& operator+=(const Outcome& other);
  double saved_percent() const { return 100 * saved_us / (saved_us + compute_us); }
  double in_time_percent() const {
    return 100 * static_cast<double>(in_time) / static_cast<double>(requests);
  }
};

// One daemon for all of these models. Outcomes are parallel to them.
std::vector<Outcome> Serve(const std::vector<Arrivals>& models, const ServeOptions& options);

// Each model with a daemon of its own that has half of the slabs.
std::vector<Outcome> ServeByHalves(const std::vector<Arrivals>& models, const ServeOptions& options);

Outcome Sum(const std::vector<Outcome>& outcomes);

}  // namespace kvpool::goodput

#endif  // KVPOOL_TESTS_SERVICE_GOODPUT_H_
