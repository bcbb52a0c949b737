// Decisions outside the lock apply to blocks that are as they were shown, and leave the choice to LRU when
// they are late.
#include "server/replacement/policies/async_policy.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

class DecisionTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kBlocks = 32;

  // Caches blocks without chains, all on offer, in the order in which they were used.
  static std::vector<BlockRef> Fill(TestPool* t) {
    const Holder session = t->Session();
    std::vector<BlockRef> blocks;
    for (uint32_t i = 0; i < kBlocks; ++i) {
      ++t->now;
      blocks.push_back(t->Cache(session, {"b" + std::to_string(i)})[0]);
    }
    return blocks;
  }
  static std::vector<BlockId> Victims(TestPool* t, uint32_t count) {
    std::vector<Eviction> log;
    t->pool.Reclaim(t->now, count, EvictReason::kBackground, &log);
    std::vector<BlockId> ids;
    for (const Eviction& eviction : log) ids.push_back(eviction.block);
    return ids;
  }
  bool Prepare(Decision* decision) { return decision->Prepare(t_.pool.async_policy(), &breaker_, t_.now); }
  // Ranks in a thread that sleeps between its first look at the clock and all later ones.
  void Rank(uint64_t slept_us) {
    int looks = 0;
    decision_.Rank([&] { return looks++ == 0 ? uint64_t{0} : slept_us; });
  }
  void Apply() { decision_.Apply(t_.pool.async_policy(), &breaker_, t_.now); }
  bool Decide(uint64_t slept_us) {
    if (!Prepare(&decision_)) return false;
    Rank(slept_us);
    Apply();
    return true;
  }
  uint32_t decided() { return t_.pool.async_policy()->decided(); }

  TestPool t_{kBlocks, {}, "cold_rl"};
  const std::vector<BlockRef> blocks_ = Fill(&t_);
  Breaker breaker_;
  Decision decision_;
};

TEST_F(DecisionTest, TooLateIsLrusVictimAndIsCounted) {
  TestPool lru(kBlocks);
  Fill(&lru);
  ASSERT_TRUE(Decide(600));
  EXPECT_EQ(breaker_.counts().late, 1u);
  EXPECT_EQ(breaker_.counts().in_time, 0u);
  EXPECT_EQ(decided(), 0u);
  EXPECT_EQ(Victims(&t_, 1), Victims(&lru, 1));
  EXPECT_EQ(Victims(&t_, 5), Victims(&lru, 5));
  EXPECT_EQ(t_.pool.counters().undecided_victims, 6u);
}

TEST_F(DecisionTest, WithinItsBudgetItDecides) {
  ASSERT_TRUE(Decide(Decision::kBudgetUs));
  EXPECT_EQ(breaker_.counts().in_time, 1u);
  EXPECT_EQ(breaker_.counts().late, 0u);
  ASSERT_EQ(decided(), decision_.victims());
  EXPECT_EQ(decision_.victims(), kBlocks / 4);
  EXPECT_FALSE(Decide(0)) << "the next victims are decided on";
  // A lease that can't wait takes the blocks decided on too.
  t_.Lease(t_.Session(), 3);
  EXPECT_EQ(decided(), kBlocks / 4 - 3);
  EXPECT_EQ(t_.pool.counters().decided_victims, 3u);
  Victims(&t_, kBlocks / 4 - 3);
  EXPECT_EQ(decided(), 0u);
  EXPECT_EQ(t_.pool.counters().decided_victims, kBlocks / 4);
  Victims(&t_, 1);
  EXPECT_EQ(t_.pool.counters().undecided_victims, 1u);
}

TEST_F(DecisionTest, BlocksUsedSinceTheyWereShownStay) {
  ASSERT_TRUE(Prepare(&decision_));
  Rank(0);
  // Blocks change in four ways: used again; held; with a priority of their own; evicted, with another content
  // in their place.
  const Holder session = t_.Session();
  for (uint32_t i = 0; i < 8; ++i)
    t_.Release(session, t_.Match(session, {"b" + std::to_string(i)}).blocks[0]);
  for (uint32_t i = 8; i < 16; ++i) t_.Match(session, {"b" + std::to_string(i)});
  for (uint32_t i = 16; i < 20; ++i) t_.Retain({blocks_[i]}, {.priority = 90, .until = t_.now + 1000});
  t_.pool.Reclaim(t_.now, absl::MakeConstSpan(blocks_).subspan(20, 8), EvictReason::kOperator, nullptr);
  for (uint32_t i = 20; i < 28; ++i) t_.Cache(session, {"new" + std::to_string(i)});
  Apply();
  // Four are unchanged. Those of them that were decided on leave first, all other victims are LRU's.
  uint32_t left = 0;
  while (decided() > 0) {
    for (const BlockId victim : Victims(&t_, 1)) {
      if (t_.pool.counters().undecided_victims > 0) break;
      ++left;
      EXPECT_TRUE(std::any_of(blocks_.begin() + 28, blocks_.end(), [&](BlockRef b) {
        return b.id == victim;
      })) << Index(victim);
    }
  }
  EXPECT_EQ(t_.pool.counters().decided_victims, left);
  EXPECT_LE(left, 4u);
}

TEST_F(DecisionTest, CheapOnesLeaveBeforeWhatWasDecided) {
  t_.Retain({blocks_[30]}, {.priority = 10, .until = t_.now + 1000});
  ASSERT_TRUE(Decide(0));
  EXPECT_EQ(Victims(&t_, 1), std::vector<BlockId>{blocks_[30].id});
  EXPECT_EQ(decided(), decision_.victims());
}

TEST_F(DecisionTest, TheBreakerOpensAndTriesAgain) {
  using State = Breaker::State;
  for (uint32_t i = 0; i < Breaker::kTripAfter; ++i) {
    EXPECT_EQ(breaker_.state(t_.now), State::kClosed);
    ASSERT_TRUE(Decide(600));
  }
  EXPECT_EQ(breaker_.state(t_.now), State::kOpen);
  EXPECT_FALSE(Decide(0));
  EXPECT_EQ(breaker_.counts().not_asked, 1u);
  EXPECT_EQ(breaker_.counts().late, Breaker::kTripAfter);
  t_.now += Breaker::kFirstCoolDownMs;
  EXPECT_EQ(breaker_.state(t_.now), State::kHalfOpen);
  ASSERT_TRUE(Decide(600)) << "one is tried";
  EXPECT_EQ(breaker_.state(t_.now + Breaker::kFirstCoolDownMs), State::kOpen) << "twice as long";
  t_.now += 2 * Breaker::kFirstCoolDownMs;
  ASSERT_TRUE(Prepare(&decision_));
  Decision other;
  EXPECT_FALSE(Prepare(&other)) << "one thread tries";
  Rank(0);
  Apply();
  EXPECT_EQ(breaker_.state(t_.now), State::kClosed);
  EXPECT_EQ(breaker_.epoch(), 1u);
}

TEST(BreakerTest, LateOnesThatAreFewDoNotOpenIt) {
  Breaker breaker;
  for (uint32_t i = 0; i < 10 * Breaker::kTripAfter; ++i) {
    ASSERT_TRUE(breaker.Admit(i));
    breaker.Report(breaker.epoch(), i, i % Breaker::kTripAfter == 0);
  }
  EXPECT_EQ(breaker.state(0), Breaker::State::kClosed);
}

void Open(Breaker* breaker) {
  for (uint32_t i = 0; i < Breaker::kTripAfter; ++i) {
    ASSERT_TRUE(breaker->Admit(0));
    breaker->Report(breaker->epoch(), 0, false);
  }
}

TEST(BreakerTest, TheCoolDownIsBounded) {
  Breaker breaker;
  Open(&breaker);
  for (uint64_t i = 1; i <= 20; ++i) {
    ASSERT_TRUE(breaker.Admit(i * Breaker::kMostCoolDownMs));
    breaker.Report(breaker.epoch(), i * Breaker::kMostCoolDownMs, false);
  }
}

TEST(BreakerTest, WhatWasUnderWayWhenItOpenedChangesNothing) {
  using State = Breaker::State;
  Breaker breaker;
  const uint64_t before = breaker.epoch();
  ASSERT_TRUE(breaker.Admit(0) && breaker.Admit(0));
  Open(&breaker);
  breaker.Report(before, 1, true);
  EXPECT_EQ(breaker.state(1), State::kOpen);
  breaker.Report(before, 2, false);
  EXPECT_EQ(breaker.state(Breaker::kFirstCoolDownMs), State::kHalfOpen) << "no longer than it was";
  ASSERT_TRUE(breaker.Admit(Breaker::kFirstCoolDownMs));
  EXPECT_FALSE(breaker.Admit(Breaker::kFirstCoolDownMs)) << "one is being tried";
  breaker.Report(breaker.epoch(), Breaker::kFirstCoolDownMs, true);
  EXPECT_EQ(breaker.state(Breaker::kFirstCoolDownMs), State::kClosed);
}

TEST(DecisionsOfOthers, LruIsNotAsked) {
  TestPool t(4);
  Breaker breaker;
  Decision decision;
  t.Cache(t.Session(), {"a"});
  EXPECT_EQ(t.pool.async_policy(), nullptr);
  EXPECT_FALSE(decision.Prepare(t.pool.async_policy(), &breaker, t.now));
  EXPECT_EQ(breaker.counts().not_asked, 0u);
}

}  // namespace
}  // namespace kvpool
