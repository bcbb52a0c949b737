// How many blocks each policy finds, against models in Python: hits.json (make_hits.py).
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/replacement/policy.h"
#include "server/sim/replay.h"
#include "server/sim/workload.h"

namespace kvpool {
namespace {

using Json = nlohmann::json;

sim::Workload WorkloadOf(const Json& trace) {
  sim::Workload w{.name = trace["name"], .tokens_per_block = trace["tokens_per_block"]};
  for (const Json& chain : trace["requests"]) {
    const auto blocks = static_cast<uint32_t>(chain.size());
    w.requests.push_back({.now_ms = w.requests.size(),
                          .first = w.contents.size(),
                          .blocks = blocks,
                          .tokens = blocks * w.tokens_per_block});
    w.contents.insert(w.contents.end(), chain.begin(), chain.end());
  }
  w.distinct = *std::max_element(w.contents.begin(), w.contents.end()) + 1;
  return w;
}

TEST(Hits, AreThoseOfTheModels) {
  std::ifstream file(KVPOOL_SOURCE_DIR "/tests/replacement/hits.json");
  ASSERT_TRUE(file);
  // These learn, draw lots or sketch: their naive twins and tests of their own hold them.
  std::set<std::string> covered = {"cold_rl",          "hit_density",    "learned",   "random",
                                   "succinct_discard", "succinct_phase", "w_tinylfu", "workload_aware"};
  for (const Json& trace : Json::parse(file)) {
    const sim::Workload workload = WorkloadOf(trace);
    for (const Json& expected : trace["results"]) {
      const std::string policy = expected["policy"];
      covered.insert(policy);
      const absl::StatusOr<sim::Result> result =
          sim::Replay(workload, {.policy = policy, .capacity_blocks = expected["capacity"]});
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->hit_blocks, expected["hits"]) << workload.name << ", " << expected;
      if (expected.contains("evictions")) {
        EXPECT_EQ(result->evictions, expected["evictions"]) << expected;
      }
    }
  }
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    EXPECT_TRUE(covered.contains(std::string(policy.name))) << "no model of " << policy.name;
  }
}

}  // namespace
}  // namespace kvpool
