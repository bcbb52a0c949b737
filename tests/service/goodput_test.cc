// Two models with bursts have more of one pool than of two halves of it.
#include "tests/service/goodput.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "client/replay/conversation.h"
#include "server/base/log.h"

namespace kvpool::goodput {
namespace {

TEST(Goodput, NoModelLosesByOnePoolAndBothTogetherGain) {
  if (KVPOOL_SANITIZED) GTEST_SKIP() << "half a million verbs on one thread: minutes under a sanitizer";
  SetLog({.level = LogLevel::kWarning});
  const Arrivals requests = replay::GenerateConversation({.seed = 1});
  const std::vector<Arrivals> models = SplitInBursts(requests, {.seed = 1, .burst_ms = 900 * 1000});
  const ServeOptions options = {.slabs = 12000 / kSlabBlocks, .weight = 1};
  const std::vector<Outcome> halves = ServeByHalves(models, options), elastic = Serve(models, options);
  for (size_t model = 0; model < models.size(); ++model) {
    SCOPED_TRACE(model);
    EXPECT_EQ(elastic[model].requests, models[model].size());
    EXPECT_EQ(elastic[model].tokens, halves[model].tokens);
    EXPECT_EQ(elastic[model].waited_for_memory_ms, 0);
    EXPECT_GE(elastic[model].saved_percent(), halves[model].saved_percent());
    EXPECT_GE(elastic[model].in_time, halves[model].in_time);
  }
  EXPECT_GT(Sum(elastic).slabs_given, 0);
  EXPECT_GT(Sum(elastic).saved_percent(), Sum(halves).saved_percent() + 0.4);
  EXPECT_GE(Sum(elastic).in_time, Sum(halves).in_time);
  SetLog({});
}

TEST(Goodput, AConversationIsOfOneModelAndBurstsTakeTurns) {
  const Arrivals requests = replay::GenerateConversation({.seed = 4, .requests = 2000});
  const std::vector<Arrivals> models = SplitInBursts(requests, {.seed = 4});
  ASSERT_EQ(models.size(), 2);
  EXPECT_EQ(models[0].size() + models[1].size(), requests.size());
  std::set<uint64_t> of_first;
  for (const replay::Request& request : models[0]) {
    if (request.hash_ids.size() > 1) of_first.insert(request.hash_ids[1]);
  }
  for (const replay::Request& request : models[1]) {
    if (request.hash_ids.size() < 2) continue;
    EXPECT_EQ(of_first.count(request.hash_ids[1]), 0);
  }
  EXPECT_GT(models[0].size(), requests.size() / 4);
  EXPECT_GT(models[1].size(), requests.size() / 4);
}

}  // namespace
}  // namespace kvpool::goodput
