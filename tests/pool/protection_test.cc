// Pins and retention: what they hold, what they cost, and how they end.
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
  EXPECT_EQ(t.Retain({c[2], c[1], c[2]}, 51, 2000),
            Verdicts({V::kOverPinBudget, V::kDone, V::kOverPinBudget}));
  EXPECT_EQ(t.Retain({c[2]}, 49, 2000), Verdicts({V::kDone})) << "cheaper is free";
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
  EXPECT_EQ(t.Retain({w}, 100, 5000), Verdicts({V::kDone}));
  EXPECT_EQ(t.Retain({y}, 0, 5000), Verdicts({V::kDone}));
  EXPECT_EQ(t.Retain({x}, 60, 5000), Verdicts({V::kDone}));
  EXPECT_EQ(t.pool.pinned(), 2u);
  EXPECT_EQ(t.Reclaim(8), Keys({"y", "z", "x", "w"}));
  EXPECT_EQ(t.pool.pinned(), 0u) << "it goes with the block";
}

TEST(Retention, EndsInTheOrderOfUse) {
  TestPool t(8);
  const Holder a = t.Session();
  t.Cache(a, {"x"});
  const BlockRef y = t.Cache(a, {"y"})[0];
  t.Retain({y}, 60, 2000);
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
  t.Retain(x, 10, 5000);
  t.Cache(a, {"y"});
  t.Release(a, x);
  EXPECT_EQ(t.Reclaim(2), Keys({"x", "y"}));
}

TEST(Retention, DearLeafKeepsItsChain) {
  TestPool t(12);
  const Holder a = t.Session();
  const std::vector<BlockRef> c = t.Cache(a, {"a", "b", "c"});
  t.Retain({c[2]}, 90, 5000);
  t.Cache(a, {"d", "e"});
  EXPECT_EQ(t.Reclaim(2), Keys({"e", "d"})) << "a and b are older, but in front of c";
  EXPECT_EQ(t.Reclaim(3), Keys({"c", "b", "a"}));
}

}  // namespace
}  // namespace kvpool
