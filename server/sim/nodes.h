// A trace split over nodes: each has a pool of its own, and all have a store in common (kvpoold --tier=resp:) or none.
#ifndef KVPOOL_SERVER_SIM_NODES_H_
#define KVPOOL_SERVER_SIM_NODES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool::sim {

// Which node a request goes to.
enum class Route : uint8_t {
  kTurns,   // One after another, as a balancer that knows nothing of prefixes has it.
  kPrefix,  // Whoever was asked last for the most of what it begins with gets it, unless that one has a quarter more than the average.
};

struct NodesOptions {
  std::string policy = "learned";
  std::vector<uint32_t> nodes = {1, 10, 100};
  std::vector<uint32_t> uses = {
      1, 2};  // Parallel runs: the store is given a block that so many requests of a node had; 1: each.
  uint32_t capacity_blocks = 0;  // Each node has so many.
  std::vector<Route> routes = {Route::kTurns, Route::kPrefix};
  uint64_t seed = 1;
  PrefillCost cost;
  std::shared_ptr<const Weights> weights;  // Null: those built in.
};

struct NodesResult {
  uint32_t nodes = 0, uses = 0;
  Route route{};
  // Tokens that were asked for, that a node had, and that only the store had.
  uint64_t tokens = 0, own_tokens = 0, store_tokens = 0;
  uint64_t infinite_tokens = 0;  // What one node of infinite memory would have had.
  // Blocks that went to the store, those that came from it, and those of the first that never did.
  uint64_t written = 0, read = 0, never_read = 0;
  uint64_t requests = 0;
};

// The store has room for all, and answers at once: these are bounds of what sharing can bring. INVALID_ARGUMENT: an unknown
// policy, or a request has more blocks than a node.
absl::StatusOr<std::vector<NodesResult>> ReplayNodes(const Workload& workload, const NodesOptions& options);

// A table for people, or in Markdown.
std::string NodesTable(const Workload& workload, const std::vector<NodesResult>& results, bool markdown);

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_NODES_H_
