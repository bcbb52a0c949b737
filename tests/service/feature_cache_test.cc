#include "server/scoring/feature_cache.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace kvpool {
namespace {

constexpr uint32_t kFloats = 1 << 16;  // A record of 256 KiB: four a chunk of 1 MiB.
constexpr size_t kChunk = 1 << 20;

FeatureKey KeyOf(uint64_t ref, uint32_t sections = 1) {
  return {.space = 1, .ref = ref, .group = 0, .sections = sections};
}

class FeatureCacheTest : public testing::Test {
 protected:
  // Finds or makes a record that says whose it is.
  bool Use(FeatureCache* cache, const FeatureKey& key, uint32_t floats = kFloats) {
    float* record = cache->Find(key);
    if (record != nullptr) {
      EXPECT_EQ(record[0], static_cast<float>(key.ref)) << "another block's";
      EXPECT_EQ(record[floats - 1], static_cast<float>(key.sections));
      return true;
    }
    record = cache->Make(key, floats);
    if (record == nullptr) return false;
    record[0] = static_cast<float>(key.ref);
    record[floats - 1] = static_cast<float>(key.sections);
    return false;
  }

  const std::unique_ptr<KvCompute> compute_ = MakeHostKvCompute({.host_threads = 1});
};

TEST_F(FeatureCacheTest, WhatWasMadeIsFoundUntilOthersNeedItsRoom) {
  FeatureCache cache(compute_.get(), 2 * kChunk);
  for (uint64_t ref = 1; ref <= 8; ++ref) {
    cache.BeginCall();
    EXPECT_FALSE(Use(&cache, KeyOf(ref)));
  }
  cache.BeginCall();
  EXPECT_TRUE(Use(&cache, KeyOf(1))) << "used just now, so 2 is the oldest";
  cache.BeginCall();
  EXPECT_FALSE(Use(&cache, KeyOf(9)));
  EXPECT_EQ(cache.stats().evicted, 1);
  EXPECT_EQ(cache.stats().bytes, 2 * kChunk);
  cache.BeginCall();
  EXPECT_TRUE(Use(&cache, KeyOf(1)));
  EXPECT_EQ(cache.Find(KeyOf(2)), nullptr);
  EXPECT_TRUE(Use(&cache, KeyOf(3)));
  EXPECT_EQ(cache.stats().hits, 3);
}

TEST_F(FeatureCacheTest, RecordsOfOneCallStayUntilTheNext) {
  FeatureCache cache(compute_.get(), kChunk);
  cache.BeginCall();
  std::set<float*> records;
  for (uint64_t ref = 1; ref <= 4; ++ref) records.insert(cache.Make(KeyOf(ref), kFloats));
  EXPECT_EQ(records.size(), 4);
  EXPECT_FALSE(records.contains(nullptr));
  EXPECT_EQ(cache.Make(KeyOf(5), kFloats), nullptr) << "the four are in use";
  cache.BeginCall();
  EXPECT_NE(cache.Make(KeyOf(5), kFloats), nullptr);
}

TEST_F(FeatureCacheTest, ACallThatFailedLeavesNothing) {
  FeatureCache cache(compute_.get(), kChunk);
  cache.BeginCall();
  Use(&cache, KeyOf(1));
  cache.BeginCall();
  Use(&cache, KeyOf(1));
  Use(&cache, KeyOf(2));
  cache.AbandonCall();
  EXPECT_NE(cache.Find(KeyOf(1)), nullptr) << "it was there before";
  EXPECT_EQ(cache.Find(KeyOf(2)), nullptr);
}

TEST_F(FeatureCacheTest, GenerationsGroupsAndSectionsAreApart) {
  FeatureCache cache(compute_.get(), kChunk);
  cache.BeginCall();
  Use(&cache, KeyOf(1));
  EXPECT_EQ(cache.Find(KeyOf(uint64_t{1} << 32 | 1)), nullptr);
  EXPECT_EQ(cache.Find(KeyOf(1, 2)), nullptr);
  EXPECT_EQ(cache.Find({.space = 2, .ref = 1, .group = 0, .sections = 1}), nullptr);
  EXPECT_EQ(cache.Find({.space = 1, .ref = 1, .group = 1, .sections = 1}), nullptr);
}

TEST_F(FeatureCacheTest, RoomGoesFromOneSizeToAnother) {
  FeatureCache cache(compute_.get(), 2 * kChunk);
  for (uint64_t ref = 1; ref <= 8; ++ref) {
    cache.BeginCall();
    Use(&cache, KeyOf(ref));
  }
  // Larger than a chunk: the whole limit.
  cache.BeginCall();
  EXPECT_FALSE(Use(&cache, KeyOf(100), 2 * kChunk / sizeof(float)));
  EXPECT_LE(cache.stats().bytes, 2 * kChunk);
  cache.BeginCall();
  EXPECT_TRUE(Use(&cache, KeyOf(100), 2 * kChunk / sizeof(float)));
  EXPECT_EQ(cache.Find(KeyOf(8)), nullptr);
  cache.BeginCall();
  EXPECT_FALSE(Use(&cache, KeyOf(1)));
  EXPECT_EQ(cache.Make(KeyOf(2), 3 * kChunk / sizeof(float)), nullptr) << "beyond the limit";
}

TEST_F(FeatureCacheTest, AnyMixHoldsTheLimitAndNeverMixesRecordsUp) {
  FeatureCache cache(compute_.get(), 3 * kChunk);
  std::minstd_rand random(7);
  constexpr uint32_t kSizes[] = {100, kFloats, kFloats / 3, 300000};
  for (int call = 0; call < 3000; ++call) {
    cache.BeginCall();
    for (int i = 0; i < 6; ++i) {
      const uint64_t ref = random() % 64 + 1;
      const uint32_t size = ref % 4;
      Use(&cache, KeyOf(ref, size + 1), kSizes[size]);
    }
    if (random() % 16 == 0) cache.AbandonCall();
    ASSERT_LE(cache.stats().bytes, 3 * kChunk);
  }
  EXPECT_GT(cache.stats().hits, 1000);
  EXPECT_GT(cache.stats().evicted, 1000);
}

}  // namespace
}  // namespace kvpool
