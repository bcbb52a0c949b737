// What was evicted is found again: by another engine, and after the daemon was killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tools/operator_client.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

class ClientTierTest : public SessionTest {
 protected:
  static constexpr size_t kShared = 24;
  static constexpr MatchOptions kWait{.wait_ms = 50000};

  void Start(const std::string& more = "") {
    StartDaemon("4MiB", {"--tier=file:" + folder() + ",capacity=64MiB" + more});
  }
  std::string folder() const { return directory_.path() + "/tier"; }
  static std::vector<PrefixKey> KeysOf(const Session& session, uint32_t seed, size_t blocks) {
    return PrefixHasher(session.hash_seed()).Chain(TokensOf(seed, blocks), kTokensPerBlock);
  }
  // Other prefixes take the whole pool.
  static void PushOut(Session* session) {
    for (uint32_t seed = 100; seed < 104; ++seed) Share(session, KeysOf(*session, seed, 20));
  }
  // The tier has written so many values.
  bool Await(double values) const {
    for (const Deadline deadline = Soon(); std::chrono::steady_clock::now() < deadline;) {
      if (daemon_->Metric("kvpool_tier_values_total", "stored") >= values) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  static MatchHit Match(Session* session, const std::vector<PrefixKey>& keys,
                        const MatchOptions& options = {}) {
    auto pending = session->Match(KeyBytes(keys), options);
    EXPECT_TRUE(pending.ok()) << pending.status();
    auto hit = pending->Wait(Soon());
    EXPECT_TRUE(hit.ok()) << hit.status();
    return hit.ok() ? *std::move(hit) : MatchHit();
  }
  static size_t Right(Session* session, const MatchHit& hit, const std::vector<PrefixKey>& keys) {
    size_t right = 0;
    for (size_t i = 0; i < hit.groups[0].size(); ++i)
      right += HasStamp(session->data(hit.groups[0][i]), keys[i]);
    return right;
  }

  TemporaryDirectory directory_;
};

TEST_F(ClientTierTest, AnotherEngineFindsWhatWasEvictedBeforeTheDaemonWasKilled) {
  Start();
  auto first = OpenWithoutMagazine();
  ASSERT_NE(first, nullptr);
  const std::string seed = first->hash_seed();
  const std::vector<PrefixKey> keys = KeysOf(*first, 1, kShared);
  Share(first.get(), keys);
  ASSERT_TRUE(Await(kShared)) << daemon_->Log();
  PushOut(first.get());
  EXPECT_LT(Match(first.get(), keys).tokens, kShared * kTokensPerBlock);
  daemon_->Kill();
  first.reset();

  Start();
  auto second = OpenWithoutMagazine();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  EXPECT_EQ(second->hash_seed(), seed);
  const MatchHit at_once = Match(second.get(), keys);
  EXPECT_EQ(at_once.tokens, 0);
  EXPECT_EQ(at_once.below_tokens, kShared * kTokensPerBlock);
  const MatchHit waited = Match(second.get(), keys, kWait);
  ASSERT_EQ(waited.tokens, kShared * kTokensPerBlock) << daemon_->Log();
  EXPECT_EQ(Right(second.get(), waited, keys), kShared);
  EXPECT_EQ(daemon_->Metric("kvpool_tier_promoted_blocks_total"), kShared);
  EXPECT_EQ(daemon_->Metric("kvpool_tier_values_total", "corrupt"), 0);
}

TEST_F(ClientTierTest, TheDaemonHearsWhatPrefillsTake) {
  Start();
  auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 1);
  Match(session.get(), keys);  // The stream's daemon has answered.
  for (uint64_t n = 100; n < 140; ++n) {
    EXPECT_TRUE(session->ReportPrefill(n, 7, std::chrono::microseconds(1000 * n)).ok());
  }
  Match(session.get(), keys);
  const auto daemon = tools::OperatorClient::Open({.socket = daemon_->socket()});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto spaces = (*daemon)->ListSpaces({});
  ASSERT_TRUE(spaces.ok()) << spaces.status();
  const v1::PrefillCost& cost = spaces->spaces(0).prefill();
  EXPECT_EQ(cost.samples(), 40u);
  EXPECT_NEAR(cost.seconds_per_token(), .001, 1e-5);
  const auto refusal = [&](uint64_t tokens, uint64_t before, int64_t us) {
    return std::string(session->ReportPrefill(tokens, before, std::chrono::microseconds(us)).message());
  };
  EXPECT_EQ(refusal(0, 0, 1), "prefill.tokens is 0; must be 1 to 16777216");
  EXPECT_EQ(refusal(1, uint64_t{1} << 33, 1), "prefill.tokens_before is 8589934592; must be 0 to 4294967296");
  EXPECT_EQ(refusal(1, 0, -1), "prefill.microseconds is -1; must be 1 to 3600000000");
}

TEST_F(ClientTierTest, TheNextDaemonFindsWhatOnlyThePoolHad) {
  const std::vector<std::string> flags = {"--tier=file:" + folder() + ",capacity=64MiB"};
  StartDaemon("64MiB", flags);
  auto first = OpenWithoutMagazine();
  ASSERT_NE(first, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*first, 1, kShared);
  Share(first.get(), keys);
  // Much is free, so that nothing was to leave.
  EXPECT_EQ(daemon_->Metric("kvpool_tier_values"), 0);
  EXPECT_EQ(daemon_->Stop(), 0);
  EXPECT_THAT(daemon_->Log(), testing::HasSubstr("tier flushed"));
  first.reset();
  StartDaemon("64MiB", flags);
  auto second = OpenWithoutMagazine();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  const MatchHit hit = Match(second.get(), keys, kWait);
  ASSERT_EQ(hit.tokens, kShared * kTokensPerBlock) << daemon_->Log();
  EXPECT_EQ(Right(second.get(), hit, keys), kShared);
  EXPECT_EQ(daemon_->Metric("kvpool_tier_load_seconds_count"), kShared);
}

TEST_F(ClientTierTest, WrongBytesOnTheDiskAreAMiss) {
  Start(",write=seal");
  auto first = OpenWithoutMagazine();
  ASSERT_NE(first, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*first, 1, kShared);
  Share(first.get(), keys);
  ASSERT_TRUE(Await(kShared)) << daemon_->Log();
  daemon_->Kill();
  first.reset();
  // Every value is damaged: its last byte is another.
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    if (entry.path().extension() != ".slots") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const uint64_t size = std::filesystem::file_size(entry.path());
    for (uint64_t end = size; end > kBlockBytes; end -= kBlockBytes) {
      file.seekg(static_cast<std::streamoff>(end - 1));
      const char byte = static_cast<char>(file.get() ^ 1);
      file.seekp(static_cast<std::streamoff>(end - 1));
      file.put(byte);
    }
  }
  Start();
  auto second = OpenWithoutMagazine();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  const MatchHit hit = Match(second.get(), keys, kWait);
  EXPECT_EQ(hit.tokens, 0);
  EXPECT_GT(daemon_->Metric("kvpool_tier_values_total", "corrupt"), 0);
}

TEST_F(ClientTierTest, WhatWasErasedIsNotThereAfterAKill) {
  Start(",write=seal");
  auto first = OpenWithoutMagazine();
  ASSERT_NE(first, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*first, 1, kShared);
  Share(first.get(), keys);
  ASSERT_TRUE(Await(kShared)) << daemon_->Log();
  auto client = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto spaces = (*client)->ListSpaces({});
  ASSERT_TRUE(spaces.ok()) << spaces.status();
  v1::EraseRequest request;
  request.set_tenant(spaces->spaces(0).tenant());
  const auto receipt = (*client)->Erase(request);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->blocks(), kShared);
  EXPECT_EQ(receipt->tiers(0).values(), kShared);
  EXPECT_EQ(receipt->tiers(0).found(), 0);
  // The session holds its sink: something remains, and is said last.
  ASSERT_GT(receipt->remains_size(), 0);
  const std::string log = daemon_->AwaitInLog("part=remains");
  EXPECT_THAT(log, testing::ContainsRegex(absl::StrCat("operator call category=audit method=Erase .*tenant=",
                                                       request.tenant(), " .*blocks=", kShared)));
  EXPECT_THAT(log, testing::ContainsRegex(absl::StrCat(
                       "operator call part category=audit method=Erase .*tenant=", request.tenant(),
                       " part=tiers tier=file values=", kShared, " bytes=", receipt->tiers(0).bytes(),
                       " failed=0 found=0")));
  EXPECT_THAT(log, testing::ContainsRegex("part=remains text=\".*are held"));
  EXPECT_EQ(Match(first.get(), keys).below_tokens, 0);
  daemon_->Kill();
  first.reset();

  Start();
  auto second = OpenWithoutMagazine();
  ASSERT_NE(second, nullptr) << daemon_->Log();
  EXPECT_EQ(Match(second.get(), keys, kWait).tokens, 0);
  EXPECT_EQ(daemon_->Metric("kvpool_tier_values"), 0);
}

TEST_F(ClientTierTest, AFolderHasOneDaemon) {
  Start();
  const auto other = DaemonProcess::Start(
      {.capacity = "4MiB", .flags = {"--tier=file:" + folder() + ",capacity=64MiB", "--slab-bytes=4MiB"}});
  ASSERT_FALSE(other.ok());
  EXPECT_THAT(std::string(other.status().message()), testing::HasSubstr(folder() + "/lock"));
}

// A process of its own, with the words, files and checks of a start.
TEST_F(ClientTierTest, OneThatIsAttachedIsUsedFoundAgainAndGone) {
  const std::string key = directory_.path() + "/key", config = directory_.path() + "/kvpoold.conf";
  std::ofstream(key) << std::string(32, 'k');
  std::filesystem::permissions(key, std::filesystem::perms::owner_read);
  std::ofstream(config) << "tier_key_file = " << key << "\n";
  StartDaemon("4MiB", {"--config=" + config});
  const auto daemon =
      *tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
  auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, kShared);
  v1::AttachTierRequest attach;
  attach.set_timeout_ms(50000);
  const auto refusal = [&](const std::string& spec) {
    attach.set_spec(spec);
    return std::string(daemon->AttachTier(attach).status().message());
  };
  EXPECT_THAT(refusal("tape:/x"),
              testing::StartsWith("\"tape:/x\" begins with none of host:, file:, resp: and s3:"));
  EXPECT_THAT(refusal("host:capacity=1024TiB"),
              testing::StartsWith("--tier: host: capacity is 1125899906842624 bytes"));
  const std::string spec = "file:" + folder() + ",capacity=64MiB";
  attach.set_spec(spec);
  const auto attached = daemon->AttachTier(attach);
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->path(), folder());
  EXPECT_FALSE(std::filesystem::exists(folder() + "/key")) << "the secret is that of --tier-key-file";
  EXPECT_FALSE(daemon->ListTiers({})->tiers(0).next_has_it());
  std::ofstream(config, std::ios::app) << "tier = " << spec << "\n";
  EXPECT_TRUE(daemon->ListTiers({})->tiers(0).next_has_it());
  Share(session.get(), keys);
  ASSERT_TRUE(Await(kShared)) << daemon_->Log();
  PushOut(session.get());
  MatchHit hit = Match(session.get(), keys, kWait);
  ASSERT_EQ(hit.tokens, kShared * kTokensPerBlock) << daemon_->Log();
  EXPECT_EQ(Right(session.get(), hit, keys), kShared);
  hit = {};
  v1::DetachTierRequest detach;
  detach.set_tier("file");
  detach.set_timeout_ms(50000);
  const auto detached = daemon->DetachTier(detach);
  ASSERT_TRUE(detached.ok()) << detached.status();
  EXPECT_TRUE(detached->detached());
  EXPECT_THAT(*daemon_->Metrics(), testing::Not(testing::HasSubstr("tier=\"file\"")));
  PushOut(session.get());
  EXPECT_EQ(Match(session.get(), keys, kWait).below_tokens, 0u);
  EXPECT_EQ(daemon->ListTiers({})->only_next(0), spec);
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
  EXPECT_THAT(daemon_->Log(), testing::HasSubstr("operator call category=audit method=AttachTier"));
  session.reset();
  StartDaemon("4MiB", {"--config=" + config});
  session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr) << daemon_->Log();
  EXPECT_EQ(Match(session.get(), keys, kWait).tokens, kShared * kTokensPerBlock) << daemon_->Log();
}

// A folder has the secret that the names of its values are of.
TEST_F(ClientTierTest, AFolderGetsTheDaemonsSecretAndNoOthers) {
  StartDaemon("4MiB", {"--tier=host:capacity=4MiB"});
  const auto daemon =
      *tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
  v1::AttachTierRequest attach;
  attach.set_timeout_ms(50000);
  attach.set_spec("resp:localhost:1");
  EXPECT_THAT(std::string(daemon->AttachTier(attach).status().message()),
              testing::StartsWith("--tier-key-file=: must name a file with the secret"));
  const std::string others = directory_.path() + "/others";
  std::filesystem::create_directory(others);
  std::ofstream(others + "/key") << std::string(32, 'o');
  for (const std::string& path : {others, others + "/key"})
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  std::ofstream(others + "/7.slots.new") << "what is another's";
  attach.set_spec("file:" + others + ",capacity=64MiB");
  EXPECT_THAT(std::string(daemon->AttachTier(attach).status().message()),
              testing::HasSubstr("/others/key: it is another secret than the daemon's"));
  EXPECT_TRUE(std::filesystem::exists(others + "/7.slots.new")) << "a refusal changes nothing";
  attach.set_spec("file:" + folder() + ",capacity=64MiB");
  ASSERT_TRUE(daemon->AttachTier(attach).ok());
  const auto text = [](const std::string& path) {
    std::ostringstream all;
    all << std::ifstream(path).rdbuf();
    return all.str();
  };
  EXPECT_EQ(text(folder() + "/key"), text(daemon_->directory() + "/tier-key"));
  EXPECT_EQ(text(folder() + "/key").size(), 32u);
}

}  // namespace
}  // namespace kvpool
