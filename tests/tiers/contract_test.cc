// What tier.h says of every tier.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "server/tiers/file_tier.h"
#include "server/tiers/host_tier.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/key_fixture.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/s3_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr uint64_t kCapacity = 4 << 20;

struct Kind {
  const char* name;
  const char* missing;  // Why `open` answers null.
  std::function<std::unique_ptr<Tier>(const std::string& folder)> open;
};

std::unique_ptr<Tier> OpenFile(const std::string& folder) {
  auto tier = FileTier::Open({.path = folder, .capacity_bytes = kCapacity});
  EXPECT_TRUE(tier.ok()) << tier.status();
  return *std::move(tier);
}

// Each test has a store of its own, empty.
std::unique_ptr<Tier> OpenOnServer(const std::string&) {
  static std::unique_ptr<RedisServer> server;
  if (RedisServer::Program().empty()) return nullptr;
  if (server == nullptr) server = std::make_unique<RedisServer>();
  EXPECT_EQ(server->Command({"FLUSHALL"}), "OK");
  return OpenResp(RespOptions(server->endpoint()));
}

std::unique_ptr<Tier> OpenHost(const std::string&) { return std::make_unique<HostTier>(kCapacity); }

std::unique_ptr<Tier> OpenInBucket(const std::string&) {
  if (S3Server::Program().empty()) return nullptr;
  static S3Server server;
  return OpenS3(S3Options(server));
}

// Seals with one key of all tenants.
std::unique_ptr<Tier> SealedOver(std::unique_ptr<Tier> tier) {
  static const KeyFileFixture keys("* " + KeyDigits('a') + "\n");
  return tier == nullptr ? nullptr : SealTier(std::move(tier), keys);
}

class TierContract : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (tier_ == nullptr) GTEST_SKIP() << GetParam().missing << ": deploy/install_deps.sh test installs one";
  }
  TierFolder folder_;
  std::unique_ptr<Tier> tier_ = GetParam().open(folder_.path());
};
// Tiers that keep to a capacity of their own.
class BoundedTierContract : public TierContract {};

TEST_P(TierContract, WhatIsStoredIsLoaded) {
  EXPECT_THAT(Store(tier_.get(), Numbers(20)), Each(TierResult::kDone));
  EXPECT_THAT(Exists(tier_.get(), {0, 19, 20}), ElementsAre(true, true, false));
  const Loaded loaded = Load(tier_.get(), Numbers(20));
  EXPECT_EQ(loaded.right, 20);
  EXPECT_EQ(loaded.wrong, 0);
}

TEST_P(TierContract, ABatchIsAnsweredInPart) {
  Store(tier_.get(), {1, 3});
  EXPECT_THAT(Load(tier_.get(), {0, 1, 2, 3}).results,
              ElementsAre(TierResult::kMiss, TierResult::kDone, TierResult::kMiss, TierResult::kDone));
}

TEST_P(TierContract, AnEmptyBatchIsNoWork) {
  EXPECT_THAT(Store(tier_.get(), {}), testing::IsEmpty());
  EXPECT_THAT(Load(tier_.get(), {}).results, testing::IsEmpty());
}

TEST_P(TierContract, AnyPartOfTheKeyNamesAnotherValue) {
  Store(tier_.get(), {1});
  const auto differs = [&](const std::function<void(TierKey*)>& change) {
    TierKey key = KeyOf(1);
    change(&key);
    TierResult answer = TierResult::kDone;
    tier_->Load({{key, BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(),
                [&](size_t, TierResult result) { answer = result; });
    tier_->Drain();
    TierPresence found = TierPresence::kYes;
    tier_->Exists({&key, 1}, {&found, 1});
    return answer == TierResult::kMiss && found != TierPresence::kYes;
  };
  EXPECT_TRUE(differs([](TierKey* key) { ++key->space[31]; }));
  EXPECT_TRUE(differs([](TierKey* key) { ++key->block[31]; }));
  EXPECT_TRUE(differs([](TierKey* key) { ++key->group; }));
  EXPECT_TRUE(differs([](TierKey* key) { key->raw = !key->raw; }));
}

TEST_P(TierContract, AValueOfAnotherSizeIsAMiss) {
  Store(tier_.get(), {1});
  EXPECT_THAT(Load(tier_.get(), {1}, kValueBytes + 1).results, ElementsAre(TierResult::kMiss));
  EXPECT_THAT(Load(tier_.get(), {1}, kValueBytes - 1).results, ElementsAre(TierResult::kMiss));
}

TEST_P(TierContract, OneKeyOneContent) {
  Store(tier_.get(), {1});
  EXPECT_THAT(Store(tier_.get(), {1, 1}), Each(TierResult::kDone));
  EXPECT_EQ(tier_->usage().values, 1);
  EXPECT_EQ(Load(tier_.get(), {1, 1, 1}).right, 3);
}

TEST_P(TierContract, WhatIsOfNoUseGivesWayWhereThatIsAskedFor) {
  const auto store = [&](uint32_t content, bool replaces) {
    TierResult answer = TierResult::kMiss;
    tier_->Store({{.key = KeyOf(1), .value = ValueOf(content), .replaces = replaces}},
                 [&](size_t, TierResult result) { answer = result; });
    tier_->Drain();
    return answer;
  };
  EXPECT_EQ(store(2, /*replaces=*/true), TierResult::kDone) << "there may be nothing yet";
  EXPECT_EQ(Load(tier_.get(), {1}).wrong, 1);
  EXPECT_EQ(store(1, /*replaces=*/false), TierResult::kDone);
  EXPECT_EQ(Load(tier_.get(), {1}).wrong, 1) << "one key, one content";
  EXPECT_EQ(store(1, /*replaces=*/true), TierResult::kDone);
  EXPECT_EQ(Load(tier_.get(), {1}).right, 1);
  EXPECT_EQ(tier_->usage().values, 1);
  EXPECT_EQ(tier_->CountOf(OwnerOf(1)).value_or(99), 1);
}

TEST_P(TierContract, ALoadPastItsDeadlineIsLate) {
  Store(tier_.get(), {1});
  EXPECT_THAT(Load(tier_.get(), {1}, kValueBytes, Tier::Deadline::min()).results,
              ElementsAre(TierResult::kLate));
  EXPECT_EQ(Load(tier_.get(), {1}).right, 1);
}

TEST_P(BoundedTierContract, ItStaysWithinItsCapacity) {
  constexpr uint32_t kMany = 3 * kCapacity / kValueBytes;
  uint32_t stored = 0;
  for (const TierResult result : Store(tier_.get(), Numbers(kMany))) stored += result == TierResult::kDone;
  EXPECT_EQ(stored, kMany);
  const TierUsage usage = tier_->usage();
  EXPECT_LE(usage.bytes, kCapacity);
  EXPECT_GE(usage.bytes, kCapacity / 2);
  EXPECT_EQ(usage.values + usage.counters.evicted, kMany);
  const Loaded loaded = Load(tier_.get(), Numbers(kMany));
  EXPECT_EQ(loaded.wrong, 0);
  EXPECT_EQ(loaded.right, usage.values);
}

TEST_P(BoundedTierContract, WhatIsUsedStaysLongest) {
  Store(tier_.get(), {0});
  for (uint32_t i = 1; i < 2 * kCapacity / kValueBytes; ++i) {
    Store(tier_.get(), {i});
    ASSERT_EQ(Load(tier_.get(), {0}).right, 1) << i;
  }
  EXPECT_EQ(Load(tier_.get(), {1}).right, 0);
}

TEST_P(BoundedTierContract, AValueThatIsLargerThanTheTierIsRefused) {
  Store(tier_.get(), Numbers(20));
  EXPECT_THAT(Store(tier_.get(), {100}, kCapacity + 1), ElementsAre(TierResult::kFull));
  EXPECT_EQ(tier_->usage().counters.full, 1);
  EXPECT_EQ(Load(tier_.get(), Numbers(20)).right, 20) << "others' values went for nothing";
}

TEST_P(BoundedTierContract, ASizeThatCameFirstDoesNotKeepTheRoom) {
  Store(tier_.get(), Numbers(2 * kCapacity / kValueBytes));
  constexpr uint64_t kLarge = 100000;
  EXPECT_THAT(Store(tier_.get(), Numbers(20, 100000), kLarge), Each(TierResult::kDone));
  EXPECT_GE(Load(tier_.get(), Numbers(20, 100000), kLarge).right, 15);
}

TEST_P(TierContract, WhatIsErasedIsGoneAndOthersValuesStay) {
  constexpr uint64_t kLarge = 3 << 20;  // It has several pieces, where a store has such.
  Store(tier_.get(), Numbers(20));
  if (tier_->most_value_bytes() > kLarge) Store(tier_.get(), {100}, kLarge);
  const std::vector<TierKey> more = {KeyOf(500)};
  const TierErased erased = tier_->Erase(OwnerOf(0), more);
  EXPECT_GE(erased.values, 10);
  EXPECT_EQ(erased.failed, 0);
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 0);
  const Loaded loaded = Load(tier_.get(), Numbers(20));
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT_EQ(loaded.results[i], i % 2 == 0 ? TierResult::kMiss : TierResult::kDone) << i;
  }
  EXPECT_EQ(loaded.wrong, 0);
  if (tier_->most_value_bytes() > kLarge) {
    EXPECT_THAT(Load(tier_.get(), {100}, kLarge).results, ElementsAre(TierResult::kMiss));
  }
  EXPECT_EQ(tier_->Erase(OwnerOf(0), {}).values, 0) << "once is enough";
  EXPECT_THAT(Store(tier_.get(), {0}), ElementsAre(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), {0}).right, 1) << "it may be there again";
}

TEST_P(TierContract, WhatWasGivenBeforeIsErasedToo) {
  std::vector<TierStore> stores;
  for (const uint32_t number : Numbers(200)) stores.push_back({KeyOf(number), ValueOf(number)});
  std::atomic<uint32_t> answered{0};
  tier_->Store(std::move(stores), [&](size_t, TierResult) { ++answered; });
  tier_->Erase(OwnerOf(0), {});
  tier_->Drain();
  EXPECT_EQ(answered, 200);
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 0);
  EXPECT_EQ(tier_->CountOf(OwnerOf(1)).value_or(99), 100);
  const Loaded loaded = Load(tier_.get(), Numbers(200));
  EXPECT_EQ(loaded.right, 100);
}

TEST_P(TierContract, ManyThreadsAtOnce) {
  std::atomic<uint32_t> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t round = 0; round < 30; ++round) {
        Store(tier_.get(), Numbers(40, (t % 2 * 40 + round * 20) % 1200));
        wrong += Load(tier_.get(), Numbers(40, round * 37 % 1200)).wrong;
        if (round % 10 == t) tier_->Erase(OwnerOf(t), {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(tier_->usage().waiting, 0);
  EXPECT_EQ(tier_->usage().counters.corrupt, 0);
}

const Kind kHost{"Host", "", OpenHost};
const Kind kFile{"File", "", OpenFile};
const Kind kFaulty{"Faulty", "",
                   [](const std::string& folder) { return std::make_unique<FaultyTier>(OpenFile(folder)); }};
const Kind kResp{"Resp", "no redis-server", OpenOnServer};
const Kind kS3{"S3", "no weed", OpenInBucket};
const Kind kSealedFile{"SealedFile", "",
                       [](const std::string& folder) { return SealedOver(OpenFile(folder)); }};
const Kind kSealedResp{"SealedResp", "no redis-server",
                       [](const std::string& folder) { return SealedOver(OpenOnServer(folder)); }};
const Kind kSealedS3{"SealedS3", "no weed",
                     [](const std::string& folder) { return SealedOver(OpenInBucket(folder)); }};
std::string NameOf(const testing::TestParamInfo<Kind>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Tiers, TierContract,
                         testing::Values(kHost, kFile, kFaulty, kResp, kS3, kSealedFile, kSealedResp,
                                         kSealedS3),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Tiers, BoundedTierContract, testing::Values(kHost, kFile, kFaulty, kSealedFile),
                         NameOf);

}  // namespace
}  // namespace kvpool
