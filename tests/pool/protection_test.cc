// Pins and retention: what they hold, what they cost, and how they end.
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/pool/block_pool.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

using V = Verdict;
using Verdicts = std::vector<Verdict>;

TEST(Pin, HoldsTheBlockAndTheChainInFrontOfIt) {
  TestPool t(12);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"x", "y", "z"});
  EXPECT_EQ(t.Pin({c[1]}, 2000), Verdicts({V::kDone}));
  EXPECT_EQ(t.pool.pinned(), 2u);
  EXPECT_TRUE(t.pool.View(c[0].id, t.now)->pinned);
  EXPECT_FALSE(t.pool.View(c[2].id, t.now)->pinned);
  EXPECT_EQ(t.Reclaim(3), Keys({"z"}));
  EXPECT_EQ(t.pool.Unpin({c[0]}), 0u) << "y keeps it";
  t.pool.Expire(1999);
  EXPECT_EQ(t.pool.pinned(), 2u);
  t.pool.Expire(2000);
  EXPECT_EQ(t.pool.pinned(), 0u);
  EXPECT_EQ(t.Reclaim(3), Keys({"y", "x"}));
}

TEST(Pin, IsExtendedNeverShortened) {
  TestPool t(12);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"x", "y"});
  t.Pin({c[0]}, 3000);
  t.Pin({c[1]}, 2000);
  t.Pin({c[0]}, 1500);
  t.pool.Expire(2500);
  EXPECT_TRUE(t.pool.View(c[0].id, t.now)->pinned);
  EXPECT_FALSE(t.pool.View(c[1].id, t.now)->pinned);
  t.Pin({c[1]}, 4000);
  t.pool.Expire(3000);
  EXPECT_TRUE(t.pool.View(c[0].id, t.now)->pinned) << "as long as its child";
  EXPECT_EQ(t.pool.Unpin(c), 2u);
  EXPECT_EQ(t.count(BlockState::kCached), 2u);
}

TEST(Pin, HasABudget) {
  TestPool t(8, {.pin_budget = 0.25});
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"x", "y", "z"});
  EXPECT_EQ(t.pool.pin_budget(), 2u);
  EXPECT_EQ(t.Pin({c[2]}, 2000), Verdicts({V::kOverPinBudget})) << "three with its chain";
  EXPECT_EQ(t.pool.pinned(), 0u);
  EXPECT_EQ(t.Pin({c[0], c[1], c[2], c[1]}, 2000),
            Verdicts({V::kDone, V::kDone, V::kOverPinBudget, V::kDone}));
  EXPECT_EQ(t.Retain({c[2], c[1], c[2]}, {.priority = 51, .until = 2000}),
            Verdicts({V::kOverPinBudget, V::kDone, V::kOverPinBudget}));
  EXPECT_EQ(t.Retain({c[2]}, {.priority = 49, .until = 2000}), Verdicts({V::kDone})) << "cheaper is free";
}

TEST(Pin, OfCachedBlocksTakesWhatIsUnpromised) {
  TestPool t(8, {.pin_budget = 1});
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"x", "y", "z"});
  const Holder b = t.Session({.guaranteed = 6});
  EXPECT_EQ(t.Pin({c[2]}, 2000), Verdicts({V::kOverCredit}));
  EXPECT_EQ(t.Pin({c[1]}, 2000), Verdicts({V::kDone}));
  EXPECT_EQ(t.Lease(b, 6).size(), 6u);
  EXPECT_EQ(t.pool.Find(Key("y")), c[1]);
}

TEST(Retention, ClassesLeaveInOrder) {
  TestPool t(8);
  const Holder a = t.Session();
  const BlockRef w = t.Cache(a, {"w"})[0], x = t.Cache(a, {"x"})[0], y = t.Cache(a, {"y"})[0];
  t.Cache(a, {"z"});
  EXPECT_EQ(t.Retain({w}, {.priority = 100, .until = 5000}), Verdicts({V::kDone}));
  EXPECT_EQ(t.Retain({y}, {.priority = 0, .until = 5000}), Verdicts({V::kDone}));
  EXPECT_EQ(t.Retain({x}, {.priority = 60, .until = 5000}), Verdicts({V::kDone}));
  EXPECT_EQ(t.pool.pinned(), 2u);
  EXPECT_EQ(t.Reclaim(8), Keys({"y", "z", "x", "w"}));
  EXPECT_EQ(t.pool.pinned(), 0u) << "it goes with the block";
}

TEST(Retention, EndsInTheOrderOfUse) {
  TestPool t(8);
  const Holder a = t.Session();
  t.Cache(a, {"x"});
  const BlockRef y = t.Cache(a, {"y"})[0];
  t.Retain({y}, {.priority = 60, .until = 2000});
  t.Cache(a, {"z"});
  EXPECT_EQ(t.pool.View(y.id, t.now)->priority, 60);
  t.pool.Expire(2000);
  EXPECT_EQ(t.pool.View(y.id, t.now)->priority, kDefaultPriority);
  EXPECT_EQ(t.Reclaim(3), Keys({"x", "y", "z"}));
}

TEST(Retention, OfASealedBlockWorksOnceItIsCached) {
  TestPool t(8);
  const Holder a = t.Session();
  const std::vector<BlockRef> x = t.Chain(a, {"x"});
  t.Retain(x, {.priority = 10, .until = 5000});
  t.Cache(a, {"y"});
  t.Release(a, x);
  EXPECT_EQ(t.Reclaim(2), Keys({"x", "y"}));
}

TEST(Retention, DearLeafKeepsItsChain) {
  TestPool t(12);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"a", "b", "c"});
  t.Retain({c[2]}, {.priority = 90, .until = 5000});
  t.Cache(a, {"d", "e"});
  EXPECT_EQ(t.Reclaim(2), Keys({"e", "d"})) << "a and b are older, but in front of c";
  EXPECT_EQ(t.Reclaim(3), Keys({"c", "b", "a"}));
}

TEST(Retention, ComesHalfTheWayToTheDefaultEachHalfLife) {
  TestPool t(20);
  const Holder a = t.Session();
  const BlockRef high = t.Cache(a, {"high"})[0], low = t.Cache(a, {"low"})[0];
  t.Retain({high}, {.priority = 100, .until = 9000, .half_life_ms = 100});
  t.Retain({low}, {.priority = 0, .until = 1250, .half_life_ms = 100});
  const auto priorities = [&](TimeMs now) {
    t.pool.Expire(now);
    return std::pair(t.pool.View(high.id, now)->priority, t.pool.View(low.id, now)->priority);
  };
  EXPECT_EQ(priorities(1099), std::pair(uint8_t{100}, uint8_t{0}));
  EXPECT_EQ(priorities(1100), std::pair(uint8_t{75}, uint8_t{25}));
  EXPECT_EQ(priorities(1249), std::pair(uint8_t{62}, uint8_t{38}));
  EXPECT_EQ(priorities(1250), std::pair(uint8_t{62}, uint8_t{50})) << "its time is over";
  EXPECT_EQ(t.pool.pinned(), 1u);
  EXPECT_EQ(priorities(1500).first, 51) << "56 and 53 on the way";
  EXPECT_EQ(priorities(1600).first, 50);
  EXPECT_EQ(t.pool.pinned(), 0u) << "the default needs no budget";
  EXPECT_EQ(t.Reclaim(2), Keys({"high", "low"})) << "by their use again";
}

// A request has four beams that share a prompt; each beam has a tail of its own, and each pair of beams
// shares a stretch.
class Beams : public ::testing::Test {
 protected:
  Beams() {
    t.Cache(a, {"old"});
    for (const char* chain : {"paq", "par", "pbs", "pbt"}) {
      const std::vector<std::string> names = {std::string(1, chain[0]), std::string(1, chain[1]),
                                              std::string(1, chain[2])};
      MatchOutcome shared = t.Match(a, names);
      std::vector<BlockRef>& blocks = shared.blocks[0];
      const size_t hits = blocks.size();
      const std::vector<BlockKey> keys = Keys(names);
      const std::vector<BlockRef> own = t.Lease(a, static_cast<uint32_t>(names.size() - hits));
      t.Seal(a, own, {keys.begin() + static_cast<std::ptrdiff_t>(hits), keys.end()},
             hits == 0 ? nullptr : &keys[hits - 1]);
      blocks.insert(blocks.end(), own.begin(), own.end());
      beams.push_back(blocks);
    }
    t.Cache(a, {"new"});
  }
  TestPool t{20};
  const Holder a = t.Session();
  std::vector<std::vector<BlockRef>> beams;
};

TEST_F(Beams, PrivateBlocksOfPrunedOnesLeaveFirst) {
  t.Release(a, beams[0], {.reuse = Reuse::kNever});
  t.Release(a, beams[2], {.reuse = Reuse::kNever});
  EXPECT_EQ(t.Reclaim(2), Keys({"q", "s"})) << "and not what was used longer ago";
  EXPECT_EQ(t.Reclaim(10), Keys({"old", "new"})) << "what the surviving beams hold can't leave";
}

TEST_F(Beams, WhatTwoPrunedOnesShareGoesWithTheLater) {
  t.Release(a, beams[2], {.reuse = Reuse::kNever});
  t.Release(a, beams[3], {.reuse = Reuse::kNever});
  EXPECT_EQ(t.Reclaim(3), Keys({"s", "t", "b"}));
  EXPECT_EQ(t.state(beams[0][0]), BlockState::kSealed);
}

TEST_F(Beams, WhatIsFoundAgainIsAsGoodAsAny) {
  t.Release(a, beams[0], {.reuse = Reuse::kNever});
  EXPECT_EQ(t.pool.View(beams[0][2].id, t.now)->priority, 0);
  t.Release(a, t.Match(a, {"p", "a", "q"}).blocks[0]);
  EXPECT_EQ(t.pool.View(beams[0][2].id, t.now)->priority, kDefaultPriority);
  EXPECT_EQ(t.Reclaim(3), Keys({"old", "new", "q"}));
}

TEST_F(Beams, APriorityThatWasSetGoesBefore) {
  t.Retain({beams[0][2]}, {.priority = 60, .until = 5000});
  t.Release(a, beams[0], {.reuse = Reuse::kNever});
  EXPECT_EQ(t.Reclaim(2), Keys({"old", "new"}));
  t.pool.Expire(5000);
  EXPECT_EQ(t.pool.View(beams[0][2].id, t.now)->priority, 0) << "it is pruned still";
}

TEST(NeverReused, ATouchSparesIt) {
  TestPool t(8);
  const Holder a = t.Session();
  const std::vector<BlockRef> x = t.Chain(a, {"x"});
  t.Cache(a, {"y"});
  t.Release(a, x, {.reuse = Reuse::kNever});
  EXPECT_EQ(t.pool.Touch(t.now, x), 1u);
  EXPECT_EQ(t.Reclaim(2), Keys({"y", "x"}));
}

}  // namespace
}  // namespace kvpool
