// Two daemons as two nodes on one store: what the first computes the second finds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/tiers/resp_tier.h"
#include "tests/service/service_fixture.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/s3_server.h"

namespace kvpool {
namespace {

// A daemon of one slab, and an engine whose blocks have their key as their bytes.
class Node : public ServiceTest {
 public:
  Node(const RedisServer& store, const std::string& secret, TierWrite write = TierWrite::kSeal)
      : Node(OpenResp(RespOptions(store.endpoint())), secret, write) {}
  Node(std::unique_ptr<Tier> tier, const std::string& secret, TierWrite write = TierWrite::kSeal) {
    tier_ = tier.get();
    options_.tiers = {{std::move(tier), {.when = write}}};
    options_.tier_secret = secret;
    StartDaemon(2);
    engine_ = OpenEngine(OpenRequest());
    Settle({engine_.get()});
  }
  // What is to be moved is.
  void Move() {
    do {
      tier_->Drain();
    } while (daemon_->MoveTierOnce());
  }
  void Compute(const std::vector<std::string>& keys) {
    const std::vector<uint64_t> blocks = engine_->Lease(static_cast<uint32_t>(keys.size()));
    ASSERT_EQ(blocks.size(), keys.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      for (uint64_t at = 0; at < kBlockBytes; at += keys[i].size()) {
        std::memcpy(At(blocks[i]) + at, keys[i].data(), keys[i].size());
      }
    }
    engine_->Seal(blocks, keys);
    Move();
  }
  v1::MatchResult Match(const std::vector<std::string>& keys) { return engine_->Match(keys); }
  // The first match of these keys, and it waits.
  v1::MatchResult Await(const std::vector<std::string>& keys) {
    v1::Operation operation = MatchOp(keys);
    operation.mutable_match()->set_wait_ms(60000);
    std::optional<v1::OperationResult> answer;
    engine_->Send(operation, &answer);
    Move();
    EXPECT_TRUE(answer.has_value());
    if (!answer.has_value()) return {};
    EXPECT_EQ(answer->code(), 0) << answer->message();
    for (int i = 0; i < answer->match().groups(0).blocks_size(); ++i) {
      const char* const bytes = At(answer->match().groups(0).blocks(i));
      const std::string& key = keys[static_cast<size_t>(i)];
      EXPECT_EQ(std::string(bytes, key.size()), key) << i;
    }
    return answer->match();
  }
  void Prefetch(const std::vector<std::string>& keys) {
    v1::Operation operation = MatchOp(keys);
    operation.mutable_match()->set_prefetch(true);
    engine_->Do(operation);
    Move();
  }
  BelowCounters counters() { return daemon_->Snapshot().spaces.at(0).below; }
  TierUsage usage() const { return tier_->usage(); }

 private:
  void TestBody() override {}
  char* At(uint64_t ref) const {
    return scripts_.back()->memory + Index(BlockRef::Unpack(ref).id) * kBlockBytes;
  }
  Tier* tier_ = nullptr;
  std::unique_ptr<Engine> engine_;
};

class SharedTier : public testing::Test {
 protected:
  void SetUp() override {
    if (RedisServer::Program().empty()) {
      GTEST_SKIP() << "no redis-server: deploy/install_deps.sh test installs one";
    }
    store_ = std::make_unique<RedisServer>();
    first_ = std::make_unique<Node>(*store_, kSecret);
    second_ = std::make_unique<Node>(*store_, kSecret);
  }
  const std::string kSecret = std::string(32, 's');
  const std::vector<std::string> keys_ = Keys("k", 10);
  std::unique_ptr<RedisServer> store_;
  std::unique_ptr<Node> first_, second_;
};

TEST_F(SharedTier, TheFirstMatchThatWaitsFindsWhatAnotherNodeComputed) {
  first_->Compute(keys_);
  EXPECT_EQ(second_->Await(keys_).tokens(), 160);
  EXPECT_EQ(second_->counters().promoted, 10);
}

TEST_F(SharedTier, APrefetchFindsItToo) {
  first_->Compute(keys_);
  second_->Prefetch(keys_);
  EXPECT_EQ(second_->Match(keys_).tokens(), 160);
}

TEST_F(SharedTier, AMatchThatDoesNotWaitIsToldTheNextTime) {
  first_->Compute(keys_);
  const v1::MatchResult at_first = second_->Match(keys_);
  EXPECT_EQ(at_first.below_tokens(), 0);
  EXPECT_TRUE(at_first.may_be_below());
  EXPECT_TRUE(Eventually([&] { return second_->Match(keys_).below_tokens() == 160; }));
}

TEST_F(SharedTier, WhetherMoreMayBeThereIsSaid) {
  // Once the store has said no, a match need not wait.
  EXPECT_TRUE(second_->Match(keys_).may_be_below());
  EXPECT_TRUE(Eventually([&] { return !second_->Match(keys_).may_be_below(); }));
  // What is behind a block that is not there is of no use, whatever the store says of it.
  first_->Compute({keys_.begin() + 1, keys_.end()});
  EXPECT_FALSE(second_->Match(keys_).may_be_below());
  // What is resident is not asked for.
  second_->Compute(keys_);
  const v1::MatchResult resident = second_->Match(keys_);
  EXPECT_EQ(resident.tokens(), 160);
  EXPECT_FALSE(resident.may_be_below());
}

TEST_F(SharedTier, OnlyWhatIsThereComesUp) {
  first_->Compute({keys_.begin(), keys_.begin() + 4});
  EXPECT_EQ(second_->Await(keys_).tokens(), 64);
  // That somebody looked is no loss.
  EXPECT_EQ(second_->counters().lost, 0);
  EXPECT_EQ(second_->Await(Keys("n", 10)).tokens(), 0);
  EXPECT_EQ(second_->counters().lost, 0);
}

TEST_F(SharedTier, WhatBothComputeIsWrittenOnce) {
  first_->Compute(keys_);
  second_->Compute(keys_);
  EXPECT_EQ(second_->counters().demoted, 10);
  EXPECT_EQ(store_->Info("commandstats", "cmdstat_set").substr(0, 9), "calls=10,");
}

TEST_F(SharedTier, ANodeWithAnotherSecretFindsNothing) {
  first_->Compute(keys_);
  Node other(*store_, std::string(32, 't'));
  EXPECT_EQ(other.Await(keys_).tokens(), 0);
}

TEST_F(SharedTier, WithoutTheStoreNoVerbFails) {
  first_->Compute(keys_);
  store_->Kill();
  EXPECT_EQ(second_->Await(keys_).tokens(), 0);
  second_->Compute(keys_);
  EXPECT_EQ(second_->Match(keys_).tokens(), 160);
  EXPECT_EQ(second_->counters().demoted, 0);
  EXPECT_TRUE(Eventually([&] { return second_->usage().nodes_down == 1; }));
  EXPECT_EQ(second_->Await(Keys("n", 4)).tokens(), 0);
}

// The same in a bucket: a server of it takes 3 seconds to start.
TEST(SharedBucket, WhatOneNodeComputesAnotherFindsAndWithoutTheStoreNoVerbFails) {
  if (S3Server::Program().empty()) GTEST_SKIP() << "no weed: deploy/install_deps.sh test installs one";
  S3Server store;
  const S3Tier::Options options = S3Options(store);
  const std::string secret(32, 's');
  Node first(OpenS3(options), secret), second(OpenS3(options), secret), third(OpenS3(options), secret),
      other(OpenS3(options), std::string(32, 't'));
  const std::vector<std::string> keys = Keys("k", 10);
  first.Compute(keys);
  EXPECT_EQ(second.Await(keys).tokens(), 160);
  EXPECT_EQ(second.counters().promoted, 10);
  EXPECT_EQ(other.Await(keys).tokens(), 0);
  EXPECT_EQ(third.Match(keys).below_tokens(), 0);
  EXPECT_TRUE(Eventually([&] { return third.Match(keys).below_tokens() == 160; }));
  store.Kill();
  EXPECT_EQ(third.Await(keys).tokens(), 0);
  third.Compute(keys);
  EXPECT_EQ(third.Match(keys).tokens(), 160);
  EXPECT_TRUE(Eventually([&] {
    third.Await(Keys("n", 4));
    return third.usage().nodes_down == 1;
  }));
  EXPECT_EQ(third.Await(Keys("m", 4)).tokens(), 0);
}

}  // namespace
}  // namespace kvpool
