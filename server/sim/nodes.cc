#include "server/sim/nodes.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policy.h"
#include "server/sim/engine.h"

namespace kvpool::sim {
namespace {

// A daemon, and the engine on it.
struct Node {
  std::unique_ptr<BlockPool> pool;
  std::unique_ptr<Engine> engine;
  absl::flat_hash_map<uint32_t, uint32_t> uses;  // How many requests had a content.
};

// Sends requests to nodes.
class Router {
 public:
  Router(const Workload& workload, Route route, uint32_t nodes)
      : workload_(workload), route_(route), sent_(nodes), last_(workload.distinct, kNobody) {}

  uint32_t NodeOf(size_t index) {
    const absl::Span<const uint32_t> chain = workload_.chain(workload_.requests[index]);
    auto node = static_cast<uint32_t>(index % sent_.size());
    if (route_ == Route::kPrefix) {
      const uint32_t in_turn = node;
      for (const uint32_t content : chain) {
        if (last_[content] == kNobody) break;
        node = last_[content];
      }
      const double fair = static_cast<double>(index) / static_cast<double>(sent_.size());
      if (sent_[node] > 1.25 * fair + 1) node = in_turn;
    }
    ++sent_[node];
    for (const uint32_t content : chain) last_[content] = node;
    return node;
  }

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;
  const Workload& workload_;
  const Route route_;
  std::vector<uint64_t> sent_;  // How many requests a node got.
  std::vector<uint32_t> last_;  // Who was asked for a content.
};

absl::StatusOr<NodesResult> ReplayOne(const Workload& workload, const NodesOptions& options,
                                      NodesResult result) {
  double decision_ns = 0;
  std::vector<Node> nodes(result.nodes);
  for (Node& node : nodes) {
    const ReplayOptions of_node{.policy = options.policy, .seed = options.seed, .cost = options.cost};
    ASSIGN_OR_RETURN(std::unique_ptr<ReplacementPolicy> policy,
                     MakeReplacementPolicy(options.policy,
                                           PolicyOptions{.max_blocks = options.capacity_blocks + 1,
                                                         .seed = options.seed,
                                                         .tokens_per_block = workload.tokens_per_block,
                                                         .cost_per_depth = of_node.cost_per_depth(workload),
                                                         .weights = options.weights}));
    node.pool = std::make_unique<BlockPool>(
        PoolOptions{.max_blocks = options.capacity_blocks + 1, .windows = {0}}, std::move(policy));
    KVPOOL_CHECK(node.pool->Grow(options.capacity_blocks).ok(), "%u blocks", options.capacity_blocks);
    node.engine = std::make_unique<Engine>(node.pool.get(), &decision_ns);
  }
  Router router(workload, result.route, result.nodes);
  std::vector<bool> stored(workload.distinct), read(workload.distinct);
  std::vector<bool> written(workload.distinct);  // Those that count.
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    const Request& request = workload.requests[i];
    const absl::Span<const uint32_t> chain = workload.chain(request);
    Node& node = nodes[router.NodeOf(i)];
    const uint64_t own =
        node.engine->Serve(request.now_ms, chain, request.blocks, workload.hints_of(request));
    uint64_t found = own;
    while (found < request.blocks && stored[chain[found]]) ++found;
    const bool counts = i >= workload.warm_up;
    if (counts) {
      ++result.requests;
      result.tokens += request.tokens;
      result.own_tokens += workload.tokens_in(request, own);
      result.store_tokens += workload.tokens_in(request, found) - workload.tokens_in(request, own);
      result.read += found - own;
    }
    for (uint64_t b = own; b < found; ++b) read[chain[b]] = true;
    for (uint64_t b = 0; b < chain.size(); ++b) {
      // What was not resident is sealed anew, whether it was computed or brought up.
      uint32_t& uses = node.uses[chain[b]];
      ++uses;
      // Whoever brought it up has had it, too.
      if (uses < result.uses || stored[chain[b]]) continue;
      stored[chain[b]] = true;
      written[chain[b]] = counts;
      result.written += counts ? 1 : 0;
    }
  }
  for (uint32_t content = 0; content < workload.distinct; ++content) {
    result.never_read += written[content] && !read[content];
  }
  return result;
}

double Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

absl::StatusOr<std::vector<NodesResult>> ReplayNodes(const Workload& workload, const NodesOptions& options) {
  RETURN_IF_ERROR(CheckFits(workload, options.capacity_blocks));
  const uint64_t infinite = ReplayInfinite(workload, options.cost).hit_tokens;
  std::vector<NodesResult> results;
  for (const Route route : options.routes) {
    for (const uint32_t uses : options.uses) {
      for (const uint32_t nodes : options.nodes) {
        ASSIGN_OR_RETURN(
            results.emplace_back(),
            ReplayOne(workload, options,
                      {.nodes = nodes, .uses = uses, .route = route, .infinite_tokens = infinite}));
      }
    }
  }
  return results;
}

std::string NodesTable(const Workload& workload, const std::vector<NodesResult>& results, bool markdown) {
  std::vector<std::vector<std::string>> rows = {{"nodes", "requests go", "written", "own %", "store %",
                                                 "both %", "infinite %", "written/request", "read/request",
                                                 "unread %"}};
  for (const NodesResult& r : results) {
    const auto requests = static_cast<double>(std::max<uint64_t>(r.requests, 1));
    const auto share = [&](uint64_t part) { return absl::StrFormat("%.1f", Percent(part, r.tokens)); };
    rows.push_back({absl::StrCat(r.nodes), r.route == Route::kTurns ? "in turns" : "by prefix",
                    r.uses == 1 ? "seal" : absl::StrCat("reuse:", r.uses), share(r.own_tokens),
                    share(r.store_tokens), share(r.own_tokens + r.store_tokens), share(r.infinite_tokens),
                    absl::StrFormat("%.2f", static_cast<double>(r.written) / requests),
                    absl::StrFormat("%.2f", static_cast<double>(r.read) / requests),
                    absl::StrFormat("%.0f", Percent(r.never_read, r.written))});
  }
  std::string text = absl::StrCat(workload.name, ": ", workload.Describe(), "\n\n");
  for (size_t i = 0; i < rows.size(); ++i) {
    if (markdown) {
      absl::StrAppend(&text, "| ", absl::StrJoin(rows[i], " | "), " |\n");
      if (i == 0) {
        for (size_t column = 0; column < rows[i].size(); ++column) text += "| --- ";
        text += "|\n";
      }
      continue;
    }
    for (size_t column = 0; column < rows[i].size(); ++column) {
      absl::StrAppendFormat(&text, "%*s  ", static_cast<int>(rows[0][column].size()), rows[i][column]);
    }
    text += "\n";
  }
  return text;
}

}  // namespace kvpool::sim
