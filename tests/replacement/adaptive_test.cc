// adaptive: what its shadows see, when it switches, and that it costs nothing where it need not.
#include "server/replacement/policies/adaptive.h"

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/formats/trace.h"
#include "server/replacement/parts/shadow_cache.h"
#include "server/sim/read_workload.h"
#include "server/sim/replay.h"

namespace kvpool {
namespace {

TEST(ShadowCache, IsTheCacheThatThePolicyWouldHave) {
  ShadowCache shadow(*MakeReplacementPolicy("lru", 4), 3);
  const auto access = [&](uint64_t hash, uint64_t parent = 0) {
    const bool found = shadow.Access(hash, parent, 0);
    shadow.Used(hash, 0);
    return found;
  };
  EXPECT_FALSE(access(1));
  EXPECT_FALSE(access(2));
  EXPECT_FALSE(access(3));
  EXPECT_TRUE(access(1));
  EXPECT_FALSE(access(4)) << "2 left for it";
  EXPECT_FALSE(access(2)) << "and 3 for 2";
  EXPECT_TRUE(access(1));
  shadow.set_capacity(2);
  EXPECT_FALSE(access(5));
  EXPECT_TRUE(access(1));
  EXPECT_FALSE(access(2));
}

TEST(ShadowCache, LeavesGoBeforeTheirParentsAndWhatIsInUseStays) {
  ShadowCache shadow(*MakeReplacementPolicy("lru", 4), 3);
  for (const uint64_t hash : {1, 2, 3}) {
    shadow.Access(hash, hash - 1, 0);
    if (hash != 3) shadow.Used(hash, 0);
  }
  EXPECT_FALSE(shadow.Access(4, 0, 0)) << "3 is in use, 2 and 1 are in front of it";
  EXPECT_FALSE(shadow.Access(4, 0, 0)) << "there was no room";
  shadow.Used(3, 0);
  EXPECT_FALSE(shadow.Access(4, 0, 0));
  EXPECT_TRUE(shadow.Access(2, 1, 0)) << "3 left";
}

// Replays with a policy that can be asked afterwards whom it follows: it lives on in the answer.
struct Outcome {
  double ratio;
  std::string following;
  uint32_t switches;
};

class Kept final : public ReplacementPolicy {
 public:
  explicit Kept(AdaptivePolicy* policy) : policy_(*policy) {}
  std::string_view name() const override { return policy_.name(); }
  void OnInsert(BlockId block, const Content& content) override { policy_.OnInsert(block, content); }
  void OnHit(BlockId block, uint64_t now_ms) override { policy_.OnHit(block, now_ms); }
  void OnUsed(BlockId block, uint64_t now_ms) override { policy_.OnUsed(block, now_ms); }
  void OnOffer(BlockId block) override { policy_.OnOffer(block); }
  void OnWithdraw(BlockId block) override { policy_.OnWithdraw(block); }
  void OnEvict(BlockId block) override { policy_.OnEvict(block); }
  BlockId Victim(uint64_t now_ms) override { return policy_.Victim(now_ms); }
  void Prefetch(BlockId block, uint64_t hash) const override { policy_.Prefetch(block, hash); }
  uint32_t offered() const override { return policy_.offered(); }
  double bytes_per_block() const override { return policy_.bytes_per_block(); }

 private:
  AdaptivePolicy& policy_;
};

Outcome Replay(const sim::Workload& workload, uint32_t capacity, uint64_t seed = 1) {
  AdaptivePolicy policy(
      {.max_blocks = capacity + 1, .seed = seed, .tokens_per_block = workload.tokens_per_block});
  const sim::Result result = sim::ReplayWith(workload, {.policy = "adaptive", .capacity_blocks = capacity},
                                             std::make_unique<Kept>(&policy));
  return {result.block_ratio(), std::string(policy.following()), policy.switches()};
}

double Ratio(const sim::Workload& workload, const std::string& policy, uint32_t capacity) {
  return sim::Replay(workload, {.policy = policy, .capacity_blocks = capacity})->block_ratio();
}

// Single blocks: by popularity for a while, then as many that are asked for once, and so on.
sim::Workload PopularAndOnce(uint32_t requests) {
  std::mt19937_64 random(3);
  sim::Workload w{.name = "popular and once"};
  uint32_t once = 20000;
  for (uint32_t i = 0; i < requests; ++i) {
    // Zipf's law by inversion of a density 1/x over 1 to 20,000.
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    const auto popular = static_cast<uint32_t>(std::pow(20000.0, u)) - 1;
    w.requests.push_back({.now_ms = i, .first = i, .blocks = 1, .tokens = 1});
    w.contents.push_back(i % 6000 < 3000 ? popular : once++);
  }
  w.distinct = once;
  return w;
}

TEST(Adaptive, FollowsTheBetterPolicy) {
  const sim::Workload w = PopularAndOnce(150000);
  const Outcome run = Replay(w, 1000);
  const double first = Ratio(w, "learned", 1000), lru = Ratio(w, "lru", 1000);
  EXPECT_GE(run.ratio, first - 0.002);
  EXPECT_GT(run.ratio, lru + 0.02);
  EXPECT_LE(run.switches, 10u) << "of some 130 judgements";
}

TEST(Adaptive, AnswersTheSameForTheSameSeed) {
  const sim::Workload w = PopularAndOnce(60000);
  const Outcome one = Replay(w, 500, 7), two = Replay(w, 500, 7);
  EXPECT_EQ(one.ratio, two.ratio);
  EXPECT_EQ(one.switches, two.switches);
}

TEST(Adaptive, IsNeverFarBelowLru) {
  for (const char* kind : {"agents", "rag", "batch", "keys", "completion", "shift", "chat"}) {
    const absl::StatusOr<sim::Workload> w =
        sim::ReadWorkload(std::string("synthetic:") + kind, {.max_requests = 3000});
    ASSERT_TRUE(w.ok()) << w.status();
    EXPECT_GE(Replay(*w, 2000).ratio, Ratio(*w, "lru", 2000) - 0.005) << kind;
  }
}

TEST(Adaptive, IsNeverFarBelowLruOnTheConversationTrace) {
  if (KVPOOL_TWIN_REQUESTS > 0) GTEST_SKIP() << "figures of the whole trace: minutes under a sanitizer";
  const absl::StatusOr<std::string> path =
      replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces");
  if (!path.ok()) GTEST_SKIP() << path.status().message();
  const absl::StatusOr<sim::Workload> w = sim::ReadWorkload(*path, {});
  ASSERT_TRUE(w.ok()) << w.status();
  for (const uint32_t capacity : {1000, 5000, 10000, 30000, 50000}) {
    EXPECT_GE(Replay(*w, capacity).ratio, Ratio(*w, "lru", capacity) - 0.005) << capacity;
  }
}

}  // namespace
}  // namespace kvpool
