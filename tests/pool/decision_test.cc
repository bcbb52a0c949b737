// Decisions of a policy that thinks: made outside the lock, applied to what is still as it was shown, and LRU's when
// they come too late.
#include "server/pool/decision.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

// A thread that slept while it thought: the first look at the clock is before, all later ones behind it.
class SleepyStopwatch final : public Stopwatch {
 public:
  explicit SleepyStopwatch(uint64_t slept_us) : slept_us_(slept_us) {}
  uint64_t elapsed_us() const override { return looks_++ == 0 ? 0 : slept_us_; }

 private:
  const uint64_t slept_us_;
  mutable int looks_ = 0;
};

class DecisionTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kBlocks = 32;

  // Blocks of contents that have no chain, in the order in which they were used: cached, all on offer.
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
  bool Think(uint64_t slept_us) {
    if (!decision_.Prepare(&t_.pool, &record_, t_.now)) return false;
    decision_.Think(SleepyStopwatch(slept_us), kDecisionBudgetUs);
    decision_.Apply(&t_.pool, &record_, t_.now);
    return true;
  }

  TestPool t_{kBlocks, {}, "cold_rl"};
  const std::vector<BlockRef> blocks_ = Fill(&t_);
  DecisionRecord record_;
  Decision decision_;
};

TEST_F(DecisionTest, TooLateIsLrusVictimAndIsCounted) {
  TestPool lru(kBlocks);
  Fill(&lru);
  ASSERT_TRUE(Think(600));
  EXPECT_EQ(record_.late, 1u);
  EXPECT_EQ(record_.in_time, 0u);
  EXPECT_EQ(t_.pool.decided(), 0u);
  EXPECT_EQ(Victims(&t_, 1), Victims(&lru, 1));
  EXPECT_EQ(Victims(&t_, 5), Victims(&lru, 5));
  EXPECT_EQ(t_.pool.counters().undecided_victims, 6u);
}

TEST_F(DecisionTest, WithinItsBudgetItDecides) {
  ASSERT_TRUE(Think(kDecisionBudgetUs));
  EXPECT_EQ(record_.in_time, 1u);
  EXPECT_EQ(record_.late, 0u);
  ASSERT_EQ(t_.pool.decided(), decision_.victims());
  EXPECT_EQ(decision_.victims(), kBlocks / 4);
  EXPECT_FALSE(Think(0)) << "the next victims are decided on";
  // A lease that can't wait takes them too.
  t_.Lease(t_.Session(), 3);
  EXPECT_EQ(t_.pool.decided(), kBlocks / 4 - 3);
  EXPECT_EQ(t_.pool.counters().decided_victims, 3u);
  Victims(&t_, kBlocks / 4 - 3);
  EXPECT_EQ(t_.pool.decided(), 0u);
  EXPECT_EQ(t_.pool.counters().decided_victims, kBlocks / 4);
  Victims(&t_, 1);
  EXPECT_EQ(t_.pool.counters().undecided_victims, 1u);
}

TEST_F(DecisionTest, WhatMovedSinceItWasShownStays) {
  ASSERT_TRUE(decision_.Prepare(&t_.pool, &record_, t_.now));
  decision_.Think(SleepyStopwatch(0), kDecisionBudgetUs);
  // Each in another way: used again; held; on its own priority; gone, and another content in its place.
  const Holder session = t_.Session();
  for (uint32_t i = 0; i < 8; ++i)
    t_.Release(session, t_.Match(session, {"b" + std::to_string(i)}).blocks[0]);
  for (uint32_t i = 8; i < 16; ++i) t_.Match(session, {"b" + std::to_string(i)});
  for (uint32_t i = 16; i < 20; ++i) t_.Retain({blocks_[i]}, {.priority = 90, .until = t_.now + 1000});
  t_.pool.Reclaim(t_.now, absl::MakeConstSpan(blocks_).subspan(20, 8), EvictReason::kOperator, nullptr);
  for (uint32_t i = 20; i < 28; ++i) t_.Cache(session, {"new" + std::to_string(i)});
  decision_.Apply(&t_.pool, &record_, t_.now);
  // Four are as they were; those of them that were decided on leave first, and whoever else leaves is LRU's.
  uint32_t left = 0;
  while (t_.pool.decided() > 0) {
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
  ASSERT_TRUE(Think(0));
  EXPECT_EQ(Victims(&t_, 1), std::vector<BlockId>{blocks_[30].id});
  EXPECT_EQ(t_.pool.decided(), decision_.victims());
}

TEST_F(DecisionTest, TheBreakerOpensAndTriesAgain) {
  using State = Breaker::State;
  for (uint32_t i = 0; i < Breaker::kTripAfter; ++i) {
    EXPECT_EQ(record_.breaker.state(t_.now), State::kClosed);
    ASSERT_TRUE(Think(600));
  }
  EXPECT_EQ(record_.breaker.state(t_.now), State::kOpen);
  EXPECT_FALSE(Think(0));
  EXPECT_EQ(record_.not_asked, 1u);
  EXPECT_EQ(record_.late, Breaker::kTripAfter);
  t_.now += Breaker::kFirstCoolDownMs;
  EXPECT_EQ(record_.breaker.state(t_.now), State::kHalfOpen);
  ASSERT_TRUE(Think(600)) << "one is tried";
  EXPECT_EQ(record_.breaker.state(t_.now + Breaker::kFirstCoolDownMs), State::kOpen) << "twice as long";
  t_.now += 2 * Breaker::kFirstCoolDownMs;
  ASSERT_TRUE(decision_.Prepare(&t_.pool, &record_, t_.now));
  Decision other;
  EXPECT_FALSE(other.Prepare(&t_.pool, &record_, t_.now)) << "one thread tries";
  decision_.Think(SleepyStopwatch(0), kDecisionBudgetUs);
  decision_.Apply(&t_.pool, &record_, t_.now);
  EXPECT_EQ(record_.breaker.state(t_.now), State::kClosed);
  EXPECT_EQ(record_.breaker.times_opened(), 1u);
}

TEST(BreakerTest, LateOnesThatAreFewDoNotOpenIt) {
  Breaker breaker;
  for (uint32_t i = 0; i < 10 * Breaker::kTripAfter; ++i) {
    const std::optional<Breaker::Ticket> ticket = breaker.Admit(i);
    ASSERT_TRUE(ticket.has_value());
    breaker.OnDecision(*ticket, i, i % Breaker::kTripAfter == 0);
  }
  EXPECT_EQ(breaker.state(0), Breaker::State::kClosed);
}

TEST(BreakerTest, TheCoolDownIsBounded) {
  Breaker breaker;
  uint64_t now = 0;
  for (uint32_t i = 0; i < Breaker::kTripAfter; ++i) breaker.OnDecision(*breaker.Admit(now), now, false);
  for (int i = 0; i < 20; ++i) {
    now += Breaker::kMostCoolDownMs;
    const std::optional<Breaker::Ticket> ticket = breaker.Admit(now);
    ASSERT_TRUE(ticket.has_value());
    breaker.OnDecision(*ticket, now, false);
  }
}

TEST(BreakerTest, WhatWasUnderWayWhenItOpenedChangesNothing) {
  using State = Breaker::State;
  Breaker breaker;
  const Breaker::Ticket in_time = *breaker.Admit(0), late = *breaker.Admit(0), none = *breaker.Admit(0);
  for (uint32_t i = 0; i < Breaker::kTripAfter; ++i) breaker.OnDecision(*breaker.Admit(0), 0, false);
  breaker.OnDecision(in_time, 1, true);
  EXPECT_EQ(breaker.state(1), State::kOpen);
  breaker.OnDecision(late, 2, false);
  EXPECT_EQ(breaker.state(Breaker::kFirstCoolDownMs), State::kHalfOpen) << "no longer than it was";
  const std::optional<Breaker::Ticket> tried = breaker.Admit(Breaker::kFirstCoolDownMs);
  ASSERT_TRUE(tried.has_value());
  breaker.OnNone(none);
  EXPECT_FALSE(breaker.Admit(Breaker::kFirstCoolDownMs).has_value()) << "one is being tried";
  breaker.OnDecision(*tried, Breaker::kFirstCoolDownMs, true);
  EXPECT_EQ(breaker.state(Breaker::kFirstCoolDownMs), State::kClosed);
}

TEST(DecisionsOfOthers, LruIsNotAsked) {
  TestPool t(4);
  DecisionRecord record;
  Decision decision;
  t.Cache(t.Session(), {"a"});
  EXPECT_EQ(t.pool.judge(), nullptr);
  EXPECT_FALSE(decision.Prepare(&t.pool, &record, t.now));
  EXPECT_EQ(record.not_asked, 0u);
}

}  // namespace
}  // namespace kvpool
