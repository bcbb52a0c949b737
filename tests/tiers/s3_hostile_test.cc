// A server that answers what a test wants: errors that a real one can't be brought to, and nonsense. Whatever it says, each value is
// answered, nothing wrong is loaded, and nothing is waited for for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/mutex.h"
#include "server/tiers/s3_tier.h"
#include "server/tiers/s3_value.h"
#include "tests/tiers/fake_s3_store.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/s3_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

// ---- Nonsense

std::string GarbageAnswer(std::mt19937* random) {
  const auto pick = [&](size_t n) { return (*random)() % n; };
  static const std::string kWhole[] = {
      Answer(200),
      Answer(200, "x"),
      Answer(204),
      Answer(206, "x"),
      Answer(404),
      ErrorOf(404, "NoSuchKey"),
      ErrorOf(404, "NoSuchBucket"),
      ErrorOf(403, "AccessDenied"),
      ErrorOf(503, "SlowDown"),
      ErrorOf(500, "<Code>"),
      ErrorOf(301, "PermanentRedirect", "Location: http://127.0.0.1:1/\r\n"),
      Answer(304),
      Answer(999),
      PageOf({}),
      PageOf({"kvpool/1/x", "", "&#0;"}),
      Answer(200, std::string(64, '\0')),
      Answer(200, "KVS3" + std::string(5060, '\1')),
      "HTTP/1.1 200 X\r\nContent-Length: 99999999999999999999\r\n\r\n",
      "HTTP/1.1 200 X\r\nContent-Length: -1\r\n\r\n",
      "HTTP/1.1 200 X\r\nContent-Length: 5064\r\n\r\nKVS3",
      "HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
      "HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nKVS\r\n0\r\n\r\n",
      "HTTP/1.1 100 Continue\r\n\r\n",
      "HTTP/1.1 200\r\n\r\n",
      "HTTP/0.9 x",
      "HTTP/2 200\r\n\r\n",
      "HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
      "HTTP/1.1 200 X\r\n" + std::string(70000, 'h') + ": 1\r\n\r\n",
      "HTTP/1.1 401 X\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n",
      "\r\n\r\n"};
  std::string text;
  for (size_t parts = 1 + pick(3); parts > 0; --parts) {
    switch (pick(4)) {
      case 0:
      case 1:
        text += kWhole[pick(std::size(kWhole))];
        break;
      case 2: {
        const std::string& whole = kWhole[pick(std::size(kWhole))];
        text += whole.substr(0, pick(whole.size() + 1));
        break;
      }
      default:
        for (size_t bytes = pick(200); bytes > 0; --bytes) text.push_back(static_cast<char>(pick(256)));
    }
  }
  return text;
}

TEST(S3HostileTest, GarbageIsNeverAValue) {
  std::mt19937 random(11);
  bool open = false;
  FakeS3Store store(
      [&](const S3Asked&) { return std::exchange(open, true) ? GarbageAnswer(&random) : PageOf({}); });
  S3Tier::Options options = store.options();
  options.client.io_timeout = milliseconds(50);
  const auto tier = OpenS3(options);
  uint32_t number = 0;
  const auto end = std::chrono::steady_clock::now() + 2 * kTestLimit;
  while (store.said() < 300 && std::chrono::steady_clock::now() < end) {
    const auto deadline = std::chrono::steady_clock::now() + milliseconds(200);
    EXPECT_EQ(Load(tier.get(), Numbers(3, number), kValueBytes, deadline).right, 0);
    Exists(tier.get(), Numbers(3, number));
    Store(tier.get(), {number++});
    if (number % 10 == 0) {
      tier->Erase(OwnerOf(0), {});
      tier->CountOf(OwnerOf(0)).IgnoreError();
    }
  }
  EXPECT_GE(store.said(), 300);
  EXPECT_EQ(tier->usage().waiting, 0);
}

TEST(S3HostileTest, AStartIsRefusedOrNotWhateverComes) {
  std::mt19937 random(12);
  FakeS3Store store([&](const S3Asked&) { return GarbageAnswer(&random); });
  S3Tier::Options options = store.options();
  options.client.io_timeout = milliseconds(20);
  for (int i = 0; i < 100; ++i) S3Tier::Open(options).IgnoreError();
  EXPECT_GE(store.said(), 100);
}

TEST(S3HostileTest, HeadersWithoutEndAreNotKept) {
  FakeS3Store store([](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    std::string text = "HTTP/1.1 200 X\r\n";
    while (text.size() < 200000) text += "x-more: of this\r\n";
    return text;
  });
  const auto tier = OpenS3(store.options());
  EXPECT_THAT(Load(tier.get(), {1}).results, Each(TierResult::kFailed));
}

TEST(S3HostileTest, OneThatSaysNothingIsLeftAlone) {
  FakeS3Store store([](const S3Asked& asked) { return asked.Is("GET", "list-type") ? PageOf({}) : ""; });
  S3Tier::Options options = store.options();
  options.client.io_timeout = milliseconds(50);
  options.client.first_pause = options.client.longest_pause = kTestLimit;
  const auto tier = OpenS3(options);
  EXPECT_TRUE(Eventually([&] {
    EXPECT_THAT(Load(tier.get(), {1}).results, Each(TierResult::kFailed));
    return tier->usage().nodes_down == 1;
  }));
  EXPECT_THAT(Exists(tier.get(), {1}), Each(false));
}

TEST(S3HostileTest, A404OfNoStoreIsNoMiss) {
  FakeS3Store store([](const S3Asked& asked) {
    return asked.Is("GET", "list-type") ? PageOf({}) : Answer(404, "<html>Not Found</html>");
  });
  const auto tier = OpenS3(store.options());
  EXPECT_THAT(Load(tier.get(), {1}).results, Each(TierResult::kFailed));
}

TEST(S3HostileTest, AListingWithoutEndEnds) {
  std::atomic<int> pages{0};
  FakeS3Store store([&](const S3Asked& asked) {
    if (asked.Is("GET", "uploads")) return ErrorOf(501, "NotImplemented");
    if (asked.Is("POST", "delete")) return Answer(200, "<DeleteResult></DeleteResult>");
    if (!asked.Is("GET", "1%2F0101")) return PageOf({});
    ++pages;
    // What is not the owner's is not deleted, and nothing says that it is the last page.
    return Answer(200,
                  "<ListBucketResult><IsTruncated>true</IsTruncated><Contents><Key>others</Key><Size>1</Size>"
                  "</Contents><NextContinuationToken>t</NextContinuationToken></ListBucketResult>");
  });
  const auto tier = OpenS3(store.options());
  std::atomic<bool> stop{false};
  TierErased erased;
  std::thread caller([&] { erased = tier->Erase(OwnerOf(0), {}, &stop); });
  EXPECT_TRUE(Eventually([&] { return pages > 10; }));
  stop = true;
  caller.join();
  EXPECT_FALSE(erased.complete);
  EXPECT_EQ(erased.values, 0);
}

// ---- What a store says when it has too much to do, or no room

TEST(S3BusyTest, WhoIsToldToBeSlowerTriesAgain) {
  std::atomic<int> gets{0}, puts{0};
  FakeS3Store store([&](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (asked.Is("HEAD")) return std::string("HTTP/1.1 404 X\r\n\r\n");
    if (asked.Is("PUT")) return ++puts < 3 ? ErrorOf(503, "SlowDown") : Answer(200);
    return ++gets < 4 ? ErrorOf(500, "InternalError") : ErrorOf(404, "NoSuchKey");
  });
  const auto tier = OpenS3(store.options());
  EXPECT_THAT(Store(tier.get(), {1}), ElementsAre(TierResult::kDone));
  EXPECT_EQ(puts, 3);
  EXPECT_THAT(Load(tier.get(), {2}).results, ElementsAre(TierResult::kMiss));
  EXPECT_EQ(gets, 4);
  EXPECT_EQ(tier->usage().nodes_down, 0);
}

TEST(S3BusyTest, NobodyTriesAgainBeyondItsDeadline) {
  std::atomic<int> gets{0};
  FakeS3Store store([&](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    ++gets;
    return ErrorOf(503, "SlowDown");
  });
  S3Tier::Options options = store.options();
  options.client.retry_pause = kTestLimit;
  const auto tier = OpenS3(options);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_THAT(Load(tier.get(), {1}, kValueBytes, began + kTestLimit / 3).results,
              ElementsAre(TierResult::kFailed));
  EXPECT_EQ(gets, 1) << "the pause would have been longer";
  EXPECT_LT(std::chrono::steady_clock::now() - began, kTestLimit / 3);
}

TEST(S3BusyTest, OneThatStaysBusyIsLeftAlone) {
  std::atomic<bool> busy{true};
  FakeS3Store store([&](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (busy) return ErrorOf(503, "SlowDown");
    return asked.Is("HEAD") ? std::string("HTTP/1.1 200 X\r\n\r\n") : ErrorOf(404, "NoSuchKey");
  });
  S3Tier::Options options = store.options();
  options.client.first_pause = options.client.longest_pause = milliseconds(200);
  const auto tier = OpenS3(options);
  EXPECT_THAT(Load(tier.get(), Numbers(3)).results, Each(TierResult::kFailed));
  EXPECT_TRUE(Eventually([&] { return tier->usage().nodes_down == 1; }));
  busy = false;
  EXPECT_TRUE(Eventually([&] { return tier->usage().nodes_down == 0; }));
  EXPECT_THAT(Load(tier.get(), {1}).results, ElementsAre(TierResult::kMiss));
}

TEST(S3BusyTest, AStoreWithoutRoomIsFull) {
  FakeS3Store store([](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (asked.Is("HEAD")) return std::string("HTTP/1.1 404 X\r\n\r\n");
    return ErrorOf(403, "QuotaExceeded");
  });
  const auto tier = OpenS3(store.options());
  EXPECT_THAT(Store(tier.get(), {1, 2}), Each(TierResult::kFull));
  EXPECT_EQ(tier->usage().counters.full, 2);
}

// ---- Connections

TEST(S3ConnectionTest, TheyAreKeptAndBounded) {
  FakeS3Store store([](const S3Asked& asked) {
    return asked.Is("GET", "list-type") ? PageOf({}) : ErrorOf(404, "NoSuchKey");
  });
  S3Tier::Options options = store.options();
  options.client.connections = 3;
  const auto tier = OpenS3(options);
  for (int round = 0; round < 20; ++round) {
    EXPECT_THAT(Load(tier.get(), Numbers(20)).results, Each(TierResult::kMiss));
  }
  EXPECT_EQ(store.said(), 401);
  EXPECT_LE(store.most_at_once(), 3);
  EXPECT_LE(store.connections(), 3);
}

TEST(S3ConnectionTest, LoadsHaveSomeForThemselves) {
  std::atomic<int> heads{0}, stored{0}, loaded{0};
  FakeS3Store store([&](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (!asked.Is("HEAD")) return ErrorOf(404, "NoSuchKey");
    ++heads;
    return std::string();
  });
  S3Tier::Options options = store.options();
  options.client.connections = 8;
  const auto tier = OpenS3(options);
  std::vector<TierStore> stores;
  for (uint32_t i = 0; i < 20; ++i) stores.push_back({KeyOf(i), ValueOf(i)});
  tier->Store(std::move(stores), [&](size_t, TierResult) { ++stored; });
  EXPECT_TRUE(Eventually([&] { return heads == 6; }));
  tier->Load({{KeyOf(100), BufferStock(0).Take(kValueBytes)}}, Tier::Deadline::max(),
             [&](size_t, TierResult result) { loaded += result == TierResult::kMiss; });
  EXPECT_TRUE(Eventually([&] { return loaded == 1; }));
  EXPECT_EQ(stored, 0);
  EXPECT_EQ(heads, 6);
}

TEST(S3ConnectionTest, OneThatWasClosedMeanwhileIsMadeAnew) {
  std::atomic<int> asked_of{0};
  FakeS3Store store([&](const S3Asked& asked) -> std::optional<std::string> {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (asked.Is("HEAD")) return "HTTP/1.1 404 X\r\n\r\n";
    // Of each connection one request is answered: the next one on it meets a closed door.
    if (++asked_of % 2 == 0) return std::nullopt;
    return Answer(200);
  });
  const auto tier = OpenS3(store.options());
  uint32_t done = 0;
  for (uint32_t i = 0; i < 10; ++i) done += Store(tier.get(), {i})[0] == TierResult::kDone;
  EXPECT_EQ(done, 10);
}

// ---- Who may, and when

std::string Refusal(const FakeS3Store& store) {
  const auto tier = S3Tier::Open(store.options());
  return tier.ok() ? "" : std::string(tier.status().message());
}

TEST(S3RefusalTest, OtherClocksAreNamed) {
  FakeS3Store store([](const S3Asked&) {
    return ErrorOf(403, "RequestTimeTooSkewed", "Date: Fri, 24 May 2013 00:00:00 GMT\r\n");
  });
  EXPECT_THAT(Refusal(store), HasSubstr("the clocks differ by more than it takes: here it is 20"));
  EXPECT_THAT(Refusal(store), HasSubstr("there 2013-05-24T00:00:00+00:00 (HTTP status 403"));
}

TEST(S3RefusalTest, OtherRegionsAreNamed) {
  FakeS3Store moved([](const S3Asked&) {
    return ErrorOf(301, "PermanentRedirect", "x-amz-bucket-region: eu-north-1\r\n");
  });
  EXPECT_THAT(Refusal(moved),
              HasSubstr("region=us-east-1 is not that of bucket \"kvpool-test\", which is eu-north-1"));
  FakeS3Store malformed([](const S3Asked&) {
    return Answer(400, "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>");
  });
  EXPECT_THAT(Refusal(malformed), HasSubstr("which is eu-west-1"));
}

TEST(S3RefusalTest, MissingRightsAndOldTokensAreNamed) {
  FakeS3Store denied([](const S3Asked&) { return ErrorOf(403, "AccessDenied"); });
  EXPECT_THAT(Refusal(denied),
              HasSubstr("may not do this in bucket \"kvpool-test\": they need s3:ListBucket"));
  FakeS3Store old([](const S3Asked&) { return ErrorOf(400, "ExpiredToken"); });
  EXPECT_THAT(Refusal(old), HasSubstr("the session token is not good any more"));
  FakeS3Store word([](const S3Asked&) { return ErrorOf(400, "InvalidRequest"); });
  EXPECT_THAT(Refusal(word), testing::EndsWith("it says no (HTTP status 400, InvalidRequest)"));
}

TEST(S3RefusalTest, AStoreThatIsNotWellKeepsNobodyFromStarting) {
  // The second and the third are what proxies say whose store is away.
  for (const std::string& answer : {ErrorOf(503, "ServiceUnavailable"), Answer(404, "<html>none</html>"),
                                    Answer(200, "<html>soon</html>"), ErrorOf(403, "no\nword")}) {
    FakeS3Store store([&](const S3Asked&) { return answer; });
    EXPECT_EQ(Refusal(store), "") << answer;
  }
}

TEST(S3SignedTest, TokensAndBytesAreSigned) {
  Mutex mu;
  std::vector<S3Asked> puts;
  FakeS3Store store([&](const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (asked.Is("HEAD")) return std::string("HTTP/1.1 404 X\r\n\r\n");
    MutexLock lock(&mu);
    puts.push_back(asked);
    return Answer(200);
  });
  S3Tier::Options options = store.options();
  setenv("AWS_SESSION_TOKEN", "token==", 1);
  const auto tier = OpenS3(options);
  unsetenv("AWS_SESSION_TOKEN");
  EXPECT_THAT(Store(tier.get(), {1}), ElementsAre(TierResult::kDone));
  MutexLock lock(&mu);
  ASSERT_EQ(puts.size(), 1);
  EXPECT_EQ(puts[0].Header("x-amz-security-token"), "token==");
  EXPECT_EQ(puts[0].body.size(), kS3HeaderBytes + kValueBytes);
  EXPECT_EQ(puts[0].Header("x-amz-content-sha256"), Sha256Hex(puts[0].body));
  EXPECT_THAT(puts[0].Header("Authorization"),
              HasSubstr("SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token, "));
}

// ---- Parts

// A store that has parts, and says `to_complete` once it has all.
class PartsTest : public testing::Test {
 protected:
  std::optional<std::string> Say(const S3Asked& asked) {
    if (asked.Is("GET", "list-type")) return PageOf({});
    if (asked.Is("HEAD")) return "HTTP/1.1 404 X\r\n\r\n";
    if (asked.Is("DELETE", "uploadId=u%3D1")) {
      ++aborted_;
      return Answer(204);
    }
    if (asked.Is("POST", "uploads="))
      return Answer(
          200, "<InitiateMultipartUploadResult><UploadId>u=1</UploadId></InitiateMultipartUploadResult>");
    if (asked.Is("POST", "uploadId=u%3D1")) {
      completed_ = asked.body;
      return to_complete_;
    }
    wrong_ += asked.Header("x-amz-content-sha256") != Sha256Hex(asked.body);
    const int part = ++parts_;
    if (part == refused_) return ErrorOf(403, "AccessDenied");
    return Answer(200, "", "ETag: \"e\"\r\n");
  }
  TierResult StoreParts() {
    S3Tier::Options options = store_.options();
    options.part_bytes = 1000;
    const auto tier = OpenS3(options);
    const TierResult result = Store(tier.get(), {1}, 9500)[0];
    // Nobody waits for the end of the upload.
    EXPECT_TRUE(Eventually([&] { return aborted_ == (result == TierResult::kDone ? 0 : 1); }));
    return result;
  }

  int refused_ = 0;
  std::string to_complete_ =
      Answer(200, "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>");
  std::atomic<int> parts_{0}, aborted_{0}, wrong_{0};
  std::string completed_;
  FakeS3Store store_{[this](const S3Asked& asked) { return Say(asked); }};
};

TEST_F(PartsTest, AllOfThemMakeAValue) {
  EXPECT_EQ(StoreParts(), TierResult::kDone);
  EXPECT_EQ(parts_, 10);
  EXPECT_EQ(wrong_, 0);
  EXPECT_THAT(completed_,
              HasSubstr("<Part><PartNumber>10</PartNumber><ETag>&quot;e&quot;</ETag></Part></Complete"));
}

TEST_F(PartsTest, OneThatIsRefusedEndsTheUpload) {
  refused_ = 3;
  EXPECT_EQ(StoreParts(), TierResult::kFailed);
  EXPECT_LT(parts_, 10);
  EXPECT_EQ(completed_, "");
}

TEST_F(PartsTest, AnErrorMayComeWithStatus200) {
  to_complete_ = Answer(200, "<Error><Code>InternalError</Code></Error>");
  EXPECT_EQ(StoreParts(), TierResult::kFailed);
  EXPECT_EQ(parts_, 10);
}

// ---- Erasing

class EraseTest : public testing::Test {
 protected:
  std::string Name(uint32_t number) const { return S3ObjectName("kvpool", KeyOf(number)); }
  std::optional<std::string> Say(const S3Asked& asked) {
    MutexLock lock(&mu_);
    if (asked.Is("GET", "uploads")) return to_uploads_;
    if (asked.Is("GET", "list-type")) return PageOf(names_);
    if (asked.Is("POST", "delete=")) {
      EXPECT_NE(asked.Header("content-md5"), "");
      ++batches_;
      if (!to_batch_.empty()) return to_batch_;
      std::string body = "<DeleteResult>";
      std::erase_if(names_, [&](const std::string& name) {
        if (!absl::StrContains(asked.body, name) || name == kept_) return false;
        absl::StrAppend(&body, "<Deleted><Key>", name, "</Key>",
                        markers_ ? "<DeleteMarker>true</DeleteMarker>" : "", "</Deleted>");
        return true;
      });
      if (!kept_.empty())
        absl::StrAppend(&body, "<Error><Key>", kept_, "</Key><Code>AccessDenied</Code></Error>");
      return Answer(200, body + "</DeleteResult>");
    }
    if (!asked.Is("DELETE")) return ErrorOf(404, "NoSuchKey");
    ++singles_;
    std::erase_if(names_, [&](const std::string& name) { return absl::StrContains(asked.line, name + " "); });
    return markers_ ? Answer(204, "", "x-amz-delete-marker: true\r\n") : Answer(204);
  }
  TierErased Erase() {
    tier_ = OpenS3(store_.options());
    return tier_->Erase(OwnerOf(0), more_);
  }

  Mutex mu_;
  std::vector<std::string> names_ = {Name(0), Name(2), Name(4)};
  std::vector<TierKey> more_;
  std::string to_uploads_ = Answer(200, "<ListMultipartUploadsResult></ListMultipartUploadsResult>");
  std::string to_batch_, kept_;
  bool markers_ = false;
  std::atomic<int> batches_{0}, singles_{0};
  FakeS3Store store_{[this](const S3Asked& asked) { return Say(asked); }};
  std::unique_ptr<S3Tier> tier_;
};

TEST_F(EraseTest, AStoreWithoutBatchesIsAskedOneByOne) {
  for (const std::string& answer : {ErrorOf(501, "NotImplemented"), ErrorOf(405, "MethodNotAllowed"),
                                    ErrorOf(403, "AccessDenied"), ErrorOf(400, "InvalidRequest")}) {
    names_ = {Name(0), Name(2), Name(4)};
    batches_ = singles_ = 0;
    to_batch_ = answer;
    const TierErased erased = Erase();
    EXPECT_EQ(erased.values, 3);
    EXPECT_EQ(erased.bytes, 3 * (100 - kS3HeaderBytes));
    EXPECT_TRUE(erased.complete);
    EXPECT_EQ(batches_, 1);
    EXPECT_EQ(singles_, 3);
  }
}

TEST_F(EraseTest, WhatIsNotDeletedIsCounted) {
  kept_ = Name(2);
  const TierErased erased = Erase();
  EXPECT_EQ(erased.values, 2);
  EXPECT_EQ(erased.failed, 1);
  EXPECT_FALSE(erased.complete);
  EXPECT_EQ(tier_->CountOf(OwnerOf(0)).value_or(99), 1);
}

TEST_F(EraseTest, VersionsAndPartsThatStayAreNamed) {
  markers_ = true;
  to_uploads_ = ErrorOf(403, "AccessDenied");
  TierErased erased = Erase();
  EXPECT_TRUE(erased.complete);
  EXPECT_THAT(erased.remains, HasSubstr("parts of values that were never whole"));
  EXPECT_THAT(erased.remains, HasSubstr("earlier versions of what was deleted"));
  names_ = {Name(0)};
  to_uploads_ = ErrorOf(501, "NotImplemented");
  to_batch_ = ErrorOf(501, "NotImplemented");
  erased = Erase();
  EXPECT_THAT(erased.remains, testing::StartsWith("earlier versions"));
}

TEST_F(EraseTest, AStoreThatDoesNotListIsSaidToHaveAll) {
  to_batch_ = ErrorOf(503, "SlowDown");
  const TierErased erased = Erase();
  EXPECT_FALSE(erased.complete);
  EXPECT_THAT(erased.remains,
              HasSubstr("could not be listed to its end or emptied: it says no (HTTP status 503"));
}

TEST_F(EraseTest, NamesOfAnotherOwnerGoWhereTheCallerNamesThem) {
  more_ = {KeyOf(1), KeyOf(2)};
  names_.push_back(Name(1));
  EXPECT_EQ(Erase().values, 3) << "that was not listed for this owner";
  EXPECT_EQ(singles_, 1);
}

}  // namespace
}  // namespace kvpool
