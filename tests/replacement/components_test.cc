// What policies are made of: the heap of offers, the ghosts, the sketch.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "server/replacement/frequency_sketch.h"
#include "server/replacement/ghost_list.h"
#include "server/replacement/offer_heap.h"

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
      const Rank rank = {.major = random() % 8, .minor = random() % 4};  // Many ties.
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

TEST(GhostList, ForgetsTheOldest) {
  GhostList ghosts;
  for (uint64_t hash = 1; hash <= 5; ++hash) ghosts.Add(hash, hash * 10);
  ghosts.Add(2, 21);  // The newest again.
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
  FrequencySketch sketch(1024);
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

}  // namespace
}  // namespace kvpool
