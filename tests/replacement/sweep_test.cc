// Replays on several threads: the only ones that the policies ever meet.
#include "server/sim/sweep.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/formats/trace.h"
#include "server/sim/read_workload.h"
#include "server/sim/replay.h"

namespace kvpool::sim {
namespace {

// Prompts that begin alike and end differently; each block is a token.
Workload Prompts() {
  std::mt19937 random(7);
  Workload workload{.name = "prompts", .distinct = 4 * 20};
  for (uint32_t i = 0; i < 400; ++i) {
    const auto prefix = static_cast<uint32_t>(random() % 20),
               blocks = 4 + static_cast<uint32_t>(random() % 5);
    workload.requests.push_back(
        {.now_ms = i, .first = workload.contents.size(), .blocks = blocks, .tokens = blocks});
    for (uint32_t block = 0; block < blocks; ++block)
      workload.contents.push_back(block < 4 ? 4 * prefix + block : workload.distinct++);
  }
  return workload;
}

TEST(Sweep, KnownRatiosOfTheConversationTrace) {
  if (KVPOOL_TWIN_REQUESTS > 0) GTEST_SKIP() << "figures of the whole trace: minutes under a sanitizer";
  const absl::StatusOr<std::string> path =
      replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces");
  if (!path.ok()) GTEST_SKIP() << path.status().message();
  const absl::StatusOr<Workload> workload = ReadWorkload(*path, {});
  ASSERT_TRUE(workload.ok()) << workload.status();
  const absl::StatusOr<std::vector<Result>> results =
      Sweep(*workload, {.policies = {"lru", "opt", "infinite"},
                        .capacities = {1000, 5000, 10000, 10239, 30000, 50000},
                        .threads = 2});
  ASSERT_TRUE(results.ok()) << results.status();
  const double known[] = {0.0445, 0.1118, 0.2116, 0.2132, 0.3257, 0.3546};
  for (int i = 0; i < 6; ++i) EXPECT_NEAR((*results)[i].block_ratio(), known[i], 1e-4);
  const double least[] = {0.1906, 0.3412, 0.3664, 0.3664, 0.3664, 0.3664};
  for (int i = 0; i < 6; ++i) EXPECT_GE((*results)[6 + i].block_ratio() + 5e-5, least[i]);
  EXPECT_NEAR((*results)[12].block_ratio(), 0.3664, 1e-4);

  // No policy is above the oracle, and none answers differently on two threads.
  const std::vector<std::string> all = *ParsePolicies("all");
  const absl::StatusOr<std::vector<Result>> one = Sweep(*workload, {.policies = all, .capacities = {3000}});
  const absl::StatusOr<std::vector<Result>> two =
      Sweep(*workload, {.policies = all, .capacities = {3000}, .threads = 2});
  ASSERT_TRUE(one.ok() && two.ok());
  const double opt = ReplayOptimal(*workload, 3000, {}).block_ratio();
  for (size_t i = 0; i < one->size(); ++i) {
    EXPECT_EQ((*one)[i].hit_blocks, (*two)[i].hit_blocks) << (*one)[i].policy;
    if ((*one)[i].policy != "infinite") {
      EXPECT_LE((*one)[i].block_ratio(), opt) << (*one)[i].policy;
    }
  }
}

TEST(Sweep, ThreadsChangeNothing) {
  const Workload workload = Prompts();
  const SweepOptions one = {.policies = *ParsePolicies("all"), .capacities = {20, 60}};
  SweepOptions several = one;
  several.threads = 3;
  const absl::StatusOr<std::vector<Result>> expected = Sweep(workload, one), found = Sweep(workload, several);
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->size(), expected->size());
  for (size_t i = 0; i < found->size(); ++i) {
    EXPECT_EQ((*found)[i].policy, (*expected)[i].policy);
    EXPECT_EQ((*found)[i].hit_blocks, (*expected)[i].hit_blocks) << (*found)[i].policy;
    EXPECT_GT((*found)[i].hit_blocks, 0u) << (*found)[i].policy;
  }
}

}  // namespace
}  // namespace kvpool::sim
