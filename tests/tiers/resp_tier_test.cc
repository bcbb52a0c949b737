// The resp tier on one real server, and what such servers do at times.
#include "server/tiers/resp_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::AnyOf;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr uint64_t kLargeBytes = 3 * kMostPieceBytes + 1000;

class RespTierTest : public testing::Test {
 protected:
  void SetUp() override {
    if (RedisServer::Program().empty()) {
      GTEST_SKIP() << "no redis-server: deploy/install_deps.sh test installs one";
    }
  }
  void Begin(const RedisServer::Options& server = {}) {
    server_ = std::make_unique<RedisServer>(server);
    tier_ = OpenResp(RespOptions(server_->endpoint()));
  }
  std::string KeyAt(uint32_t number, uint32_t piece) const {
    return absl::StrCat(PieceKeyStem("kvpool", KeyOf(number)), piece);
  }
  // Another daemon on the same store.
  std::unique_ptr<RespTier> Other() const { return OpenResp(RespOptions(server_->endpoint())); }
  // The tier comes to know of a key by itself.
  static bool Finds(Tier* tier, uint32_t number) {
    return Eventually([&]() -> bool { return Exists(tier, {number})[0]; });
  }

  std::unique_ptr<RedisServer> server_;
  std::unique_ptr<RespTier> tier_;
};

TEST_F(RespTierTest, ValuesOfManyPiecesComeBack) {
  Begin();
  for (const uint64_t bytes :
       {uint64_t{1}, kMostPieceBytes - 1, kMostPieceBytes, kMostPieceBytes + 1, kLargeBytes}) {
    const auto number = static_cast<uint32_t>(bytes);
    EXPECT_THAT(Store(tier_.get(), {number}, bytes), ElementsAre(TierResult::kDone));
    EXPECT_EQ(server_->Keys(PieceKeyStem("kvpool", KeyOf(number)) + "*").size(), PiecesOf(bytes));
    EXPECT_EQ(Load(tier_.get(), {number}, bytes).right, 1) << bytes;
  }
}

TEST_F(RespTierTest, WhatOneDaemonStoresAnotherLoads) {
  Begin();
  Store(tier_.get(), Numbers(20));
  Store(tier_.get(), {100}, kLargeBytes);
  const auto other = Other();
  EXPECT_EQ(Load(other.get(), Numbers(20)).right, 20);
  EXPECT_EQ(Load(other.get(), {100}, kLargeBytes).right, 1);
}

TEST_F(RespTierTest, AKeyThatIsNotKnownIsAskedAbout) {
  Begin();
  Store(tier_.get(), {1});
  const auto other = Other();
  const std::vector<TierKey> keys = {KeyOf(1), KeyOf(2)};
  std::vector<TierPresence> found(2);
  other->Exists(keys, absl::MakeSpan(found));
  EXPECT_THAT(found, Each(TierPresence::kUnknown));
  EXPECT_TRUE(Finds(other.get(), 1));
  EXPECT_TRUE(Eventually([&] {
    other->Exists(keys, absl::MakeSpan(found));
    return found[1] == TierPresence::kNo;
  }));
  // Whoever was told so a moment ago does not ask again. Once it is stored it is known, whatever was said of it before.
  const std::string asked = server_->Info("commandstats", "cmdstat_exists");
  Store(other.get(), {2});
  EXPECT_EQ(server_->Info("commandstats", "cmdstat_exists"), asked);
  EXPECT_THAT(Exists(other.get(), {2}), ElementsAre(true));
}

TEST_F(RespTierTest, WhatIsThereIsNotWrittenAgain) {
  Begin();
  Store(tier_.get(), {1});
  const std::string calls = "cmdstat_set";
  const std::string before = server_->Info("commandstats", calls);
  EXPECT_THAT(Store(tier_.get(), {1}), ElementsAre(TierResult::kDone));
  const auto other = Other();
  EXPECT_THAT(Store(other.get(), {1}), ElementsAre(TierResult::kDone));
  EXPECT_EQ(server_->Info("commandstats", calls), before);
}

TEST_F(RespTierTest, ValuesEndWithTheirTime) {
  server_ = std::make_unique<RedisServer>();
  RespTier::Options options = RespOptions(server_->endpoint());
  options.ttl = std::chrono::hours(1);
  options.prefix = "team:a";
  tier_ = OpenResp(options);
  Store(tier_.get(), {1}, kLargeBytes);
  const auto keys = server_->Keys("team:a:1:{*}:*");
  EXPECT_EQ(keys.size(), 4);
  for (const std::string& key : keys) {
    const int64_t left = std::stoll(server_->Command({"PTTL", key}));
    EXPECT_GT(left, 0);
    EXPECT_LE(left, 3600000);
  }
}

// ---- What is not whole

TEST_F(RespTierTest, APieceThatIsGoneIsAMissAndTakesTheOthersAlong) {
  for (uint32_t piece = 1; piece < 4; ++piece) {
    Begin();
    Store(tier_.get(), {1}, kLargeBytes);
    ASSERT_EQ(server_->Command({"DEL", KeyAt(1, piece)}), "1");
    EXPECT_THAT(Load(tier_.get(), {1}, kLargeBytes).results, ElementsAre(TierResult::kMiss)) << piece;
    EXPECT_TRUE(Eventually([&] { return server_->Keys("*").empty(); })) << piece;
    EXPECT_THAT(Exists(tier_.get(), {1}), ElementsAre(false));
    // It may be stored again.
    Store(tier_.get(), {1}, kLargeBytes);
    EXPECT_EQ(Load(tier_.get(), {1}, kLargeBytes).right, 1);
  }
}

TEST_F(RespTierTest, WithoutItsFirstPieceAValueIsOnItsWay) {
  Begin();
  Store(tier_.get(), {1}, kLargeBytes);
  ASSERT_EQ(server_->Command({"DEL", KeyAt(1, 0)}), "1");
  EXPECT_THAT(Load(tier_.get(), {1}, kLargeBytes).results, ElementsAre(TierResult::kMiss));
  Load(tier_.get(), {2});
  EXPECT_EQ(server_->Keys("*").size(), 3) << "another node may be writing it";
}

TEST_F(RespTierTest, APieceOfAnotherWriteIsAMiss) {
  Begin();
  Store(tier_.get(), {1}, kLargeBytes);
  const std::string piece = server_->Command({"GET", KeyAt(1, 2)});
  // The same key, written with other bytes.
  server_->Command({"FLUSHALL"});
  Load(tier_.get(), {1}, kLargeBytes);
  TierResult stored = TierResult::kFailed;
  tier_->Store({{KeyOf(1), ValueOf(2, kLargeBytes)}}, [&](size_t, TierResult result) { stored = result; });
  tier_->Drain();
  ASSERT_EQ(stored, TierResult::kDone);
  ASSERT_EQ(server_->Command({"SET", KeyAt(1, 2), piece}), "OK");
  EXPECT_THAT(Load(tier_.get(), {1}, kLargeBytes).results, ElementsAre(TierResult::kMiss));
  EXPECT_TRUE(Eventually([&] { return server_->Keys("*").empty(); }));
}

TEST_F(RespTierTest, TornAndForeignBytesAreCorrupt) {
  Begin();
  const auto spoil = [&](uint32_t piece, const std::function<void(std::string*)>& change) {
    Store(tier_.get(), {1}, kLargeBytes);
    std::string bytes = server_->Command({"GET", KeyAt(1, piece)});
    change(&bytes);
    ASSERT_EQ(server_->Command({"SET", KeyAt(1, piece), bytes}), "OK");
    EXPECT_THAT(Load(tier_.get(), {1}, kLargeBytes).results, ElementsAre(TierResult::kCorrupt));
    EXPECT_TRUE(Eventually([&] { return server_->Keys("*").empty(); }));
  };
  for (const uint32_t piece : {0u, 3u}) {
    spoil(piece, [](std::string* bytes) { bytes->pop_back(); });
    spoil(piece, [](std::string* bytes) { bytes->resize(10); });
    spoil(piece, [](std::string* bytes) { ++bytes->at(20); });
    spoil(piece, [](std::string* bytes) { ++bytes->at(500); });
    spoil(piece, [](std::string* bytes) { *bytes = "something else"; });
  }
  EXPECT_EQ(tier_->usage().counters.corrupt, 10);
}

TEST_F(RespTierTest, AStringThatIsTooLongEndsTheConnectionOnly) {
  Begin();
  Store(tier_.get(), {1, 2});
  ASSERT_EQ(server_->Command({"SETRANGE", KeyAt(1, 0), "5000000", "x"}), "5000001");
  EXPECT_THAT(Load(tier_.get(), {1}).results, ElementsAre(TierResult::kFailed));
  EXPECT_EQ(Load(tier_.get(), {2}).right, 1);
}

TEST_F(RespTierTest, AKeyOfAnotherTypeIsAFailureOfItsOwn) {
  Begin();
  Store(tier_.get(), {2});
  server_->Command({"LPUSH", KeyAt(1, 0), "x"});
  EXPECT_THAT(Load(tier_.get(), {1, 2}).results, ElementsAre(TierResult::kFailed, TierResult::kDone));
}

// ---- A store that is full

TEST_F(RespTierTest, AStoreWithoutRoomIsFull) {
  RedisServer::Options options;
  options.arguments = {"--maxmemory", "8mb", "--maxmemory-policy", "noeviction"};
  Begin(options);
  const auto results = Store(tier_.get(), Numbers(20), kLargeBytes);
  EXPECT_THAT(results, Each(AnyOf(TierResult::kDone, TierResult::kFull)));
  EXPECT_THAT(results, testing::Contains(TierResult::kFull));
  EXPECT_EQ(tier_->usage().counters.failed, 0);
  EXPECT_EQ(tier_->usage().nodes_down, 0);
  // What was written of those that had no room is gone, and what has its first piece is whole.
  const auto done = static_cast<size_t>(std::count(results.begin(), results.end(), TierResult::kDone));
  EXPECT_TRUE(Eventually([&] { return server_->Keys("*").size() == 4 * done; }));
  EXPECT_EQ(Load(tier_.get(), Numbers(20), kLargeBytes).right, done);
}

TEST_F(RespTierTest, WhatTheStoreDidNotUnlinkIsUnlinkedByTheNextErasure) {
  Begin();
  Store(tier_.get(), Numbers(10));
  Store(Other().get(), {20});
  ASSERT_EQ(server_->Command({"ACL", "SETUSER", "default", "-unlink"}), "OK");
  // The last is not known here.
  const TierErased refused = tier_->Erase(OwnerOf(0), std::vector<TierKey>{KeyOf(20)});
  EXPECT_EQ(refused.failed, 6);
  EXPECT_EQ(refused.values, 0);
  EXPECT_FALSE(refused.complete);
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 6);
  // Nobody hears about them meanwhile, and they are in doubt all the same.
  ASSERT_EQ(server_->Command({"ACL", "SETUSER", "default", "-exists"}), "OK");
  Exists(tier_.get(), Numbers(11, 10));
  // What is asked about is in doubt, too, until the answer is there.
  EXPECT_TRUE(Eventually([&] { return tier_->CountOf(OwnerOf(0)).value_or(99) == 6; }));
  EXPECT_EQ(tier_->Erase(OwnerOf(0), {}).failed, 6);
  ASSERT_EQ(server_->Command({"ACL", "SETUSER", "default", "+exists"}), "OK");
  ASSERT_EQ(server_->Command({"ACL", "SETUSER", "default", "+unlink"}), "OK");
  const TierErased erased = tier_->Erase(OwnerOf(0), {});
  EXPECT_EQ(erased.values, 6);
  EXPECT_TRUE(erased.complete);
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 0);
  EXPECT_EQ(server_->Keys("*").size(), 5);
}

TEST_F(RespTierTest, AValueOfManyPiecesIsErasedFromItsEnd) {
  Begin();
  constexpr uint64_t kBytes = 40 * kMostPieceBytes;
  ASSERT_THAT(Store(tier_.get(), {0}, kBytes), ElementsAre(TierResult::kDone));
  ASSERT_EQ(server_->Keys("*").size(), 40);
  EXPECT_EQ(tier_->Erase(OwnerOf(0), {}).values, 1);
  EXPECT_THAT(server_->Keys("*"), IsEmpty());
}

TEST_F(RespTierTest, PiecesBehindOthersThatTheStoreEvictedAreErased) {
  Begin();
  ASSERT_THAT(Store(tier_.get(), {0}, 40 * kMostPieceBytes), ElementsAre(TierResult::kDone));
  for (uint32_t piece = 10; piece < 38; ++piece) ASSERT_EQ(server_->Command({"DEL", KeyAt(0, piece)}), "1");
  EXPECT_EQ(tier_->Erase(OwnerOf(0), {}).values, 1);
  EXPECT_THAT(server_->Keys("*"), IsEmpty());
}

TEST_F(RespTierTest, WhatTheStoreEvictsIsAMiss) {
  RedisServer::Options options;
  options.arguments = {"--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"};
  Begin(options);
  EXPECT_THAT(Store(tier_.get(), Numbers(20), kLargeBytes), Each(TierResult::kDone));
  const Loaded loaded = Load(tier_.get(), Numbers(20), kLargeBytes);
  EXPECT_EQ(loaded.wrong, 0);
  EXPECT_THAT(loaded.results, Each(AnyOf(TierResult::kDone, TierResult::kMiss)));
  EXPECT_THAT(loaded.results, testing::Contains(TierResult::kMiss));
}

// ---- A store that is gone

TEST_F(RespTierTest, AStoreThatDiesFailsWhatIsUnderWayAndIsUsedAgain) {
  Begin();
  Store(tier_.get(), Numbers(20), kLargeBytes);
  std::vector<TierLoad> loads;
  for (uint32_t i = 0; i < 20; ++i) loads.push_back({KeyOf(i), BufferStock(0).Take(kLargeBytes)});
  std::atomic<int> answered{0};
  tier_->Load(std::move(loads), Tier::Deadline::max(), [&](size_t, TierResult) { ++answered; });
  server_->Kill();
  tier_->Drain();
  EXPECT_EQ(answered, 20);
  EXPECT_TRUE(Eventually([&] { return tier_->usage().nodes_down == 1; }));
  // Nothing is there, and nothing is waited for.
  EXPECT_THAT(Exists(tier_.get(), {0, 1}), Each(false));
  EXPECT_THAT(Load(tier_.get(), Numbers(20)).results, Each(TierResult::kFailed));
  EXPECT_THAT(Store(tier_.get(), {100}), Each(TierResult::kFailed));
  server_->Restart();
  EXPECT_TRUE(Eventually([&] { return tier_->usage().nodes_down == 0; }));
  EXPECT_THAT(Load(tier_.get(), {0}).results, Each(TierResult::kMiss));
  EXPECT_THAT(Store(tier_.get(), {0}), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), {0}).right, 1);
}

TEST_F(RespTierTest, AStoreThatComesLaterIsFound) {
  server_ = std::make_unique<RedisServer>();
  server_->Kill();
  tier_ = OpenResp(RespOptions(server_->endpoint()));
  EXPECT_THAT(Load(tier_.get(), {1}).results, Each(TierResult::kFailed));
  server_->Restart();
  EXPECT_TRUE(Eventually([&] { return Store(tier_.get(), {1})[0] == TierResult::kDone; }));
}

TEST_F(RespTierTest, AStoreThatHangsIsLateAndThenLeftAlone) {
  server_ = std::make_unique<RedisServer>();
  RespTier::Options options = RespOptions(server_->endpoint());
  options.io_timeout = std::chrono::milliseconds(300);
  options.connect_timeout = std::chrono::seconds(3);
  tier_ = OpenResp(options);
  EXPECT_TRUE(Eventually([&] {
    Store(tier_.get(), Numbers(4));
    return Exists(tier_.get(), Numbers(4)) == std::vector<bool>(4, true);
  }));
  server_->Signal(SIGSTOP);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  EXPECT_THAT(Load(tier_.get(), Numbers(4), kValueBytes, deadline).results, Each(TierResult::kLate));
  EXPECT_GE(std::chrono::steady_clock::now(), deadline);
  EXPECT_TRUE(Eventually([&] {
    Load(tier_.get(), {0}, kValueBytes, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
    return tier_->usage().nodes_down == 1;
  }));
  EXPECT_THAT(Load(tier_.get(), {0}).results, Each(TierResult::kFailed));
  server_->Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] { return tier_->usage().nodes_down == 0; }));
  EXPECT_TRUE(Eventually([&] { return Load(tier_.get(), Numbers(4)).right == 4; }));
}

TEST_F(RespTierTest, ItsEndWaitsForNobody) {
  Begin();
  Store(tier_.get(), {0});
  server_->Signal(SIGSTOP);
  std::vector<TierResult> results;
  const auto answer = [&](size_t, TierResult result) { results.push_back(result); };
  tier_->Load({{KeyOf(0), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(), answer);
  tier_->Store({{KeyOf(1), ValueOf(1)}, {KeyOf(2), ValueOf(2)}}, answer);
  tier_.reset();
  EXPECT_THAT(results, ElementsAre(TierResult::kFailed, TierResult::kFailed, TierResult::kFailed));
}

TEST_F(RespTierTest, MoreThanMayWaitIsRefused) {
  Begin();
  Store(tier_.get(), {0});
  server_->Signal(SIGSTOP);
  const auto buffer = BufferStock(0).Take(kValueBytes);
  std::vector<TierLoad> loads(RespTier::kMostWaiting + 3, TierLoad{KeyOf(0), buffer});
  std::atomic<int> full{0};
  tier_->Load(std::move(loads), Tier::Deadline::max(),
              [&](size_t, TierResult result) { full += result == TierResult::kFull; });
  EXPECT_EQ(full, 3);
  EXPECT_EQ(tier_->usage().waiting, RespTier::kMostWaiting);
  server_->Signal(SIGCONT);
  tier_->Drain();
  EXPECT_EQ(full, 3);
  EXPECT_EQ(tier_->usage().waiting, 0);
}

// ---- Who may

TEST_F(RespTierTest, AUserWithAPassword) {
  RedisServer::Options server;
  server.arguments = {"--user", "kv",   "on",   ">hunter2", "~kvpool:*", "+auth",
                      "+ping",  "+get", "+set", "+exists",  "+unlink"};
  server_ = std::make_unique<RedisServer>(server);
  RespTier::Options options = RespOptions(server_->endpoint());
  options.user = "kv";
  options.password = "hunter2";
  tier_ = OpenResp(options);
  EXPECT_FALSE(absl::StrContains(tier_->describe() + tier_->path(), "hunter2"));
  EXPECT_THAT(Store(tier_.get(), Numbers(5)), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), Numbers(5)).right, 5);
  // This user has no other keys.
  options.prefix = "other";
  EXPECT_THAT(Store(OpenResp(options).get(), {1}), Each(TierResult::kFailed));
  options.password = "wrong";
  EXPECT_THAT(Store(OpenResp(options).get(), {1}), Each(TierResult::kFailed));
}

class RespTlsTest : public RespTierTest {
 protected:
  void SetUp() override {
    RespTierTest::SetUp();
    if (IsSkipped()) return;
    certificates_ = MakeCertificates(folder_.path(), "IP:127.0.0.1");
    RedisServer::Options server;
    server.tls = &certificates_;
    server_ = std::make_unique<RedisServer>(server);
    options_ = RespOptions(server_->endpoint());
    options_.tls = {.on = true,
                    .ca_file = certificates_.ca,
                    .cert_file = certificates_.client,
                    .key_file = certificates_.client_key};
  }
  TierFolder folder_{TierFolder::On::kMemory};
  TestCertificates certificates_;
  RespTier::Options options_;
};

TEST_F(RespTlsTest, ValuesGoThroughTls) {
  tier_ = OpenResp(options_);
  EXPECT_THAT(Store(tier_.get(), Numbers(20)), Each(TierResult::kDone));
  EXPECT_THAT(Store(tier_.get(), Numbers(5, 100), kLargeBytes), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), Numbers(20)).right, 20);
  EXPECT_EQ(Load(tier_.get(), Numbers(5, 100), kLargeBytes).right, 5);
  server_->Kill();
  EXPECT_THAT(Load(tier_.get(), Numbers(20)).results, Each(TierResult::kFailed));
}

TEST_F(RespTlsTest, AClientWithoutACertificateIsTurnedAway) {
  options_.tls.cert_file = options_.tls.key_file = "";
  EXPECT_THAT(Store(OpenResp(options_).get(), {1}), Each(TierResult::kFailed));
}

TEST_F(RespTlsTest, AnAuthorityThatIsNotKnownIsNotBelieved) {
  TierFolder folder(TierFolder::On::kMemory);
  options_.tls.ca_file = MakeCertificates(folder.path(), "IP:127.0.0.1").ca;
  EXPECT_THAT(Store(OpenResp(options_).get(), {1}), Each(TierResult::kFailed));
}

TEST_F(RespTlsTest, ACertificateOfAnotherNameIsNotBelieved) {
  TierFolder folder(TierFolder::On::kMemory);
  const TestCertificates other = MakeCertificates(folder.path(), "DNS:elsewhere.example");
  RedisServer::Options server;
  server.tls = &other;
  const RedisServer elsewhere(server);
  RespTier::Options options = RespOptions(elsewhere.endpoint());
  options.tls = {.on = true, .ca_file = other.ca, .cert_file = other.client, .key_file = other.client_key};
  EXPECT_THAT(Store(OpenResp(options).get(), {1}), Each(TierResult::kFailed));
}

TEST_F(RespTlsTest, AFileThatIsNoneIsNamed) {
  options_.tls.ca_file = "/no/such/ca";
  EXPECT_THAT(std::string(RespTier::Open(options_).status().message()),
              testing::HasSubstr("ca=/no/such/ca: "));
  options_.tls.ca_file = certificates_.ca;
  options_.tls.key_file = certificates_.node_key;
  EXPECT_THAT(std::string(RespTier::Open(options_).status().message()), testing::HasSubstr("key="));
}

}  // namespace
}  // namespace kvpool
