// The resp tier on a cluster of three real servers whose slots move and whose nodes are lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;

constexpr uint64_t kTwoPiecesBytes = 2 * kMostPieceBytes + 1000;

class RespClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    if (RedisServer::Program().empty()) {
      GTEST_SKIP() << "no redis-server: deploy/install_deps.sh test installs one";
    }
    cluster_ = std::make_unique<RedisCluster>();
    tier_ = OpenResp(RespOptions(cluster_->node(0).endpoint()));
  }
  static uint16_t SlotOf(uint32_t number) { return RespSlotOf(PieceKeyStem("kvpool", KeyOf(number))); }
  size_t OwnerOf(uint32_t number) const { return cluster_->OwnerOf(SlotOf(number)); }
  // Numbers whose values are on this node.
  std::vector<uint32_t> NumbersOf(size_t node, size_t count) const {
    std::vector<uint32_t> numbers;
    for (uint32_t i = 0; numbers.size() < count; ++i) {
      if (OwnerOf(i) == node) numbers.push_back(i);
    }
    return numbers;
  }

  std::unique_ptr<RedisCluster> cluster_;
  std::unique_ptr<RespTier> tier_;
};

TEST_F(RespClusterTest, ValuesGoToTheNodeOfTheirSlot) {
  EXPECT_THAT(Store(tier_.get(), Numbers(60)), Each(TierResult::kDone));
  EXPECT_THAT(Store(tier_.get(), Numbers(6, 100), kTwoPiecesBytes), Each(TierResult::kDone));
  size_t keys = 0;
  for (size_t i = 0; i < cluster_->size(); ++i) {
    const size_t there = cluster_->node(i).Keys("*").size();
    EXPECT_GT(there, 0) << i;
    keys += there;
  }
  EXPECT_EQ(keys, 60 + 6 * 3);
  const auto other = OpenResp(RespOptions(cluster_->node(2).endpoint()));
  EXPECT_EQ(Load(other.get(), Numbers(60)).right, 60);
  EXPECT_EQ(Load(other.get(), Numbers(6, 100), kTwoPiecesBytes).right, 6);
  // The map told which way to go: nobody was sent on.
  for (size_t i = 0; i < cluster_->size(); ++i) {
    EXPECT_EQ(cluster_->node(i).Info("errorstats", "errorstat_MOVED"), "");
  }
  EXPECT_EQ(other->usage().nodes, 3);
}

TEST_F(RespClusterTest, ASlotThatIsMovingIsAskedForAtBothEnds) {
  Store(tier_.get(), Numbers(3), kTwoPiecesBytes);
  const uint32_t number = NumbersOf(0, 1)[0];
  Store(tier_.get(), {number}, kTwoPiecesBytes);
  cluster_->BeginMigration(SlotOf(number), 1);
  EXPECT_EQ(Load(tier_.get(), {number}, kTwoPiecesBytes).right, 1);
  const std::string stem = PieceKeyStem("kvpool", KeyOf(number));
  for (int piece = 0; piece < 3; ++piece) {
    ASSERT_EQ(cluster_->node(0).Command({"MIGRATE", "127.0.0.1", absl::StrCat(cluster_->node(1).port()),
                                         absl::StrCat(stem, piece), "0", "10000"}),
              "OK");
    EXPECT_EQ(Load(tier_.get(), {number}, kTwoPiecesBytes).right, 1) << piece;
  }
  EXPECT_NE(cluster_->node(0).Info("errorstats", "errorstat_ASK"), "");
}

TEST_F(RespClusterTest, SlotsMoveUnderLoad) {
  const std::vector<uint32_t> numbers = NumbersOf(0, 30);
  Store(tier_.get(), numbers);
  std::atomic<bool> stop{false};
  std::atomic<uint32_t> wrong{0}, lost{0}, rounds{0};
  std::thread load([&] {
    while (!stop) {
      const Loaded loaded = Load(tier_.get(), numbers);
      wrong += loaded.wrong;
      lost += 30 - loaded.right - loaded.wrong;
      ++rounds;
    }
  });
  for (const uint32_t number : numbers) {
    if (OwnerOf(number) == 0) cluster_->Migrate(SlotOf(number), 1 + number % 2);
  }
  const uint32_t before = rounds;
  EXPECT_TRUE(Eventually([&] { return rounds > before + 2; }));
  stop = true;
  load.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(Load(tier_.get(), numbers).right, 30);
  // Once the map is known, nobody is sent on.
  EXPECT_TRUE(Eventually([&] {
    const std::string moved = cluster_->node(0).Info("errorstats", "errorstat_MOVED");
    Load(tier_.get(), numbers);
    return cluster_->node(0).Info("errorstats", "errorstat_MOVED") == moved;
  }));
}

TEST_F(RespClusterTest, TheLossOfANodeIsThatOfItsValues) {
  Store(tier_.get(), Numbers(60));
  const std::vector<uint32_t> lost = NumbersOf(0, 10), kept = NumbersOf(1, 10);
  Store(tier_.get(), lost);
  Store(tier_.get(), kept);
  // It is the one that the tier was told of.
  cluster_->node(0).Kill();
  EXPECT_TRUE(Eventually([&] {
    EXPECT_THAT(Load(tier_.get(), lost).results, Each(TierResult::kFailed));
    return tier_->usage().nodes_down == 1;
  }));
  EXPECT_EQ(Load(tier_.get(), kept).right, 10);
  EXPECT_THAT(Store(tier_.get(), NumbersOf(2, 10)), Each(TierResult::kDone));
}

TEST_F(RespClusterTest, ANodeThatTakesOverTheSlotsOfALostOneIsFound) {
  const std::vector<uint32_t> numbers = NumbersOf(0, 10);
  Store(tier_.get(), numbers);
  cluster_->node(0).Kill();
  // What a failover does, without a replica to do it.
  EXPECT_EQ(cluster_->node(1).Command({"CLUSTER", "BUMPEPOCH"}).substr(0, 6), "BUMPED");
  for (uint16_t slot = 0; slot < kRespSlots / 3; ++slot) {
    if (slot != SlotOf(numbers[0])) continue;
    EXPECT_EQ(cluster_->node(1).Command({"CLUSTER", "DELSLOTS", absl::StrCat(slot)}), "OK");
    EXPECT_EQ(cluster_->node(1).Command({"CLUSTER", "ADDSLOTS", absl::StrCat(slot)}), "OK");
  }
  EXPECT_TRUE(Eventually([&] { return Load(tier_.get(), {numbers[0]}).results[0] == TierResult::kMiss; }));
  EXPECT_THAT(Store(tier_.get(), {numbers[0]}), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), {numbers[0]}).right, 1);
}

TEST_F(RespClusterTest, WithoutTheMapEachCommandIsSentOn) {
  RespTier::Options options = RespOptions(cluster_->node(0).endpoint());
  options.cluster = RespCluster::kOff;
  const auto tier = OpenResp(options);
  EXPECT_THAT(Store(tier.get(), Numbers(30)), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier.get(), Numbers(30)).right, 30);
}

}  // namespace
}  // namespace kvpool
