// What a sealed tier's store has, what becomes of it when keys come and go, and what those can do who write to the store.
#include "server/tiers/sealed_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "server/tiers/file_io.h"
#include "server/tiers/file_tier.h"
#include "server/tiers/host_tier.h"
#include "server/tiers/sealed_value.h"
#include "server/tiers/tier_secret.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/key_fixture.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;
using testing::ElementsAre;

const std::string kLineA = "* " + KeyDigits('a') + "\n", kLineB = "* " + KeyDigits('b') + "\n";

std::unique_ptr<FileTier> OpenFolder(const TierFolder& folder) {
  auto tier = FileTier::Open({.path = folder.path(), .capacity_bytes = 4 << 20});
  EXPECT_TRUE(tier.ok()) << tier.status();
  return *std::move(tier);
}

// A sealed tier whose store the test can look into, and write to.
class SealedTierTest : public testing::Test {
 protected:
  static constexpr uint64_t kSealedBytes = kValueBytes + kSealBytes;

  TierKey KeyOfTenant(const std::string& tenant, uint32_t number = 1) const {
    TierKey key = KeyOf(number);
    key.owner = DeriveTierOwner(TestTierSecret(), tenant);
    return key;
  }
  TierResult StoreOne(const TierKey& key, uint32_t content = 1) {
    TierResult answer = TierResult::kFailed;
    tier_->Store({{key, ValueOf(content)}}, [&](size_t, TierResult result) { answer = result; });
    tier_->Drain();
    return answer;
  }
  TierResult LoadOne(const TierKey& key, uint32_t content = 1) {
    TierResult answer = TierResult::kFailed;
    const auto into = BufferStock(0).Take(kValueBytes);
    tier_->Load({{key, into}}, Tier::Deadline::max(), [&](size_t, TierResult result) { answer = result; });
    tier_->Drain();
    if (answer == TierResult::kDone) {
      EXPECT_EQ(std::memcmp(into->data(), ValueOf(content)->data(), kValueBytes), 0);
    }
    return answer;
  }
  bool IsThere(const TierKey& key) {
    TierPresence found = TierPresence::kUnknown;
    tier_->Exists({&key, 1}, {&found, 1});
    return found == TierPresence::kYes;
  }
  // What the store has.
  std::shared_ptr<TierBuffer> Lies(const TierKey& key) {
    auto sealed = BufferStock(0).Take(kSealedBytes);
    TierResult answer = TierResult::kFailed;
    store_->Load({{SealedName(key), sealed}}, Tier::Deadline::max(),
                 [&](size_t, TierResult result) { answer = result; });
    EXPECT_EQ(answer, TierResult::kDone);
    return sealed;
  }
  void Put(const TierKey& key, std::shared_ptr<const TierBuffer> sealed) {
    store_->Store({{.key = SealedName(key), .value = std::move(sealed), .replaces = true}},
                  [](size_t, TierResult result) { EXPECT_EQ(result, TierResult::kDone); });
  }
  TierCounters counters() { return tier_->usage().counters; }

  KeyFileFixture keys_{kLineA};
  HostTier* store_ = new HostTier(16 << 20);
  std::unique_ptr<SealedTier> tier_ = SealTier(std::unique_ptr<Tier>(store_), keys_);
};

// ------------------------------------------------------------------------------------------------- what lies there

TEST(SealedFolder, NothingOfAValueIsOnTheDisk) {
  const auto words = [](uint32_t number) {
    std::vector<std::string> all;
    for (uint64_t at = 0; at + 16 <= kValueBytes; at += 16)
      all.emplace_back(ValueOf(number)->data() + at, 16);
    return all;
  };
  const auto found = [&](const TierFolder& folder) {
    std::string disk;
    for (const std::string& path : folder.Segments()) {
      std::ifstream file(path, std::ios::binary);
      disk.append(std::istreambuf_iterator<char>(file), {});
    }
    size_t words_found = 0;
    for (uint32_t number = 0; number < 3; ++number) {
      for (const std::string& word : words(number)) words_found += absl::StrContains(disk, word);
    }
    return words_found;
  };
  TierFolder in_the_clear, sealed;
  Store(OpenFolder(in_the_clear).get(), Numbers(3));
  EXPECT_EQ(found(in_the_clear), 3 * words(0).size());
  const KeyFileFixture keys(kLineA);
  const auto tier = SealTier(OpenFolder(sealed), keys);
  EXPECT_THAT(Store(tier.get(), Numbers(3)), Each(TierResult::kDone));
  EXPECT_EQ(found(sealed), 0);
  EXPECT_EQ(Load(tier.get(), Numbers(3)).right, 3);
}

TEST(SealedFolder, IsThereForTheNextDaemonThatHasTheKey) {
  TierFolder folder;
  KeyFileFixture keys(kLineA);
  Store(SealTier(OpenFolder(folder), keys).get(), Numbers(20));
  EXPECT_EQ(Load(SealTier(OpenFolder(folder), keys).get(), Numbers(20)).right, 20);
  const KeyFileFixture others(kLineB);
  const auto tier = SealTier(OpenFolder(folder), others);
  EXPECT_THAT(Load(tier.get(), Numbers(20)).results, Each(TierResult::kMiss));
  EXPECT_EQ(tier->usage().counters.no_key, 20);
  EXPECT_EQ(tier->usage().counters.missed, 0);
}

TEST(SealedFolder, WhatWasWrittenInTheClearIsNotFoundAndHindersNobody) {
  TierFolder folder;
  const KeyFileFixture keys(kLineA);
  Store(OpenFolder(folder).get(), Numbers(4));
  {
    const auto tier = SealTier(OpenFolder(folder), keys);
    EXPECT_THAT(Exists(tier.get(), Numbers(4)), Each(false));
    EXPECT_THAT(Load(tier.get(), Numbers(4)).results, Each(TierResult::kMiss));
    EXPECT_EQ(tier->usage().counters.corrupt, 0);
    EXPECT_THAT(Store(tier.get(), Numbers(4)), Each(TierResult::kDone));
    EXPECT_EQ(Load(tier.get(), Numbers(4)).right, 4);
    EXPECT_EQ(tier->CountOf(OwnerOf(0)).value_or(0), 4) << "both are its tenant's";
    EXPECT_EQ(tier->Erase(OwnerOf(0), {}).values, 4);
  }
  const auto plain = OpenFolder(folder);
  EXPECT_THAT(Load(plain.get(), Numbers(4)).results,
              ElementsAre(TierResult::kMiss, TierResult::kDone, TierResult::kMiss, TierResult::kDone));
}

// Two daemons that are started with the same keys agree on nothing else.
TEST_F(SealedTierTest, NodesWriteTheSameForTheSameAndNoSaltServesTwoValues) {
  auto* const other_store = new HostTier(16 << 20);
  const auto other = SealTier(std::unique_ptr<Tier>(other_store), keys_);
  constexpr uint32_t kMany = 1000;
  Store(tier_.get(), Numbers(kMany));
  // Of every second one it has computed other bytes.
  std::vector<TierStore> stores;
  for (const uint32_t number : Numbers(kMany))
    stores.push_back({KeyOf(number), ValueOf(number % 2 == 0 ? number : number + kMany)});
  other->Store(std::move(stores), [](size_t, TierResult result) { EXPECT_EQ(result, TierResult::kDone); });
  other->Drain();
  std::set<std::string> salts, bodies;
  for (const uint32_t number : Numbers(kMany)) {
    for (HostTier* const store : {store_, other_store}) {
      const auto sealed = BufferStock(0).Take(kSealedBytes);
      store->Load({{SealedName(KeyOf(number)), sealed}}, Tier::Deadline::max(),
                  [](size_t, TierResult result) { ASSERT_EQ(result, TierResult::kDone); });
      salts.insert(std::string(sealed->data() + 24, 24));
      bodies.insert(std::string(sealed->data() + kSealBytes, kValueBytes));
    }
  }
  EXPECT_EQ(salts.size(), kMany + kMany / 2);
  EXPECT_EQ(bodies.size(), kMany + kMany / 2);
}

// ----------------------------------------------------------------------------------------------- keys that change

TEST_F(SealedTierTest, AfterARotationTheOldKeyOpensAndTheNewOneSeals) {
  StoreOne(KeyOf(1), 1);
  const auto before = SealedWith(*Lies(KeyOf(1)));
  keys_.Change(kLineB + kLineA);
  EXPECT_EQ(LoadOne(KeyOf(1), 1), TierResult::kDone);
  StoreOne(KeyOf(2), 2);
  EXPECT_NE(SealedWith(*Lies(KeyOf(2))), before);
  keys_.Change(kLineB);
  EXPECT_TRUE(IsThere(KeyOf(1))) << "nobody has tried";
  EXPECT_EQ(LoadOne(KeyOf(1), 1), TierResult::kMiss);
  EXPECT_FALSE(IsThere(KeyOf(1)));
  EXPECT_EQ(LoadOne(KeyOf(2), 2), TierResult::kDone);
  EXPECT_EQ(counters().no_key, 1);
  EXPECT_EQ(counters().corrupt, 0);
}

TEST_F(SealedTierTest, WhatIsShutIsAskedForOnceAndGivesWayToAStore) {
  StoreOne(KeyOf(1));
  keys_.Change(kLineB);
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss);
  const uint64_t loads = store_->usage().counters.loaded;
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss);
  EXPECT_EQ(store_->usage().counters.loaded, loads) << "the store was asked again";
  EXPECT_EQ(counters().no_key, 1);
  EXPECT_EQ(counters().missed, 1);
  keys_.Change(kLineA);
  EXPECT_TRUE(IsThere(KeyOf(1)));
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kDone) << "the key is back";
  keys_.Change(kLineB);
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss);
  EXPECT_EQ(StoreOne(KeyOf(1)), TierResult::kDone);
  EXPECT_TRUE(IsThere(KeyOf(1)));
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kDone);
  EXPECT_EQ(store_->usage().values, 1);
}

TEST_F(SealedTierTest, WhatIsShutIsLookedAtAgainAfterAWhile) {
  StoreOne(KeyOf(1));
  const auto of_another_key = Lies(KeyOf(1));
  keys_.Change(kLineB);
  for (const bool soon : {false, true}) {
    tier_ = SealTier(std::unique_ptr<Tier>(store_ = new HostTier(16 << 20)), keys_,
                     {.buffer_bytes = 8 << 20, .shut_for = std::chrono::minutes(soon ? 0 : 1)});
    StoreOne(KeyOf(1));
    const auto good = Lies(KeyOf(1));
    Put(KeyOf(1), of_another_key);
    EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss);
    Put(KeyOf(1), good);  // Another node does that.
    EXPECT_EQ(LoadOne(KeyOf(1)), soon ? TierResult::kDone : TierResult::kMiss);
  }
}

TEST_F(SealedTierTest, ATenantWhoseKeyIsGoneHasNothingUntilItIsBack) {
  const std::string acme = "acme " + KeyDigits('c') + "\n", guest = "guest " + KeyDigits('d') + "\n";
  keys_.Change(acme + guest);
  EXPECT_EQ(StoreOne(KeyOfTenant("acme", 1), 1), TierResult::kDone);
  EXPECT_EQ(StoreOne(KeyOfTenant("guest", 2), 2), TierResult::kDone);
  keys_.Change(guest);
  EXPECT_FALSE(IsThere(KeyOfTenant("acme", 1)));
  EXPECT_EQ(LoadOne(KeyOfTenant("acme", 1), 1), TierResult::kMiss);
  EXPECT_EQ(StoreOne(KeyOfTenant("acme", 3), 3), TierResult::kFull) << "there is no key to seal it with";
  EXPECT_EQ(counters().no_key, 2);
  EXPECT_EQ(counters().full, 0);
  EXPECT_EQ(store_->usage().values, 2) << "nothing of it was written";
  EXPECT_EQ(LoadOne(KeyOfTenant("guest", 2), 2), TierResult::kDone);
  keys_.Change(acme + guest);
  EXPECT_TRUE(IsThere(KeyOfTenant("acme", 1)));
  EXPECT_EQ(LoadOne(KeyOfTenant("acme", 1), 1), TierResult::kDone);
}

TEST_F(SealedTierTest, WhatTheFileHasNoMoreIsInNobodysMemory) {
  StoreOne(KeyOf(1));
  keys_.Change(kLineB);
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss) << "it is remembered by which keys that was";
  const std::weak_ptr<const EncryptionKeys> before = keys_.file()->keys();
  keys_.Change(kLineA);
  // A thread may be in the middle of something.
  EXPECT_TRUE(Eventually([&] { return before.expired(); }));
}

TEST_F(SealedTierTest, AKeyOfAllOthersDoesNotStandInForATenantsOwn) {
  const std::string acme = "acme " + KeyDigits('c') + "\n";
  StoreOne(KeyOfTenant("acme", 1), 1);
  keys_.Change(acme + kLineA);
  EXPECT_EQ(LoadOne(KeyOfTenant("acme", 1), 1), TierResult::kMiss) << "it was sealed with that of all others";
  EXPECT_EQ(StoreOne(KeyOfTenant("acme", 1), 1), TierResult::kDone);
  keys_.Change(kLineA);
  EXPECT_EQ(LoadOne(KeyOfTenant("acme", 1), 1), TierResult::kMiss) << "its own is gone";
  EXPECT_EQ(StoreOne(KeyOfTenant("acme", 2), 2), TierResult::kDone) << "it is one of all others now";
  keys_.Change("acme none\n" + kLineA);
  EXPECT_EQ(LoadOne(KeyOfTenant("acme", 2), 2), TierResult::kMiss);
  EXPECT_EQ(StoreOne(KeyOfTenant("acme", 3), 3), TierResult::kFull) << "it has none by its line";
}

// ---------------------------------------------------------------------------- those who can write to the store

TEST_F(SealedTierTest, AFlippedBitIsFoundToldOnceAndGivesWay) {
  StoreOne(KeyOf(1));
  const auto good = Lies(KeyOf(1));
  for (const uint64_t at : {0, 7, 24, 47, 48, 63, 64, 5063}) {
    const auto bad = BufferStock(0).Take(kSealedBytes);
    std::memcpy(bad->data(), good->data(), kSealedBytes);
    bad->data()[at] = static_cast<char>(bad->data()[at] ^ 0x10);
    Put(KeyOf(1), bad);
    const uint64_t corrupt = counters().corrupt;
    EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kCorrupt) << at;
    EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss) << at;
    EXPECT_FALSE(IsThere(KeyOf(1)));
    EXPECT_EQ(counters().corrupt, corrupt + 1);
    EXPECT_EQ(StoreOne(KeyOf(1)), TierResult::kDone);
    EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kDone) << at;
  }
  EXPECT_EQ(counters().no_key, 0);
}

TEST_F(SealedTierTest, AnIdThatNoKeyHasIsAMiss) {
  StoreOne(KeyOf(1));
  const auto bad = Lies(KeyOf(1));
  bad->data()[8] = static_cast<char>(bad->data()[8] ^ 1);
  Put(KeyOf(1), bad);
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kMiss);
  EXPECT_EQ(counters().no_key, 1);
}

TEST_F(SealedTierTest, AValueOfAnotherNameOrTenantDoesNotOpen) {
  StoreOne(KeyOf(1), 1);
  StoreOne(KeyOf(3), 3);
  const auto first = Lies(KeyOf(1)), third = Lies(KeyOf(3));
  Put(KeyOf(1), third);
  Put(KeyOf(3), first);
  EXPECT_EQ(LoadOne(KeyOf(1), 1), TierResult::kCorrupt);
  EXPECT_EQ(LoadOne(KeyOf(3), 3), TierResult::kCorrupt);
  // The owner is no part of the name, and yet what the tag covers.
  StoreOne(KeyOf(5), 5);
  TierKey stolen = KeyOf(5);
  stolen.owner = OwnerOf(0);
  EXPECT_EQ(LoadOne(stolen, 5), TierResult::kCorrupt);
}

// One key, one content: what was there before is what is to be there.
TEST_F(SealedTierTest, AnOlderValueOfTheSameNameIsAsGood) {
  StoreOne(KeyOf(1), 1);
  const auto older = Lies(KeyOf(1));
  tier_->Erase(OwnerOf(1), {});
  StoreOne(KeyOf(1), 2);
  Put(KeyOf(1), older);
  EXPECT_EQ(LoadOne(KeyOf(1), 1), TierResult::kDone);
}

TEST_F(SealedTierTest, SomethingElseOfTheSameSizeIsCorrupt) {
  Put(KeyOf(1), ValueOf(1, kSealedBytes));
  EXPECT_EQ(LoadOne(KeyOf(1)), TierResult::kCorrupt);
}

// ---------------------------------------------------------------------------------------------- memory and time

// A disk on which no value is written before it is let.
class HungDisk : public FileIo {
 public:
  absl::Status Write(int fd, const void* data, uint64_t bytes, uint64_t at) override {
    if (bytes == WholePages(kValueBytes + kSealBytes)) hung_.wait(true);
    return FileIo::Write(fd, data, bytes, at);
  }
  void Go() {
    hung_ = false;
    hung_.notify_all();
  }

 private:
  std::atomic<bool> hung_{true};
};

TEST(SealedBuffers, BoundWhatIsUnderWayEachWay) {
  const KeyFileFixture keys(kLineA);
  TierFolder folder;
  HungDisk disk;
  auto folder_tier =
      FileTier::Open({.path = folder.path(), .capacity_bytes = 4 << 20, .threads = 8, .io = &disk});
  ASSERT_TRUE(folder_tier.ok()) << folder_tier.status();
  FileTier* const behind = folder_tier->get();
  // Three values, each of two pages.
  const auto tier = SealTier(*std::move(folder_tier), keys, {.buffer_bytes = 3 * 2 * kTierPageBytes});
  std::atomic<uint32_t> done{0};
  std::vector<TierStore> stores;
  for (const uint32_t number : Numbers(20)) stores.push_back({KeyOf(number), ValueOf(number)});
  tier->Store(std::move(stores), [&](size_t, TierResult result) { done += result == TierResult::kDone; });
  ASSERT_TRUE(Eventually([&] { return behind->usage().waiting == 3; }));
  // Loads have buffers of their own.
  std::atomic<uint32_t> missed{0};
  for (const uint32_t number : Numbers(10, 100)) {
    tier->Load({{KeyOf(number), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(),
               [&](size_t, TierResult result) { missed += result == TierResult::kMiss; });
  }
  ASSERT_TRUE(Eventually([&] { return missed == 10; }));
  EXPECT_EQ(behind->usage().waiting, 3) << "no more than there are buffers for";
  EXPECT_EQ(tier->usage().waiting, 20);
  EXPECT_EQ(done, 0);
  disk.Go();
  tier->Drain();
  EXPECT_EQ(done, 20);
  EXPECT_EQ(Load(tier.get(), Numbers(20)).right, 20);
}

TEST(SealedBuffers, AValueThatFillsThemAllHasItsPlace) {
  const KeyFileFixture keys(kLineA);
  constexpr uint64_t kAll = 64 * kTierPageBytes;
  const auto tier = SealTier(std::make_unique<HostTier>(16 << 20), keys, {.buffer_bytes = kAll});
  EXPECT_EQ(tier->most_value_bytes(), kAll);
  EXPECT_THAT(Store(tier.get(), {1, 2, 3}, kAll), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier.get(), {1, 2, 3}, kAll).right, 3);
  EXPECT_THAT(Store(tier.get(), {4}, kAll + 1), ElementsAre(TierResult::kFull));
  EXPECT_THAT(Load(tier.get(), {4}, kAll + 1).results, ElementsAre(TierResult::kFull));
  EXPECT_EQ(tier->usage().counters.full, 2);
}

TEST(SealedBuffers, AnEndWithMuchUnderWayAnswersAll) {
  const KeyFileFixture keys(kLineA);
  std::atomic<uint32_t> answered{0};
  for (uint32_t round = 0; round < 20; ++round) {
    const auto tier = SealTier(std::make_unique<HostTier>(16 << 20), keys, {.buffer_bytes = 64 << 10});
    for (const uint32_t number : Numbers(20)) {
      tier->Store({{KeyOf(number), ValueOf(number)}}, [&](size_t, TierResult) { ++answered; });
      tier->Load({{KeyOf(number), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(),
                 [&](size_t, TierResult) { ++answered; });
    }
  }
  EXPECT_EQ(answered, 20 * 2 * 20);
}

TEST(SealedBuffers, MoreThanMayWaitIsRefused) {
  const KeyFileFixture keys(kLineA);
  TierFolder folder;
  HungDisk disk;
  auto behind = FileTier::Open({.path = folder.path(), .capacity_bytes = 4 << 20, .io = &disk});
  ASSERT_TRUE(behind.ok()) << behind.status();
  const auto tier = SealTier(*std::move(behind), keys, {.buffer_bytes = 2 * kTierPageBytes});
  std::atomic<size_t> full{0};
  std::vector<TierStore> stores(SealedTier::kMostWaiting + 100, {KeyOf(1), ValueOf(1)});
  tier->Store(std::move(stores), [&](size_t, TierResult result) { full += result == TierResult::kFull; });
  EXPECT_GE(full, 99) << "one may be under way";
  EXPECT_LE(full, 100);
  disk.Go();
  tier->Drain();
}

// ---------------------------------------------------------------------------------------------------- erasing

TEST(SealedStore, NothingIsBroughtAfterAnErasure) {
  constexpr uint64_t kLarge = 16 << 20;  // It takes milliseconds to open.
  const KeyFileFixture keys(kLineA);
  auto* const store = new HostTier(2 * kLarge);
  auto* const faulty = new FaultyTier(std::unique_ptr<Tier>(store));
  const auto tier = SealTier(std::unique_ptr<Tier>(faulty), keys, {.buffer_bytes = kLarge});
  Store(tier.get(), {0}, kLarge);
  faulty->hangs = true;
  std::atomic<uint32_t> answered{0};
  tier->Load({{KeyOf(0), BufferStock(0).Take(kLarge)}}, Tier::Deadline::max(),
             [&](size_t, TierResult) { ++answered; });
  ASSERT_TRUE(Eventually([&] { return faulty->held() == 1; }));
  store->Erase(OwnerOf(0), {});
  // The store's answer of before comes while it erases what is left.
  faulty->on_erase = [&] { faulty->Answer(); };
  tier->Erase(OwnerOf(0), {});
  EXPECT_EQ(answered, 1);
}

TEST(SealedStore, AnErasureAlsoAsksForWhatWasWrittenInTheClear) {
  if (RedisServer::Program().empty())
    GTEST_SKIP() << "no redis-server: deploy/install_deps.sh test installs one";
  RedisServer server;
  const KeyFileFixture keys(kLineA);
  // Another node, which has no keys: what it wrote is nothing that this one knows of.
  Store(OpenResp(RespOptions(server.endpoint())).get(), {0});
  const auto tier = SealTier(OpenResp(RespOptions(server.endpoint())), keys);
  Store(tier.get(), {0});
  const std::vector<TierKey> named = {KeyOf(0)};
  EXPECT_EQ(tier->Erase(OwnerOf(0), named).values, 2);
  EXPECT_EQ(server.Command({"DBSIZE"}), "0");
}

}  // namespace
}  // namespace kvpool
