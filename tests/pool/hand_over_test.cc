// A policy that takes over step by step, between verbs, ends as one that took over at once.
#include "server/pool/hand_over.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

constexpr uint32_t kBlocks = 64;

// A pool, and a script of what engines do with it.
class Busy {
 public:
  explicit Busy(std::string_view policy) : t_(kBlocks, {.pin_budget = 0.5}, policy), session_(t_.Session()) {}

  // Matches what is resident of a chain, leases and seals the rest, and releases all of it.
  void Act() {
    ++t_.now;
    std::vector<std::string> names;
    const uint32_t family = Below(12);
    for (uint32_t depth = 0, end = 1 + Below(5); depth < end; ++depth) {
      names.push_back("f" + std::to_string(family) + "_" + std::to_string(depth));
    }
    std::vector<BlockRef> held = t_.Match(session_, names).blocks[0];
    const std::vector<BlockKey> keys = Keys(names);
    if (held.size() < keys.size()) {
      const std::vector<BlockRef> fresh =
          t_.Lease(session_, static_cast<uint32_t>(keys.size() - held.size()));
      const BlockKey* const parent = held.empty() ? nullptr : &keys[held.size() - 1];
      t_.Seal(session_, fresh, {keys.begin() + static_cast<int>(held.size()), keys.end()}, parent);
      held.insert(held.end(), fresh.begin(), fresh.end());
    }
    const Reuse reuse = static_cast<Reuse>(Below(4));
    t_.Release(session_, held, {.reuse = reuse, .category = static_cast<uint8_t>(Below(3))});
    if (Below(4) == 0) t_.pool.SetScores(t_.now, {&held[0], 1}, {0.25f * static_cast<float>(Below(5))});
    if (Below(4) == 0) t_.Retain({held[0]}, {.priority = static_cast<uint8_t>(20 * Below(5)), .until = ~0u});
    if (Below(3) == 0) t_.pool.Touch(t_.now, held);
  }
  // Leaves room for one more, so that no victim is needed.
  void MakeRoom() {
    for (uint32_t b = 1; b <= kBlocks && t_.count(BlockState::kFree) < 8; ++b) {
      const BlockRef ref = t_.pool.View(BlockId{b}, t_.now)->ref;
      t_.pool.Reclaim(t_.now, {&ref, 1}, EvictReason::kOperator, nullptr);
    }
  }
  std::vector<BlockKey> Drain() { return t_.Reclaim(kBlocks); }

  BlockPool& pool() { return t_.pool; }
  TimeMs now() const { return t_.now; }
  uint32_t cached() { return t_.count(BlockState::kCached); }

 private:
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }

  TestPool t_;
  const Holder session_;
  std::mt19937 random_{20260611};
};

class HandOverTest : public testing::TestWithParam<std::string_view> {};

TEST_P(HandOverTest, StepByStepIsAsAllAtOnce) {
  constexpr int kWhileBuilt = 12;
  for (const std::string_view before : {"lru", "arc", "gdsf", "hit_density"}) {
    SCOPED_TRACE(before);
    Busy steps(before), at_once(before);
    int acts = 0;
    for (; acts < 100; ++acts) steps.Act();
    BlockPool::HandOver hand_over({.max_blocks = kBlocks + 1},
                                  *MakeReplacementPolicy(GetParam(), kBlocks + 1));
    while (!hand_over.Copy(&steps.pool(), steps.now(), 7)) {
      steps.Act();
      ++acts;
      steps.pool().CheckInvariants();
    }
    EXPECT_GT(acts, 105);
    for (int i = 0; i < acts; ++i) at_once.Act();
    at_once.pool().SetPolicy(at_once.now(), *MakeReplacementPolicy(GetParam(), kBlocks + 1));

    for (int i = 0; i < kWhileBuilt; ++i) {
      for (Busy* busy : {&steps, &at_once}) {
        busy->MakeRoom();
        busy->Act();
      }
      if (i == kWhileBuilt / 2) hand_over.Build();
      if (i > kWhileBuilt / 2) {
        // Each call causes more than one event.
        EXPECT_EQ(hand_over.Finish(&steps.pool(), 1), nullptr);
        hand_over.CatchUp();
      }
      EXPECT_EQ(steps.pool().policy().name(), before);
    }
    steps.MakeRoom();
    at_once.MakeRoom();
    const std::unique_ptr<ReplacementPolicy> old = hand_over.Finish(&steps.pool(), 1000);
    ASSERT_NE(old, nullptr);
    EXPECT_EQ(old->name(), before);
    EXPECT_EQ(steps.pool().policy().name(), GetParam());
    steps.pool().CheckInvariants();
    const uint32_t cached = steps.cached();
    EXPECT_GT(cached, 40u);
    const std::vector<BlockKey> left = steps.Drain();
    EXPECT_EQ(left.size(), cached);
    EXPECT_EQ(left, at_once.Drain());
  }
}

std::vector<std::string_view> AllPolicies() {
  std::vector<std::string_view> names;
  for (const PolicyEntry& policy : ReplacementPolicies()) names.push_back(policy.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Policies, HandOverTest, testing::ValuesIn(AllPolicies()),
                         [](const auto& name) { return std::string(name.param); });

TEST(HandOver, WhatVerbsDoMeanwhileIsBounded) {
  Busy busy("lru"), other("lru");
  for (int i = 0; i < 100; ++i) busy.Act();
  BlockPool::HandOver hand_over({.max_blocks = kBlocks + 1, .most_events = 3},
                                *MakeReplacementPolicy("fifo", kBlocks + 1));
  ASSERT_TRUE(hand_over.Copy(&busy.pool(), busy.now(), kBlocks));
  EXPECT_FALSE(hand_over.overrun());
  busy.Act();
  EXPECT_TRUE(hand_over.overrun());
  hand_over.Build();
  hand_over.GiveUp(&busy.pool());
  // The old policy goes on as if nothing had happened.
  EXPECT_EQ(busy.pool().policy().name(), "lru");
  for (int i = 0; i < 101; ++i) other.Act();
  EXPECT_EQ(busy.Drain(), other.Drain());
}

// The order of very many blocks is put together from parts.
TEST(HandOver, ManyBlocksLeaveAsTheyWouldHaveLeft) {
  constexpr uint32_t kMany = 30'000;
  TestPool handed(kMany), kept(kMany);
  for (TestPool* const t : {&handed, &kept}) {
    const Holder session = t->Session();
    std::vector<BlockRef> blocks;
    for (uint32_t i = 0; i < kMany; ++i) blocks.push_back(t->Cache(session, {absl::StrCat("k", i)})[0]);
    std::mt19937 random(20261125);
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (uint32_t i = 0; i < kMany; i += 50) {
      ++t->now;
      t->pool.Touch(t->now, absl::MakeConstSpan(blocks).subspan(i, 50));
    }
  }
  handed.pool.SetPolicy(handed.now, *MakeReplacementPolicy("lru", kMany + 1));
  EXPECT_EQ(handed.Reclaim(kMany), kept.Reclaim(kMany));
}

TEST(HandOver, OneThatIsStoppedLeavesTheOldPolicyInPlace) {
  Busy busy("lru"), other("lru");
  for (int i = 0; i < 100; ++i) busy.Act();
  BlockPool::HandOver hand_over({.max_blocks = kBlocks + 1}, *MakeReplacementPolicy("fifo", kBlocks + 1));
  ASSERT_TRUE(hand_over.Copy(&busy.pool(), busy.now(), kBlocks));
  const std::atomic<bool> stop = true;
  EXPECT_FALSE(hand_over.Build(&stop));
  hand_over.GiveUp(&busy.pool());
  EXPECT_EQ(busy.pool().policy().name(), "lru");
  for (int i = 0; i < 101; ++i) other.Act();
  busy.Act();
  EXPECT_EQ(busy.Drain(), other.Drain());
}

}  // namespace
}  // namespace kvpool
