// learned: what it begins with, what difference that makes, and what hit ratios it reaches.

#include "server/replacement/policies/learned.h"

#include <algorithm>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/formats/trace.h"
#include "server/replacement/parts/reuse_model.h"
#include "server/replacement/parts/use_classes.h"
#include "server/sim/read_workload.h"
#include "server/sim/replay.h"
#include "server/sim/synthetic.h"
#include "server/sim/train.h"

namespace kvpool {
namespace sim {

void PrintTo(const SyntheticKind& kind, std::ostream* out) { *out << kind.name; }

}  // namespace sim

namespace {

using ::testing::HasSubstr;

TEST(ReuseModel, TheIndexIsTheBestOfAllTimesToHold) {
  std::mt19937_64 random(3);
  const auto share = [&random] { return static_cast<double>(random() % 1000) / 1000; };
  for (int round = 0; round < 200; ++round) {
    ReuseModel::Table chances, widths;
    for (int a = 0; a < ReuseModel::kAges; ++a) {
      chances[a] = share() < 0.3 ? 0 : share() * share();
      widths[a] = 1 + 100 * share();
    }
    const ReuseModel::Table index = ReuseModel::IndexOf(chances, widths);
    for (int a = 0; a < ReuseModel::kAges; ++a) {
      double waiting = 1, hit = 0, held = 0, best = 0;
      for (int t = a; t < ReuseModel::kAges; ++t) {
        hit += waiting * chances[t];
        held += waiting * (1 - chances[t] / 2) * widths[t];
        waiting *= 1 - chances[t];
        best = std::max(best, hit / held);
      }
      ASSERT_NEAR(index[a], best, 1e-9) << "age " << a << " of round " << round;
    }
  }
}

TEST(ReuseModel, WhatWasKnownBeforeCountsUntilMoreIsSeen) {
  const auto rates_of = [](int cls) {
    ReuseModel::Prior::Rates rates;
    rates.fill(cls == 0 ? 1e-3 : 1e-5);
    return rates;
  };
  ReuseModel model({0, 1}, {rates_of});
  // A block a millisecond.
  uint64_t now = 1;
  const auto round = [&] {
    model.BeginRound(now, now);
    while (model.LearnNext()) {
    }
  };
  for (const int cls : {0, 1}) model.Begin(cls);
  for (int i = 0; i < 3; ++i, now += 100) round();
  EXPECT_GT(model.Index(0, 0), 20 * model.Index(1, 0));
  // But it is the others that come back.
  for (int i = 0; i < 4000; ++i, ++now) {
    model.Hit(1, 500);
    model.Forget(0, uint64_t{1} << 30);
  }
  for (int i = 0; i < 3; ++i) round();
  EXPECT_LT(20 * model.Index(0, 0), model.Index(1, 0));
}

// The class of a block's last use, after a story told by prompts of three blocks of 512 tokens and more.
TEST(UseClasses, TellsTurnsLengthsAndHits) {
  UseClasses classes({.max_blocks = 100, .tokens_per_block = 512});
  uint64_t now = 0;
  const auto insert = [&](uint32_t block, uint32_t parent) {
    classes.OnInsert(block, {.hash = block, .parent = BlockId{parent}}, now++);
  };
  const auto use = [&](uint32_t block) { return UseClasses::UseOf(classes.OnUsed(block, now)); };
  for (uint32_t b = 1; b <= 3; ++b) insert(b, b - 1);
  EXPECT_EQ(use(3).last, 1);
  const UseClasses::Use second = use(2);
  EXPECT_EQ(second.hits, 0);
  EXPECT_EQ(second.turn, 0);
  EXPECT_EQ(second.last, 0);
  EXPECT_EQ(second.total, 2) << "three blocks";
  use(1);
  // The next turn: two blocks of the three again, two new ones.
  for (uint32_t b = 1; b <= 2; ++b) classes.OnHit(b, now);
  insert(4, 2);
  insert(5, 4);
  const UseClasses::Use last = use(5), found = (use(4), use(2));
  EXPECT_EQ(last.turn, 1);
  EXPECT_EQ(last.last, 1);
  EXPECT_EQ(last.total, 3) << "four blocks";
  EXPECT_EQ(found.hits, 1);
  use(1);
  // A block that many continue is shared, and what follows it is a first turn.
  for (int i = 0; i < 8; ++i) classes.OnHit(1, now);
  insert(6, 1);
  EXPECT_EQ(use(6).turn, 0);
  // The wait of a content that left goes on, and it is found again when it comes back.
  const auto waits = [&] {
    int n = 0;
    for (uint32_t slot = 0; slot < classes.slots(); ++slot) n += classes.InSlot(slot, now).has_value();
    return n;
  };
  const int before = waits();
  const int cls = classes.cls(5);
  classes.OnEvict(5, now, [](const UseClasses::Wait&) { FAIL() << "there is room for one"; });
  EXPECT_EQ(waits(), before);
  now += 5000;
  const auto ended = classes.OnInsert(5, {.hash = 5, .parent = BlockId{4}}, now);
  ASSERT_TRUE(ended.has_value());
  EXPECT_EQ(ended->cls, cls);
  EXPECT_EQ(now - ended->since, 5001u) << "since the last use of 5, a block before";
  EXPECT_EQ(waits(), before - 1);
  EXPECT_EQ(use(5).hits, 1);
  EXPECT_EQ(use(5).gap, 3) << "4,096 blocks and more";
}

// So many contents that left are remembered, and each that is forgotten is reported once.
TEST(UseClasses, TellsWhatItForgets) {
  UseClasses classes({.max_blocks = 4, .tokens_per_block = 512});
  constexpr uint64_t kContents = 70000, kMost = 16384;
  std::set<uint64_t> forgotten;
  for (uint64_t content = 1; content <= kContents; ++content) {
    classes.OnInsert(1, {.hash = content}, content);
    classes.OnUsed(1, content);
    classes.OnEvict(1, content,
                    [&](const UseClasses::Wait& wait) { EXPECT_TRUE(forgotten.insert(wait.since).second); });
  }
  std::set<uint64_t> waiting;
  for (uint32_t slot = 0; slot < classes.slots(); ++slot) {
    const auto wait = classes.InSlot(slot, kContents);
    if (wait.has_value()) {
      EXPECT_TRUE(waiting.insert(wait->since).second);
    }
  }
  EXPECT_LE(waiting.size(), kMost);
  EXPECT_EQ(waiting.size() + forgotten.size(), kContents);
  for (const uint64_t content :
       {*waiting.begin(), *waiting.rbegin(), *forgotten.begin(), *forgotten.rbegin()}) {
    EXPECT_EQ(classes.OnInsert(1, {.hash = content}, kContents).has_value(), waiting.contains(content));
    classes.OnEvict(1, kContents, [](const UseClasses::Wait&) {});
  }
}

// Prompts of 8 blocks come back a minute later, prompts of 30 never.
TEST(Learned, TrainingFindsWhatComesBack) {
  sim::Workload w{.name = "two kinds", .tokens_per_block = 512};
  const auto ask = [&](uint32_t document, uint32_t blocks, uint64_t now_ms) {
    w.requests.push_back(
        {.now_ms = now_ms, .first = w.contents.size(), .blocks = blocks, .tokens = blocks * 512});
    for (uint32_t i = 0; i < blocks; ++i) w.contents.push_back(document * 32 + i);
  };
  for (uint32_t d = 0; d < 600; ++d) {
    ask(d, d % 2 == 0 ? 8 : 30, d * 1000);
    if (d >= 60 && d % 2 == 0) ask(d - 60, 8, d * 1000);
  }
  w.distinct = 600 * 32;
  const absl::StatusOr<Weights> weights = sim::Train("learned", w, {.capacities = {1000}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(sim::Train("learned", w, {.capacities = {1000}})->Serialize(), weights->Serialize());
  double short_rate = 0, long_rate = 0;
  for (int c = 0; c < UseClasses::kClasses; ++c) {
    const UseClasses::Use use = UseClasses::UseOf(c);
    if (use.hits != 0 || use.turn != 0 || use.last != 0) continue;
    constexpr int kMinute = 6;  // the span from 60 s to 80 s
    if (use.total == 5 && use.fresh == 2) short_rate = ReuseNetwork::RatesOf(*weights, c)[kMinute];
    if (use.total == 9 && use.fresh == 3) long_rate = ReuseNetwork::RatesOf(*weights, c)[kMinute];
  }
  EXPECT_GT(short_rate, 50 * long_rate);
}

TEST(Learned, WeightsOfAnotherPolicyAreRefused) {
  const auto others = Weights::BuiltIn("cold_rl");
  ASSERT_TRUE(others.ok()) << others.status();
  const absl::Status status =
      MakeReplacementPolicy("learned", {.max_blocks = 16, .weights = *others}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("weights of policy cold_rl, not of learned"));
}

double Ratio(const sim::Workload& w, const char* policy, uint32_t blocks) {
  const absl::StatusOr<sim::Result> result = sim::Replay(w, {.policy = policy, .capacity_blocks = blocks});
  return result.ok() ? result->block_ratio() : -1;
}

// The bounds are a little below what it reaches. Its weights were trained on the first half of the trace.
TEST(Learned, ClosesTheGapToTheOracleOnTheTrace) {
  if (KVPOOL_TWIN_REQUESTS > 0) GTEST_SKIP() << "figures of the whole trace: minutes under a sanitizer";
  const absl::StatusOr<std::string> path =
      replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces");
  if (!path.ok()) GTEST_SKIP() << path.status().message();
  const absl::StatusOr<sim::Workload> w = sim::ReadWorkload(*path, {.warm_up = 0.5});
  ASSERT_TRUE(w.ok()) << w.status();
  const std::pair<uint32_t, double> least[] = {{1000, 0.20}, {5000, 0.29}, {10000, 0.20}};
  for (const auto& [blocks, share] : least) {
    const double lru = Ratio(*w, "lru", blocks), opt = Ratio(*w, "opt", blocks);
    EXPECT_GT((Ratio(*w, "learned", blocks) - lru) / (opt - lru), share) << blocks << " blocks";
    EXPECT_GT((Ratio(*w, "hit_density", blocks) - lru) / (opt - lru), share - 0.04) << blocks << " blocks";
  }
  for (const uint32_t blocks : {300u, 2000u, 20000u, 30000u, 50000u}) {
    EXPECT_GT(Ratio(*w, "learned", blocks), Ratio(*w, "lru", blocks) - 0.005) << blocks << " blocks";
  }
}

// Its weights know nothing of these.
class OtherKinds : public testing::TestWithParam<sim::SyntheticKind> {};

TEST_P(OtherKinds, AreNotMuchWorseThanWithLru) {
  const absl::StatusOr<sim::Workload> w = sim::MakeSynthetic(GetParam().name, {});
  ASSERT_TRUE(w.ok()) << w.status();
  for (const uint32_t blocks : {1000u, 5000u}) {
    EXPECT_GT(Ratio(*w, "learned", blocks), Ratio(*w, "lru", blocks) - 0.005) << blocks << " blocks";
  }
}

INSTANTIATE_TEST_SUITE_P(Synthetic, OtherKinds, testing::ValuesIn(sim::SyntheticKinds()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Synthetic, IsTheSameForTheSameSeed) {
  for (const sim::SyntheticKind& kind : sim::SyntheticKinds()) {
    const auto one = sim::MakeSynthetic(kind.name, {.requests = 300, .seed = 4}),
               same = sim::MakeSynthetic(kind.name, {.requests = 300, .seed = 4}),
               other = sim::MakeSynthetic(kind.name, {.requests = 300, .seed = 5});
    ASSERT_TRUE(one.ok() && same.ok() && other.ok());
    EXPECT_EQ(one->contents, same->contents) << kind.name;
    EXPECT_NE(one->contents, other->contents) << kind.name;
    EXPECT_EQ(*std::max_element(one->contents.begin(), one->contents.end()) / one->distinct, 0u);
  }
  EXPECT_THAT(std::string(sim::MakeSynthetic("none", {}).status().message()), HasSubstr("agents"));
}

}  // namespace
}  // namespace kvpool
