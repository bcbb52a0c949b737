// The s3 tier on one real server, and what such servers do at times.
#include "server/tiers/s3_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/tiers/s3_value.h"
#include "server/tiers/s3_xml.h"
#include "tests/tiers/s3_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

class S3TierTest : public testing::Test {
 protected:
  void SetUp() override {
    if (S3Server::Program().empty()) GTEST_SKIP() << "no weed: deploy/install_deps.sh test installs one";
    // All tests have one: each has a prefix of its own.
    static S3Server server;
    server_ = &server;
    options_ = S3Options(server);
  }
  void Begin() { tier_ = OpenS3(options_); }
  std::string NameOf(uint32_t number) const { return S3ObjectName(options_.prefix, KeyOf(number)); }
  std::vector<std::string> Names() const { return server_->Names(options_.prefix + "/"); }
  // Another daemon on the same bucket.
  std::unique_ptr<S3Tier> Other() const { return OpenS3(options_); }

  S3Server* server_ = nullptr;
  S3Tier::Options options_;
  std::unique_ptr<S3Tier> tier_;
};

TEST_F(S3TierTest, ValuesOfAllSizesComeBack) {
  Begin();
  for (const uint64_t bytes : {1u, 63u, 64u, 4096u, (1u << 20) + 1, 9u << 20}) {
    const auto number = static_cast<uint32_t>(bytes);
    EXPECT_THAT(Store(tier_.get(), {number}, bytes), ElementsAre(TierResult::kDone));
    EXPECT_EQ(server_->Ask({.method = "HEAD", .object = NameOf(number)}).content_length,
              kS3HeaderBytes + bytes);
    EXPECT_EQ(Load(tier_.get(), {number}, bytes).right, 1) << bytes;
  }
}

TEST_F(S3TierTest, WhatOneDaemonStoresAnotherLoads) {
  Begin();
  Store(tier_.get(), Numbers(20));
  const auto other = Other();
  EXPECT_EQ(Load(other.get(), Numbers(20)).right, 20);
}

TEST_F(S3TierTest, AKeyThatIsNotKnownIsAskedAbout) {
  Begin();
  Store(tier_.get(), {1});
  const auto other = Other();
  const std::vector<TierKey> keys = {KeyOf(1), KeyOf(2)};
  std::vector<TierPresence> found(2);
  other->Exists(keys, absl::MakeSpan(found));
  EXPECT_THAT(found, Each(TierPresence::kUnknown));
  EXPECT_TRUE(Eventually([&] {
    other->Exists(keys, absl::MakeSpan(found));
    return found[0] == TierPresence::kYes && found[1] == TierPresence::kNo;
  }));
  // Once it is stored it is known, whatever was said of it before.
  Store(other.get(), {2});
  EXPECT_THAT(Exists(other.get(), {2}), ElementsAre(true));
}

TEST_F(S3TierTest, WhatIsThereIsNotWrittenAgain) {
  Begin();
  const std::string foreign(kS3HeaderBytes + kValueBytes, 'x');
  server_->Put(NameOf(1), foreign);
  EXPECT_THAT(Store(tier_.get(), {1}), ElementsAre(TierResult::kDone));
  EXPECT_EQ(server_->Get(NameOf(1)), foreign);
  // What can't be the value, as it has another length, is.
  server_->Put(NameOf(2), "short");
  EXPECT_THAT(Store(tier_.get(), {2}), ElementsAre(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), {2}).right, 1);
}

TEST_F(S3TierTest, APrefixMayHaveWhatSignaturesEncode) {
  options_.prefix = absl::StrCat("a=b@c:d+e/", options_.prefix);
  Begin();
  EXPECT_THAT(Store(tier_.get(), Numbers(10)), Each(TierResult::kDone));
  EXPECT_EQ(Load(Other().get(), Numbers(10)).right, 10);
  EXPECT_THAT(Names(), SizeIs(10));
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 5);
  EXPECT_EQ(tier_->Erase(OwnerOf(0), {}).values, 5);
  EXPECT_THAT(Names(), SizeIs(5));
}

TEST_F(S3TierTest, TheBucketMayBeInTheHostsName) {
  Begin();
  options_.client.endpoint = server_->virtual_endpoint();
  const auto other = OpenS3(options_);
  ASSERT_NE(other, nullptr);
  EXPECT_THAT(Store(other.get(), Numbers(5)), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), Numbers(5)).right, 5) << "it is the same bucket";
  EXPECT_EQ(other->Erase(OwnerOf(0), {}).values, 3);
}

TEST_F(S3TierTest, KeysHaveEveryByte) {
  Begin();
  std::vector<TierStore> stores;
  std::vector<TierLoad> loads;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    TierKey key = KeyOf(0);
    key.block.fill(static_cast<uint8_t>(byte));
    key.group = static_cast<uint8_t>(255 - byte);
    stores.push_back({key, ValueOf(byte, 100)});
    loads.push_back({key, BufferStock(0).Take(100)});
  }
  const std::vector<TierLoad> into = loads;
  std::atomic<int> done{0};
  const auto count = [&](size_t, TierResult result) { done += result == TierResult::kDone; };
  tier_->Store(std::move(stores), count);
  tier_->Drain();
  tier_->Load(std::move(loads), Tier::Deadline::max(), count);
  tier_->Drain();
  EXPECT_EQ(done, 512);
  for (uint32_t byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(std::memcmp(into[byte].into->data(), ValueOf(byte, 100)->data(), 100), 0) << byte;
    EXPECT_EQ(S3KeyOf(options_.prefix, S3ObjectName(options_.prefix, into[byte].key)), into[byte].key);
  }
}

// ---- What is not whole, or not there

TEST_F(S3TierTest, WhatOthersDeleteIsAMiss) {
  Begin();
  Store(tier_.get(), Numbers(3));
  server_->Delete(NameOf(1));
  EXPECT_THAT(Load(tier_.get(), Numbers(3)).results,
              ElementsAre(TierResult::kDone, TierResult::kMiss, TierResult::kDone));
  EXPECT_THAT(Exists(tier_.get(), {1}), ElementsAre(false));
  EXPECT_THAT(Store(tier_.get(), {1}), ElementsAre(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), {1}).right, 1);
}

TEST_F(S3TierTest, TornAndForeignObjectsAreCorruptAndGo) {
  Begin();
  Store(tier_.get(), {1, 2});
  const std::string good = server_->Get(NameOf(1)), other = server_->Get(NameOf(2));
  const auto changed = [&good](size_t at) {
    std::string bytes = good;
    ++bytes[at];
    return bytes;
  };
  const std::vector<std::string> objects = {good.substr(0, good.size() - 1),
                                            good.substr(0, kS3HeaderBytes),
                                            good.substr(0, 10),
                                            "",
                                            good + "x",
                                            changed(3),
                                            changed(20),
                                            changed(kS3HeaderBytes),
                                            changed(good.size() - 1),
                                            "something else",
                                            std::string(good.size(), '\0'),
                                            other};
  for (size_t i = 0; i < objects.size(); ++i) {
    server_->Put(NameOf(1), objects[i]);
    EXPECT_THAT(Load(tier_.get(), {1}).results, ElementsAre(TierResult::kCorrupt)) << i;
    EXPECT_TRUE(Eventually([&] { return Names() == std::vector<std::string>{NameOf(2)}; })) << i;
    EXPECT_THAT(Exists(tier_.get(), {1}), ElementsAre(false)) << i;
  }
  EXPECT_EQ(tier_->usage().counters.corrupt, objects.size());
  Store(tier_.get(), {1});
  EXPECT_EQ(Load(tier_.get(), {1}).right, 1);
}

TEST_F(S3TierTest, AWholeValueOfAnotherSizeStays) {
  Begin();
  Store(tier_.get(), {1});
  EXPECT_THAT(Load(tier_.get(), {1}, kValueBytes + 1).results, ElementsAre(TierResult::kMiss));
  EXPECT_EQ(Load(tier_.get(), {1}).right, 1);
}

// ---- Parts

TEST_F(S3TierTest, LargeValuesGoInParts) {
  Begin();
  const uint64_t bytes = options_.part_bytes + 1000;
  EXPECT_THAT(Store(tier_.get(), {1}, bytes), ElementsAre(TierResult::kDone));
  // The tag of an object in parts is no digest: it says how many there were.
  EXPECT_THAT(server_->Ask({.method = "HEAD", .object = NameOf(1)}).etag, HasSubstr("-2\""));
  EXPECT_EQ(Load(Other().get(), {1}, bytes).right, 1);
}

TEST_F(S3TierTest, ManyPartsAtOnce) {
  options_.part_bytes = 5 << 20;
  Begin();
  constexpr uint64_t kBytes = (32 << 20) + 77;
  EXPECT_THAT(Store(tier_.get(), {1, 2}, kBytes), Each(TierResult::kDone));
  EXPECT_THAT(server_->Ask({.method = "HEAD", .object = NameOf(1)}).etag, HasSubstr("-7\""));
  EXPECT_EQ(Load(tier_.get(), {1, 2}, kBytes).right, 2);
  // Exactly one part is no parts.
  EXPECT_THAT(Store(tier_.get(), {3}, options_.part_bytes), ElementsAre(TierResult::kDone));
  EXPECT_THAT(server_->Ask({.method = "HEAD", .object = NameOf(3)}).etag, testing::Not(HasSubstr("-")));
}

// ---- Erasing

TEST_F(S3TierTest, AnOwnersValuesAreFoundPageByPageWhoeverWroteThem) {
  Begin();
  const auto other = Other();
  Store(tier_.get(), Numbers(2100), 8);
  Store(other.get(), Numbers(10, 5000), 8);
  server_->Put(S3OwnerPrefix(options_.prefix, OwnerOf(0)) + "somebody's & <own>", "x");
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(0), 1056);
  const TierErased erased = tier_->Erase(OwnerOf(0), {});
  EXPECT_EQ(erased.values, 1056);
  EXPECT_EQ(erased.bytes, 1055 * 8);
  EXPECT_EQ(erased.failed, 0);
  EXPECT_TRUE(erased.complete);
  EXPECT_EQ(erased.remains, "");
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 0);
  EXPECT_THAT(Names(), SizeIs(1055));
  EXPECT_THAT(Exists(tier_.get(), {0, 1}), ElementsAre(false, true));
  EXPECT_THAT(Load(other.get(), {5000}, 8).results, ElementsAre(TierResult::kMiss));
}

TEST_F(S3TierTest, WhatWasNeverWholeIsErasedAsWell) {
  Begin();
  EXPECT_EQ(server_->Ask({.method = "POST", .object = NameOf(0), .query = {{"uploads", ""}}}).status, 200);
  EXPECT_EQ(server_->Ask({.method = "POST", .object = NameOf(1), .query = {{"uploads", ""}}}).status, 200);
  const auto uploads = [&](uint32_t number) {
    const std::string prefix = S3OwnerPrefix(options_.prefix, OwnerOf(number));
    const std::string body = server_->Ask({.query = {{"uploads", ""}, {"prefix", prefix}}}).body;
    return XmlElements(body, "Upload").size();
  };
  ASSERT_EQ(uploads(0), 1);
  EXPECT_TRUE(tier_->Erase(OwnerOf(0), {}).complete);
  EXPECT_EQ(uploads(0), 0);
  EXPECT_EQ(uploads(1), 1) << "it is another's";
}

// ---- A store that is gone

TEST_F(S3TierTest, AStoreThatDiesFailsWhatIsUnderWayAndIsUsedAgain) {
  Begin();
  constexpr uint64_t kBytes = 1 << 20;
  Store(tier_.get(), Numbers(10), kBytes);
  std::vector<TierLoad> loads;
  for (uint32_t i = 0; i < 10; ++i) loads.push_back({KeyOf(i), BufferStock(0).Take(kBytes)});
  std::atomic<int> answered{0};
  tier_->Load(std::move(loads), Tier::Deadline::max(), [&](size_t, TierResult) { ++answered; });
  server_->Kill();
  tier_->Drain();
  EXPECT_EQ(answered, 10);
  EXPECT_TRUE(Eventually([&] {
    Load(tier_.get(), Numbers(10), kBytes);
    return tier_->usage().nodes_down == 1;
  }));
  // Nothing is there, and nothing is waited for.
  EXPECT_THAT(Exists(tier_.get(), {0, 1}), Each(false));
  EXPECT_THAT(Load(tier_.get(), Numbers(10)).results, Each(TierResult::kFailed));
  EXPECT_THAT(Store(tier_.get(), {100}), Each(TierResult::kFailed));
  EXPECT_FALSE(tier_->CountOf(OwnerOf(0)).ok());
  const TierErased erased = tier_->Erase(OwnerOf(0), {});
  EXPECT_FALSE(erased.complete);
  EXPECT_THAT(erased.remains, HasSubstr("it does not answer"));
  server_->Restart();
  EXPECT_TRUE(Eventually([&] { return tier_->usage().nodes_down == 0; }));
  EXPECT_TRUE(Eventually([&] { return Load(tier_.get(), Numbers(10), kBytes).right == 10; }));
  EXPECT_TRUE(Eventually([&] { return Store(tier_.get(), {100})[0] == TierResult::kDone; }));
}

TEST_F(S3TierTest, AStoreThatHangsIsLateAndThenLeftAlone) {
  options_.client.io_timeout = std::chrono::milliseconds(500);
  Begin();
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

TEST_F(S3TierTest, ItsEndWaitsForNobody) {
  Begin();
  Store(tier_.get(), {0});
  server_->Signal(SIGSTOP);
  std::vector<TierResult> results;
  const auto answer = [&](size_t, TierResult result) { results.push_back(result); };
  tier_->Load({{KeyOf(0), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(), answer);
  tier_->Store({{KeyOf(1), ValueOf(1)}, {KeyOf(2), ValueOf(2)}}, answer);
  tier_.reset();
  EXPECT_THAT(results, ElementsAre(TierResult::kFailed, TierResult::kFailed, TierResult::kFailed));
  server_->Signal(SIGCONT);
}

TEST_F(S3TierTest, MoreThanMayWaitIsRefused) {
  Begin();
  Store(tier_.get(), {0});
  server_->Signal(SIGSTOP);
  const auto buffer = BufferStock(0).Take(kValueBytes);
  std::vector<TierLoad> loads(S3Tier::kMostWaiting + 3, TierLoad{KeyOf(0), buffer});
  std::atomic<int> full{0};
  std::atomic<size_t> failed{0};
  tier_->Load(std::move(loads), Tier::Deadline::max(), [&](size_t, TierResult result) {
    full += result == TierResult::kFull;
    failed += result == TierResult::kFailed;
  });
  EXPECT_EQ(full, 3);
  EXPECT_EQ(tier_->usage().waiting, S3Tier::kMostWaiting);
  tier_.reset();
  EXPECT_EQ(full, 3);
  EXPECT_EQ(failed, S3Tier::kMostWaiting);
  server_->Signal(SIGCONT);
}

TEST_F(S3TierTest, AStoreThatComesLaterIsFound) {
  server_->Kill();
  Begin();
  ASSERT_NE(tier_, nullptr);
  EXPECT_THAT(Load(tier_.get(), {1}).results, Each(TierResult::kFailed));
  server_->Restart();
  EXPECT_TRUE(Eventually([&] { return Store(tier_.get(), {1})[0] == TierResult::kDone; }));
}

// ---- Who may

std::string Refusal(const S3Tier::Options& options) {
  const auto tier = S3Tier::Open(options);
  return tier.ok() ? "" : std::string(tier.status().message());
}

TEST_F(S3TierTest, AStartThatIsRefusedSaysWhy) {
  const TierFolder folder(TierFolder::On::kMemory);
  const std::string file = folder.path() + "/keys";
  options_.credentials.file = file;
  WriteCredentials(file, "AKIDNOBODY", kTestSecretKey);
  EXPECT_THAT(Refusal(options_), HasSubstr("it does not know the access key (HTTP status 403"));
  WriteCredentials(file, kTestAccessKey, "wrong");
  EXPECT_THAT(Refusal(options_),
              HasSubstr("the secret key is not that of the access key, or region=us-east-1"));
  WriteCredentials(file, kTestAccessKey, kTestSecretKey, "other");
  EXPECT_EQ(Refusal(options_), absl::StrCat("--tier: credentials-file=", file, ": it has no [default]"));
  options_.credentials.profile = "other";
  EXPECT_EQ(Refusal(options_), "");
  options_.client.endpoint.bucket = "no-such-bucket";
  EXPECT_EQ(
      Refusal(options_),
      absl::StrCat("--tier: s3:http://127.0.0.1:", options_.client.endpoint.port,
                   "/no-such-bucket: there is no bucket \"no-such-bucket\" (HTTP status 404, NoSuchBucket)"));
}

TEST_F(S3TierTest, KeysThatAreReplacedAreUsed) {
  const TierFolder folder(TierFolder::On::kMemory);
  const std::string file = folder.path() + "/keys";
  options_.credentials.file = file;
  WriteCredentials(file, kTestAccessKey, kTestSecretKey);
  Begin();
  uint32_t number = 0;
  EXPECT_THAT(Store(tier_.get(), {number++}), Each(TierResult::kDone));
  WriteCredentials(file, "AKIDNOBODY", "nothing");
  EXPECT_TRUE(Eventually([&] { return Store(tier_.get(), {number++})[0] == TierResult::kFailed; }));
  EXPECT_EQ(tier_->usage().nodes_down, 0) << "it answers";
  // What was refused looks at once.
  WriteCredentials(file, kTestAccessKey, kTestSecretKey);
  EXPECT_THAT(Store(tier_.get(), {number}), Each(TierResult::kDone));
}

TEST_F(S3TierTest, ValuesGoThroughTls) {
  options_.client.endpoint = server_->tls_endpoint();
  options_.client.ca_file = server_->ca_file();
  options_.part_bytes = 5 << 20;
  Begin();
  EXPECT_THAT(Store(tier_.get(), Numbers(20)), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), Numbers(20)).right, 20);
  EXPECT_THAT(Store(tier_.get(), {100}, 12 << 20), Each(TierResult::kDone));
  EXPECT_EQ(Load(tier_.get(), {100}, 12 << 20).right, 1);
  EXPECT_TRUE(tier_->Erase(OwnerOf(0), {}).complete);
}

TEST_F(S3TierTest, AnAuthorityThatIsNotKnownIsNotBelieved) {
  options_.client.endpoint = server_->tls_endpoint();
  // The system's.
  EXPECT_THAT(Store(OpenS3(options_).get(), {1}), Each(TierResult::kFailed));
  const TierFolder folder(TierFolder::On::kMemory);
  options_.client.ca_file = MakeCertificates(folder.path(), "IP:127.0.0.1").ca;
  EXPECT_THAT(Store(OpenS3(options_).get(), {1}), Each(TierResult::kFailed));
  options_.client.ca_file = "/no/such/ca";
  EXPECT_THAT(Refusal(options_), HasSubstr("--tier: ca=/no/such/ca: "));
}

TEST_F(S3TierTest, ACertificateOfAnotherNameIsNotBelieved) {
  options_.client.endpoint = server_->tls_endpoint();
  options_.client.endpoint.host = "localhost";
  options_.client.ca_file = server_->ca_file();
  EXPECT_THAT(Store(OpenS3(options_).get(), {1}), Each(TierResult::kFailed));
}

}  // namespace
}  // namespace kvpool
