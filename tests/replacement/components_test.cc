// The parts of policies: the heap of offers, ghosts, the sketch, statistics of reuse, the shadow of LRU.
#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "server/replacement/parts/frequency_sketch.h"
#include "server/replacement/parts/ghost_list.h"
#include "server/replacement/parts/lru_shadow.h"
#include "server/replacement/parts/offer_heap.h"
#include "server/replacement/parts/past_contents.h"
#include "server/replacement/parts/reuse_statistics.h"
#include "server/replacement/parts/turns.h"

namespace kvpool {
namespace {

TEST(OfferHeap, IsASortedSet) {
  constexpr uint32_t kBlocks = 200;
  HeapPlaces places(kBlocks + 1);
  OfferHeap heap(&places);
  std::set<std::pair<Rank, uint32_t>> sorted;
  std::map<uint32_t, Rank> ranks;
  std::mt19937 random(20240611);
  for (int step = 0; step < 100000; ++step) {
    const uint32_t b = 1 + random() % kBlocks;
    if (const auto it = ranks.find(b); it != ranks.end()) {
      heap.Remove(b);
      sorted.erase({it->second, b});
      ranks.erase(it);
    } else {
      const Rank rank = {.major = random() % 8, .minor = random() % 4};  // many ties
      heap.Insert(b, rank);
      sorted.emplace(rank, b);
      ranks[b] = rank;
    }
    ASSERT_EQ(heap.size(), sorted.size());
    ASSERT_EQ(heap.first(), sorted.empty() ? 0 : sorted.begin()->second) << "step " << step;
  }
}

TEST(OfferHeap, RanksOfNumbersSortAsTheNumbers) {
  const double numbers[] = {0, 1e-300, 0.5, 1, 1.0000000001, 2, 1e9, 1e300};
  EXPECT_TRUE(std::is_sorted(std::begin(numbers), std::end(numbers),
                             [](double a, double b) { return RankOf(a) < RankOf(b); }));
}

// Compared with a map: what is remembered is right; what is forgotten is answered, and was the one of its set
// used longest ago.
TEST(PastContents, ForgetsTheOldestOfASetAndKeepsTheRestWhileItGrows) {
  constexpr uint32_t kMost = 1003;
  PastContents past(kMost);
  std::map<uint64_t, uint64_t> last_use;  // content -> last use, of those remembered
  std::mt19937_64 random(5);
  uint64_t forgotten = 0, ages = 0;
  for (uint64_t now = 1; now <= 20000; ++now) {
    const uint64_t hash = 1 + random() % 4000;
    past.Reserve(static_cast<uint32_t>(std::min<uint64_t>(now, 2 * kMost)));
    ASSERT_LE(past.slots(), kMost + 3);
    PastContents::Past* const found = past.Find(hash);
    ASSERT_EQ(found != nullptr, last_use.contains(hash)) << hash << " at " << now;
    if (found != nullptr) {
      EXPECT_EQ(found->since(), last_use[hash]);
      EXPECT_EQ(found->number(), hash % 1000);
      EXPECT_EQ(found->AgeAt(now), now - last_use[hash]);
      past.Forget(found);
      last_use.erase(hash);
      if (now % 2 == 0) continue;
    }
    const PastContents::Past lost = past.Remember(hash, now, hash % 1000, now);
    last_use[hash] = now;
    if (lost.hash == 0) continue;
    ++forgotten;
    ASSERT_TRUE(last_use.contains(lost.hash)) << lost.hash;
    EXPECT_EQ(lost.since(), last_use[lost.hash]);
    last_use.erase(lost.hash);
    ages += lost.AgeAt(now);
  }
  EXPECT_GT(forgotten, 5000u);
  EXPECT_GT(ages / forgotten, kMost) << "of any other of a set it would be less";
  uint32_t there = 0;
  for (uint32_t slot = 0; slot < past.slots(); ++slot) there += past.InSlot(slot) != nullptr;
  EXPECT_EQ(there, last_use.size());
}

// A split leaves holes, in front of contents that are remembered anew.
TEST(PastContents, RemembersAContentOnceAcrossSplits) {
  constexpr uint32_t kMost = 1024;
  PastContents past(kMost, 4);
  std::mt19937_64 random(9);
  for (uint64_t now = 1; now <= 5000; ++now) {
    const uint64_t hash = 1 + random() % 600;
    past.Reserve(static_cast<uint32_t>(now / 4));
    past.Remember(hash, now, 0, now);
    ASSERT_EQ(past.Find(hash)->since(), now);
    if (now % 100 != 0) continue;
    std::map<uint64_t, uint32_t> times;
    for (uint32_t slot = 0; slot < past.slots(); ++slot) {
      if (past.InSlot(slot) != nullptr) ++times[past.InSlot(slot)->hash];
    }
    for (const auto& [name, count] : times) ASSERT_EQ(count, 1u) << name << " at " << now;
  }
  EXPECT_EQ(past.slots(), kMost);
}

TEST(GhostList, ForgetsTheOldest) {
  GhostList ghosts;
  for (uint64_t hash = 1; hash <= 5; ++hash) ghosts.Add(hash, hash * 10);
  ghosts.Add(2, 21);  // the newest again
  EXPECT_TRUE(ghosts.Remove(4));
  EXPECT_FALSE(ghosts.Remove(4));
  ghosts.Trim(2);
  EXPECT_EQ(ghosts.size(), 2u);
  ASSERT_NE(ghosts.Find(5), nullptr);
  ASSERT_NE(ghosts.Find(2), nullptr);
  EXPECT_EQ(*ghosts.Find(2), 21u);
  EXPECT_EQ(ghosts.Find(3), nullptr);
  ghosts.Trim(0);
  EXPECT_EQ(ghosts.size(), 0u);
  ghosts.Add(7, 1);
  EXPECT_EQ(ghosts.size(), 1u);
}

TEST(FrequencySketch, NeverCountsLessUntilItIsHalved) {
  FrequencySketch sketch(2000);
  sketch.Reserve(1024);
  std::mt19937_64 random(7);
  std::map<uint64_t, uint32_t> exact;
  std::vector<uint64_t> hashes(64);
  for (uint64_t& hash : hashes) hash = random();
  for (int i = 0; i < 400; ++i) {
    const uint64_t hash = hashes[random() % hashes.size()];
    sketch.Add(hash);
    ++exact[hash];
  }
  uint32_t right = 0;
  for (const auto& [hash, count] : exact) {
    EXPECT_GE(sketch.Count(hash), std::min(count, FrequencySketch::kMost));
    right += sketch.Count(hash) == std::min(count, FrequencySketch::kMost) ? 1 : 0;
  }
  EXPECT_GE(right, exact.size() - 2) << "64 hashes in rows of 1,024 counters";
  EXPECT_EQ(sketch.Count(random()), 0u);

  const uint64_t often = hashes[0];
  for (int i = 0; i < 20; ++i) sketch.Add(often);
  EXPECT_EQ(sketch.Count(often), FrequencySketch::kMost);
  for (int i = 0; i < 11000; ++i) sketch.Add(random());
  EXPECT_LT(sketch.Count(often), FrequencySketch::kMost) << "ten samples of 1,024 halve";
}

// What was counted counts half as much once there are twice as many counters, and what comes later has counters of its own.
TEST(FrequencySketch, HalvesNoCountTwiceWhileItDoubles) {
  constexpr uint32_t kBlocks = 8192;
  FrequencySketch sketch(kBlocks);
  std::mt19937_64 random(11);
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> counts;  // When there were as many counters as a power of two last.
  for (uint32_t blocks = 16; blocks <= kBlocks; ++blocks) {
    sketch.Reserve(blocks);
    for (size_t i = 0; i < counts.size(); ++i) {
      ASSERT_GE(sketch.Count(hashes[i]), counts[i] / 2) << blocks;
      ASSERT_LE(sketch.Count(hashes[i]), counts[i]) << blocks;
    }
    if (!std::has_single_bit(blocks)) continue;
    for (int i = 0; i < 5; ++i) {
      hashes.push_back(random());
      for (int times = 0; times < 7; ++times) sketch.Add(hashes.back());
    }
    counts.clear();
    for (const uint64_t hash : hashes) counts.push_back(sketch.Count(hash));
  }
  ASSERT_EQ(hashes.size(), 50u);
  for (size_t i = 0; i < 40; ++i) EXPECT_LE(sketch.Count(hashes[i]), 3u) << "it was halved once at least";
  for (size_t i = 45; i < 50; ++i) EXPECT_EQ(sketch.Count(hashes[i]), 7u);
  uint32_t strangers = 0;
  for (int i = 0; i < 1000; ++i) strangers += sketch.Count(random()) != 0 ? 1 : 0;
  EXPECT_LE(strangers, 5u) << "50 hashes in rows of 8,192 counters";
}

TEST(ReuseStatistics, CountsWhatCameBackOfEachClass) {
  ReuseStatistics reuse(2, 1000);
  // In class 0 three of four return after 100, in class 1 one of four after 300. The others never do.
  uint64_t now = 0;
  for (uint64_t hash = 1; hash <= 8000; ++hash) {
    const int cls = hash % 2 == 0 ? 0 : 1;
    reuse.Begin(hash, cls, now);
    if (cls == 0 && hash % 8 != 0) {
      EXPECT_EQ(reuse.End(hash, now + 100), 0);
    }
    if (cls == 1 && hash % 8 == 1) {
      EXPECT_EQ(reuse.End(hash, now + 300), 1);
    }
    now += 300;
  }
  EXPECT_NEAR(reuse.ShareOfBegun(0), 0.75, 0.01);
  EXPECT_NEAR(reuse.ShareOfBegun(1), 0.25, 0.01);
  EXPECT_NEAR(reuse.MeanWait(0), 100, 3);
  EXPECT_NEAR(reuse.MeanWait(1), 300, 6);
  EXPECT_EQ(reuse.ChanceOfEnded(1), 1) << "nothing was given up yet";
  EXPECT_EQ(reuse.End(8, now), 0) << "it waits still";
  EXPECT_EQ(reuse.End(8, now), std::nullopt);
  reuse.GiveUp(now);
  EXPECT_NEAR(reuse.ChanceOfEnded(0), 0.75, 0.01);
  EXPECT_NEAR(reuse.ChanceOfEnded(1), 0.25, 0.01);
  EXPECT_EQ(reuse.End(16, now), std::nullopt) << "given up";
}

TEST(ReuseStatistics, AContentWaitsOnceHoweverOftenItBegins) {
  ReuseStatistics once(2, 1000), again(2, 1000);
  for (uint64_t hash = 1; hash <= 1000; ++hash) {
    once.Begin(hash, 1, 10 * hash);
    again.Begin(hash, 0, 10 * hash - 5);
    again.Begin(hash, 1, 10 * hash);
    for (ReuseStatistics* reuse : {&once, &again}) {
      if (hash % 4 == 0) {
        EXPECT_EQ(reuse->End(hash, 10 * hash + 7), 1);
      }
    }
  }
  for (const int cls : {0, 1}) {
    EXPECT_EQ(again.ShareOfBegun(cls), once.ShareOfBegun(cls));
    EXPECT_EQ(again.MeanWait(cls), once.MeanWait(cls));
  }
}

TEST(ReuseStatistics, KnowsLittleAtFirstAndForgets) {
  ReuseStatistics reuse(2, 1000);
  EXPECT_EQ(reuse.ChanceOfEnded(0), 0.5);
  EXPECT_EQ(reuse.ShareOfBegun(0), 0.5);
  const auto live = [&reuse](uint64_t from, uint64_t to, bool returns) {
    for (uint64_t hash = from; hash < to; ++hash) {
      reuse.Begin(hash, 0, hash);
      if (returns) reuse.End(hash, hash + 1);
    }
    reuse.GiveUp(UINT64_MAX);
  };
  live(0, 1000, true);
  EXPECT_GT(reuse.ChanceOfEnded(1), 0.99) << "a class of which nothing is known is like all";
  live(1000, 300'000, false);
  EXPECT_LT(reuse.ChanceOfEnded(0), 0.001);
  live(300'000, 700'000, true);
  EXPECT_GT(reuse.ChanceOfEnded(0), 0.95) << "half is forgotten in 50,000 waits";
}

TEST(ReuseStatistics, WatchesASampleOfMany) {
  ReuseStatistics reuse(1, 1u << 24);
  uint64_t watched = 0;
  constexpr uint64_t kContents = 1u << 20;
  for (uint64_t hash = 0; hash < kContents; ++hash) {
    reuse.Begin(hash * 0x2545f4914f6cdd1du, 0, 0);
    watched += reuse.End(hash * 0x2545f4914f6cdd1du, 1).has_value() ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(watched), kContents / 2048.0, 100) << "one in 2^24 * 8 / 2^16";
}

TEST(LruShadow, KnowsWhatLruWouldHold) {
  LruShadow shadow(10);
  EXPECT_FALSE(shadow.PolicyMayChoose()) << "of nothing";
  for (uint64_t hash = 1; hash <= 3; ++hash) shadow.OnMiss(hash);
  // The policy evicts the newest of three again and again, which LRU would keep.
  int wrong = 0;
  while (shadow.PolicyMayChoose()) {
    shadow.OnEvict(3);
    shadow.OnMiss(100 + ++wrong);
    shadow.OnEvict(100 + wrong);
    shadow.OnMiss(3);
    ASSERT_LT(wrong, 100);
  }
  EXPECT_GT(wrong, 1);
}

// A lease evicts for all that it is short of before any of that is inserted.
TEST(LruShadow, LruKeepsWhatALeaseOfManyBlocksEvicts) {
  LruShadow shadow(20);
  constexpr uint64_t kBlocks = 16;
  for (uint64_t hash = 1; hash <= kBlocks; ++hash) shadow.OnMiss(hash);
  for (uint64_t hash = 1; hash <= kBlocks; ++hash) shadow.OnUsed(hash);
  // LRU would have found all of these.
  for (int round = 0; round < 3; ++round) {
    for (uint64_t hash = 1; hash <= kBlocks; ++hash) shadow.OnEvict(hash);
    for (uint64_t hash = 1; hash <= kBlocks; ++hash) shadow.OnMiss(hash);
    for (uint64_t hash = 1; hash <= kBlocks; ++hash) shadow.OnUsed(hash);
  }
  EXPECT_FALSE(shadow.PolicyMayChoose());
}

TEST(Turns, ARunOfInsertionsIsATurn) {
  Turns turns;
  const auto insert = [&turns](uint32_t block, uint32_t parent, uint8_t front) {
    return turns.OnInsert(BlockId{block}, {.parent = BlockId{parent}}, front);
  };
  EXPECT_EQ(insert(1, 0, 0), 0);
  EXPECT_EQ(insert(2, 1, 0), 0);
  EXPECT_TRUE(turns.OnUsed(BlockId{2}));
  EXPECT_FALSE(turns.OnUsed(BlockId{1}));
  EXPECT_EQ(insert(3, 2, 0), 1) << "the use of 2 ended: this carries on";
  EXPECT_EQ(insert(4, 3, 1), 1);
  EXPECT_EQ(insert(5, 3, 1), 2) << "another branch";
  EXPECT_EQ(insert(6, 5, 255), 255);
}

}  // namespace
}  // namespace kvpool
