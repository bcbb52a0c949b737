// What a pool would find at other sizes, against caches that have these sizes.
#include "server/pool/reuse_curve.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <list>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/pool/pool_fixture.h"

namespace kvpool {
namespace {

uint64_t HashOf(uint64_t number) {
  std::mt19937_64 dice(number);
  return dice();
}

// The share of these uses that an LRU cache of so many places finds.
double FoundByLru(const std::vector<uint64_t>& uses, size_t places) {
  std::list<uint64_t> order;
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> where;
  double found = 0;
  for (const uint64_t use : uses) {
    if (const auto known = where.find(use); known != where.end()) {
      ++found;
      order.erase(known->second);
    } else if (where.size() == places) {
      where.erase(order.back());
      order.pop_back();
    }
    order.push_front(use);
    where[use] = order.begin();
  }
  return found / static_cast<double>(uses.size());
}

constexpr uint64_t kPaceMs = 20;

// Asks for each, one in kPaceMs.
uint64_t AskAll(ReuseCurve* curve, const std::vector<uint64_t>& uses, uint64_t now_ms = 1) {
  for (const uint64_t use : uses) curve->Ask(HashOf(use), now_ms += kPaceMs);
  return now_ms;
}

// What blocks `from` to `to` find of what is asked for, as the curve has it.
double Between(const ReuseCurve& curve, uint32_t from, uint32_t to, uint32_t most, uint64_t now_ms) {
  double hits = 0;
  for (uint32_t blocks = from; blocks < to; ++blocks) hits += curve.At(blocks, 1, most, now_ms).next;
  return hits * kPaceMs;
}

std::vector<uint64_t> Circle(uint64_t length, int rounds) {
  std::vector<uint64_t> uses;
  for (int round = 0; round < rounds; ++round) {
    for (uint64_t i = 0; i < length; ++i) uses.push_back(i);
  }
  return uses;
}

TEST(ReuseCurve, HitsAreThoseOfAnLruCache) {
  // A curve that is concave is its own hull.
  std::mt19937_64 dice(7);
  std::exponential_distribution<double> chance(1.0 / 300);
  std::vector<uint64_t> uses;
  for (int i = 0; i < 60'000; ++i) uses.push_back(static_cast<uint64_t>(chance(dice)));
  for (const uint32_t most : {2048u, 20'480u}) {
    ReuseCurve curve(most);
    double sum = 0;
    constexpr int kLooks = 200;
    uint64_t now = AskAll(&curve, {uses.begin(), uses.begin() + 20'000});
    for (int look = 0; look < kLooks; ++look) {
      const auto begin = uses.begin() + 20'000 + look * 200;
      now = AskAll(&curve, {begin, begin + 200}, now);
      sum += Between(curve, 0, 256, most, now);
    }
    EXPECT_NEAR(sum / kLooks, FoundByLru(uses, 256), .05) << most;
  }
}

TEST(ReuseCurve, WhatComesRoundIsWorthAsMuchFromTheFirstBlockToTheLast) {
  ReuseCurve curve(1000);
  const uint64_t now = AskAll(&curve, Circle(600, 3));
  // With 600 blocks all is found.
  const double each = 1. / 600 / kPaceMs;
  for (const uint32_t blocks : {1u, 100u, 500u, 599u}) {
    EXPECT_NEAR(curve.At(blocks, 1, 1000, now).next, each, .2 * each) << blocks;
    EXPECT_NEAR(curve.At(blocks, 1, 1000, now).last, each, .2 * each) << blocks;
  }
  EXPECT_LT(curve.At(620, 1, 1000, now).next, .05 * each) << "nothing is left to be found";
  EXPECT_NEAR(curve.At(620, 40, 1000, now).last, .5 * each, .15 * each) << "half of them are needed";
  EXPECT_NEAR(curve.At(580, 40, 1000, now).next, .5 * each, .15 * each);
}

TEST(ReuseCurve, WhatComesRoundAfterMoreThanThereMayBeIsWorthNothing) {
  ReuseCurve curve(1000);
  const uint64_t now = AskAll(&curve, Circle(600, 3));
  const double each = 1. / 600 / kPaceMs;
  EXPECT_LT(curve.At(100, 1, 500, now).next, .05 * each);
  ReuseCurve small(500);
  AskAll(&small, Circle(600, 3));
  EXPECT_LT(small.At(100, 1, 500, now).next, .05 * each);
}

TEST(ReuseCurve, WhatIsWrittenIsNotAskedFor) {
  ReuseCurve curve(1000);
  uint64_t now = 1;
  for (int i = 0; i < 1000; ++i) {
    curve.Ask(HashOf(i), ++now);
    curve.Write(HashOf(i), now);
  }
  EXPECT_LT(curve.At(10, 1, 1000, now).next, 1. / 1000 / 100) << "nothing was asked for twice";
  const double before = curve.At(500, 1, 1000, now).next;
  for (int i = 0; i < 1000; ++i) curve.Ask(HashOf(i), ++now);
  EXPECT_GT(curve.At(500, 1, 1000, now).next, 50 * before);
}

TEST(ReuseCurve, WhoAsksForNothingAnyMoreIsWorthLess) {
  ReuseCurve curve(1000);
  const uint64_t now = AskAll(&curve, Circle(600, 3));
  const double busy = curve.At(300, 1, 1000, now).last;
  // Its last uses took some seconds.
  EXPECT_LT(curve.At(300, 1, 1000, now + 60'000).last, busy / 10);
  // And is as before soon after it has come back.
  uint64_t later = now + 3'600'000;
  EXPECT_LT(curve.At(300, 1, 1000, later).last, busy / 1000);
  later = AskAll(&curve, Circle(600, 2), later);
  EXPECT_GT(curve.At(300, 1, 1000, later).last, busy / 2);
}

TEST(ReuseCurve, TheFirstUsesAreNoRate) {
  ReuseCurve curve(1000);
  for (int i = 0; i < 100; ++i) curve.Ask(HashOf(i % 10), 1);
  EXPECT_LE(curve.At(5, 1, 1000, 1).next, 100. / 1000 / 5);
  EXPECT_EQ(ReuseCurve(1000).At(5, 1, 1000, 1).next, 0);
}

// However many keys there are, and whatever their order.
TEST(ReuseCurve, ItsMemoryIsBounded) {
  ReuseCurve curve(50'000'000);
  ReuseCurve small(1);
  std::mt19937_64 dice(3);
  for (int i = 0; i < 300'000; ++i) {
    const uint64_t hash = dice() & ~uint64_t{0xffff};  // Each has it in its sample.
    curve.Ask(hash, static_cast<uint64_t>(i));
    small.Ask(hash, static_cast<uint64_t>(i));
    if (i % 3 == 0) curve.Ask(hash, static_cast<uint64_t>(i));
  }
  EXPECT_LT(curve.bytes(), 200'000);
  EXPECT_LT(small.bytes(), 2000);
  EXPECT_GE(small.At(1, 1, 1, 300'000).last, 0);
}

// Prompts of 20 blocks that come round after more than is there: what is found, and what is not.
TEST(ReuseCurve, APoolCountsAllThatItIsAskedFor) {
  TestPool pool(65, {.max_blocks = 1024});
  const Holder session = pool.Session({.guaranteed = 20});
  uint64_t hits = 0;
  const auto serve = [&](int prompt) {
    std::vector<std::string> names;
    for (int i = 0; i < 20; ++i) names.push_back(std::to_string(prompt) + "." + std::to_string(i));
    pool.now += 20 * kPaceMs;
    const MatchOutcome found = pool.Match(session, names);
    hits += found.tokens;
    if (found.tokens == 0)
      pool.Cache(session, names);
    else
      pool.Release(session, found.blocks[0]);
  };
  for (int i = 0; i < 32; ++i) serve(i % 8);
  EXPECT_EQ(hits, 0) << "160 blocks come round, and 64 are there";
  const double each = 1. / 160 / kPaceMs;
  EXPECT_NEAR(pool.pool.reuse(1, 1024, pool.now).next, each, .3 * each);
  EXPECT_LT(pool.pool.reuse(1, 128, pool.now).next, .1 * each);
  for (int i = 0; i < 64; ++i) serve(i % 2);
  EXPECT_EQ(hits, 62 * 20);
  EXPECT_NEAR(pool.pool.reuse(1, 1024, pool.now).next, 0, .4 * each);
}

}  // namespace
}  // namespace kvpool
