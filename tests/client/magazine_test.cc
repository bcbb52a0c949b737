#include "client/session/magazine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

namespace kvpool {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

BlockRef Ref(uint32_t id, uint32_t generation = 1) { return {BlockId{id}, generation}; }

std::vector<BlockRef> Range(uint32_t from, uint32_t count) {
  std::vector<BlockRef> refs;
  for (uint32_t id = from; id < from + count; ++id) refs.push_back(Ref(id));
  return refs;
}

// A magazine of 1000 block ids that keeps 8, filled once.
class MagazineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(magazine_.Wanted(/*scarce=*/false), 8u);
    magazine_.Refill(Range(1, 8));
  }
  std::vector<BlockRef> Take(size_t count) {
    std::vector<BlockRef> refs(count);
    last_ = magazine_.Take(absl::MakeSpan(refs));
    return last_.ok ? refs : std::vector<BlockRef>();
  }
  std::vector<BlockRef> Put(const std::vector<BlockRef>& refs, bool fenced = false) {
    std::vector<BlockRef> rest;
    put_ = magazine_.Put(refs, fenced, &rest);
    return rest;
  }
  std::vector<BlockRef> Surplus() {
    std::vector<BlockRef> refs;
    magazine_.TakeSurplus(&refs);
    return refs;
  }

  Magazine magazine_{1000, 8};
  Magazine::Taken last_;
  Magazine::PutOutcome put_;
};

TEST_F(MagazineTest, LendsTheNewestFirstAndAllOrNone) {
  EXPECT_THAT(Take(2), ElementsAre(Ref(8), Ref(7)));
  EXPECT_THAT(Put({Ref(7)}), IsEmpty());
  EXPECT_THAT(Take(1), ElementsAre(Ref(7)));
  EXPECT_THAT(Take(7), IsEmpty());
  EXPECT_EQ(magazine_.stock(), 6u);
}

TEST_F(MagazineTest, AsksOnceBelowHalf) {
  Take(4);
  EXPECT_FALSE(last_.ask);
  Take(1);
  EXPECT_TRUE(last_.ask);
  Take(1);
  EXPECT_FALSE(last_.ask) << "asked already";
  EXPECT_EQ(magazine_.Wanted(false), 6u);
  EXPECT_EQ(magazine_.Wanted(false), 0u) << "on its way";
  magazine_.Refill(Range(100, 1));
  Take(1);
  EXPECT_TRUE(last_.ask) << "the refill came up short";
}

TEST_F(MagazineTest, ARefillAimsAtWhatATakeLacked) {
  EXPECT_THAT(Take(50), IsEmpty());
  EXPECT_TRUE(last_.ask);
  EXPECT_EQ(magazine_.Wanted(false), 42u);
}

TEST(MagazineStart, KeepsFewUntilTheyAreUsed) {
  Magazine magazine(1000, 64);
  std::vector<BlockRef> taken(1);
  uint32_t next = 1;
  for (const uint32_t aim : {16u, 32u, 64u, 64u}) {
    const uint32_t wanted = magazine.Wanted(false);
    ASSERT_EQ(magazine.stock() + wanted, aim);
    magazine.Refill(Range(next, wanted));
    next += wanted;
    while (!magazine.Take(absl::MakeSpan(taken)).ask) {
    }
  }
}

// Blocks that come in parts add up, though there are more of them than the magazine keeps otherwise.
TEST_F(MagazineTest, WhatATakeWaitsForIsNoSurplus) {
  Take(50);
  ASSERT_EQ(magazine_.Wanted(false), 42u);
  magazine_.Refill(Range(101, 30));
  EXPECT_THAT(Surplus(), IsEmpty());
  Take(50);
  ASSERT_EQ(magazine_.Wanted(false), 12u);
  magazine_.Refill(Range(201, 12));
  EXPECT_THAT(Take(50), ::testing::SizeIs(50));
}

TEST_F(MagazineTest, ATakeThatNeverComesAgainIsForgotten) {
  Take(50);
  ASSERT_EQ(magazine_.Wanted(false), 42u);
  magazine_.Refill(Range(101, 42));
  for (int i = 0; i < 255; ++i) Put(Take(1));
  EXPECT_THAT(Surplus(), IsEmpty());
  Put(Take(1));
  EXPECT_THAT(Surplus(), ::testing::SizeIs(42));
}

TEST_F(MagazineTest, KeepsFewUnderPressure) {
  Take(8);
  EXPECT_EQ(magazine_.Wanted(/*scarce=*/true), 1u);
}

TEST_F(MagazineTest, SharedAndFencedBlocksGoToTheDaemon) {
  const std::vector<BlockRef> taken = Take(3);
  magazine_.Share({taken[0]});
  EXPECT_THAT(Put({taken[0]}), ElementsAre(taken[0]));
  EXPECT_THAT(Put({taken[1]}, /*fenced=*/true), ElementsAre(taken[1]));
  EXPECT_THAT(Put({taken[2]}), IsEmpty());
  EXPECT_EQ(put_.refused, 0u);
}

// The daemon would take a stocked block back, for it is leased; the magazine would then lend what is free.
TEST_F(MagazineTest, RefusesWhatWasNotLent) {
  const std::vector<BlockRef> taken = Take(1);
  EXPECT_THAT(Put({taken[0], taken[0]}), IsEmpty());
  EXPECT_EQ(put_.refused, 1u);
  EXPECT_THAT(Put({Ref(3)}), IsEmpty());
  EXPECT_EQ(put_.refused, 1u);
  EXPECT_THAT(Put({Ref(3, /*generation=*/9), Ref(5000)}), IsEmpty());
  EXPECT_EQ(put_.refused, 2u);
  EXPECT_EQ(magazine_.stock(), 8u);
}

TEST_F(MagazineTest, SurplusGoesBackOldestFirst) {
  const std::vector<BlockRef> taken = Take(8);
  ASSERT_TRUE(last_.ask);
  ASSERT_EQ(magazine_.Wanted(false), 8u);
  magazine_.Refill(Range(101, 9));
  EXPECT_THAT(Surplus(), IsEmpty());
  Put(taken);
  EXPECT_TRUE(put_.surplus);
  EXPECT_EQ(Surplus(), Range(101, 9));
  EXPECT_EQ(magazine_.stock(), 8u);
}

TEST_F(MagazineTest, ARevocationIsNotRefilledUntilTheEngineAsks) {
  magazine_.Revoke(5);
  EXPECT_TRUE(magazine_.NeedsCare());
  EXPECT_EQ(Surplus(), Range(1, 5));
  EXPECT_EQ(magazine_.Wanted(false), 0u);
  EXPECT_FALSE(magazine_.NeedsCare());
  Take(1);
  EXPECT_TRUE(last_.ask);
  EXPECT_EQ(magazine_.Wanted(false), 6u);
}

// Two threads and a thousand blocks: no block is lent twice at once, and none is lost.
TEST(MagazineThreads, EveryBlockIsInOnePlace) {
  constexpr uint32_t kBlocks = 1000;
  Magazine magazine(kBlocks + 1, 64);
  std::atomic<bool> stop{false};
  std::vector<BlockRef> outside;  // The stream thread's: free in the daemon.
  for (const BlockRef ref : Range(1, kBlocks)) outside.push_back(ref);
  std::thread stream([&] {
    while (!stop.load()) {
      magazine.Revoke(3);
      magazine.TakeSurplus(&outside);
      const uint32_t wanted = magazine.Wanted(false);
      if (wanted == 0) continue;
      std::vector<BlockRef> refill;
      for (uint32_t i = 0; i < wanted && !outside.empty(); ++i) {
        refill.push_back({outside.back().id, outside.back().generation + 1});
        outside.pop_back();
      }
      magazine.Refill(refill);
    }
  });
  std::vector<BlockRef> held, rest;
  std::set<uint32_t> ids;
  for (int round = 0; round < 20000; ++round) {
    BlockRef block;
    if (held.size() < 100 && magazine.Take(absl::MakeSpan(&block, 1)).ok) {
      ASSERT_TRUE(ids.insert(Index(block.id)).second) << "block " << Index(block.id) << " was lent twice";
      held.push_back(block);
    } else if (!held.empty()) {
      ids.erase(Index(held.back().id));
      ASSERT_EQ(magazine.Put({held.back()}, false, &rest).refused, 0u);
      held.pop_back();
    }
  }
  stop.store(true);
  stream.join();
  EXPECT_THAT(rest, IsEmpty());
  EXPECT_EQ(held.size() + outside.size() + magazine.stock(), kBlocks);
}

}  // namespace
}  // namespace kvpool
