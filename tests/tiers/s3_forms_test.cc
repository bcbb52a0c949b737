// What the s3 tier reads and writes, without a server: places, names, headers, XML, and an object's bytes as they come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/tiers/circuit_breaker.h"
#include "server/tiers/crc32c.h"
#include "server/tiers/s3_download.h"
#include "server/tiers/s3_endpoint.h"
#include "server/tiers/s3_listing.h"
#include "server/tiers/s3_value.h"
#include "server/tiers/s3_xml.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// ---- Places

TEST(S3EndpointTest, AUrlSaysAll) {
  const auto amazon = ParseS3Endpoint("https://s3.eu-central-1.amazonaws.com/my.bucket-1");
  ASSERT_TRUE(amazon.ok()) << amazon.status();
  EXPECT_EQ(*amazon,
            (S3Endpoint{
                .tls = true, .host = "s3.eu-central-1.amazonaws.com", .port = 443, .bucket = "my.bucket-1"}));
  EXPECT_EQ(HostOf(*amazon), "s3.eu-central-1.amazonaws.com");
  EXPECT_EQ(PathOf(*amazon, "a/b"), "/my.bucket-1/a/b");
  EXPECT_EQ(PathOf(*amazon, ""), "/my.bucket-1");
  const auto here = ParseS3Endpoint("http://[::1]:8333/abc");
  ASSERT_TRUE(here.ok()) << here.status();
  EXPECT_EQ(*here, (S3Endpoint{.tls = false, .host = "::1", .port = 8333, .bucket = "abc"}));
  EXPECT_EQ(HostOf(*here), "[::1]:8333");
  for (const char* const url :
       {"https://h/abc", "http://h/abc", "https://h:8443/abc", "http://h:443/abc", "http://[::1]/abc"}) {
    EXPECT_EQ(TextOf(*ParseS3Endpoint(url)), url);
  }
  EXPECT_EQ(TextOf(*ParseS3Endpoint("https://h:443/abc")), "https://h/abc");
}

TEST(S3EndpointTest, ABucketMayBeInTheHostsName) {
  S3Endpoint endpoint{.host = "s3.example", .port = 443, .bucket = "abc", .virtual_host = true};
  EXPECT_EQ(HostOf(endpoint), "abc.s3.example");
  EXPECT_EQ(PathOf(endpoint, "a/b"), "/a/b");
  EXPECT_EQ(PathOf(endpoint, ""), "/");
  endpoint.port = 8443;
  EXPECT_EQ(HostOf(endpoint), "abc.s3.example:8443");
}

TEST(S3EndpointTest, AWrongPartIsNamed) {
  const auto error = [](const std::string& url) {
    return std::string(ParseS3Endpoint(url).status().message());
  };
  EXPECT_EQ(
      error("s3.example/abc"),
      "\"s3.example/abc\" begins with neither https:// nor http://; must be http[s]://HOST[:PORT]/BUCKET");
  EXPECT_THAT(error("https://s3.example"), HasSubstr("names no bucket"));
  EXPECT_THAT(error("https:///abc"), HasSubstr("has the host \"\""));
  EXPECT_THAT(error("https://me@h/abc"), HasSubstr("has the host \"me@h\""));
  EXPECT_THAT(error("https://h:0/abc"), HasSubstr("has the port \"0\", not 1 to 65535"));
  EXPECT_THAT(error("https://h:65536/abc"), HasSubstr("not 1 to 65535"));
  EXPECT_THAT(error("https://h:/abc"), HasSubstr("has the port \"\""));
  EXPECT_THAT(error("https://[::1/abc"), HasSubstr("has a [ without its ]"));
  EXPECT_THAT(error("https://[::1]8/abc"), HasSubstr("has the port \"8\""));
  for (const char* const bucket : {"", "ab", "ABC", "a_b", "abc/", "abc/folder", "-abc", "abc.", "a?b"}) {
    EXPECT_THAT(error(absl::StrCat("https://h/", bucket)),
                HasSubstr(absl::StrCat("has the bucket \"", bucket, "\", not 3 to 63")));
  }
  EXPECT_THAT(error("https://h/" + std::string(64, 'a')), HasSubstr("not 3 to 63"));
}

// ---- Names and headers

TEST(S3ValueTest, ANameSaysTheKeyAndBeginsWithItsOwner) {
  std::set<std::string> names;
  for (uint32_t i = 0; i < 500; ++i) {
    TierKey key = KeyOf(i);
    key.group = static_cast<uint8_t>(i);
    key.raw = i % 3 == 0;
    const std::string name = S3ObjectName("a/b", key);
    EXPECT_TRUE(names.insert(name).second);
    EXPECT_EQ(name.rfind(S3OwnerPrefix("a/b", key.owner), 0), 0);
    const auto read = S3KeyOf("a/b", name);
    ASSERT_TRUE(read.has_value()) << name;
    EXPECT_EQ(*read, key);
    EXPECT_EQ(read->owner, key.owner);
    EXPECT_FALSE(S3KeyOf("a", name).has_value());
    EXPECT_FALSE(S3KeyOf("a/b", name + "0").has_value());
    EXPECT_FALSE(S3KeyOf("a/b", name.substr(0, name.size() - 1)).has_value());
  }
  EXPECT_EQ(S3OwnerPrefix("p", OwnerOf(0)), "p/1/01010101010101010101010101010101/");
  // Another daemon must find what is there: this form is for good.
  EXPECT_EQ(
      S3ObjectName("p", KeyOf(1)),
      "p/1/02020202020202020202020202020202/0707070707070707070707070707070707070707070707070707070707070707/"
      "51/0100000000000000000000000000000000000000000000000000000000000000-00-1");
}

TEST(S3ValueTest, AHeaderIsGoodForItsKeyAlone) {
  const auto bytes = MakeS3Header(KeyOf(1), {.value_bytes = 77, .value_crc = 88});
  const std::string_view text(bytes.data(), bytes.size());
  const auto header = ReadS3Header(KeyOf(1), text);
  ASSERT_TRUE(header.has_value());
  EXPECT_EQ(header->value_bytes, 77);
  EXPECT_EQ(header->value_crc, 88);
  EXPECT_FALSE(ReadS3Header(KeyOf(2), text).has_value());
  TierKey others = KeyOf(1);
  others.owner = OwnerOf(2);
  EXPECT_FALSE(ReadS3Header(others, text).has_value());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    auto changed = bytes;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(ReadS3Header(KeyOf(1), {changed.data(), changed.size()}).has_value()) << bit;
  }
}

// ---- An object's bytes, as they come

std::string ObjectOf(uint32_t number, uint64_t bytes) {
  const auto value = ValueOf(number, bytes);
  const auto header =
      MakeS3Header(KeyOf(number), {.value_bytes = bytes, .value_crc = Crc32c(value->data(), bytes)});
  return std::string(header.begin(), header.end()) + std::string(value->data(), bytes);
}

TEST(S3DownloadTest, PiecesOfAnySizeMakeAValue) {
  const std::string object = ObjectOf(1, 1000);
  for (const size_t piece : {1u, 7u, 63u, 64u, 65u, 500u, 2000u}) {
    const auto into = BufferStock(0).Take(1000);
    S3Download download(KeyOf(1), into);
    for (size_t at = 0; at < object.size(); at += piece) {
      EXPECT_NE(download.result(), TierResult::kDone) << at;
      ASSERT_TRUE(download.Receive(at % 2 == 0 ? -1 : static_cast<int64_t>(object.size()),
                                   std::string_view(object).substr(at, piece)));
    }
    EXPECT_EQ(download.result(), TierResult::kDone) << piece;
    EXPECT_EQ(std::memcmp(into->data(), ValueOf(1, 1000)->data(), 1000), 0);
  }
}

TEST(S3DownloadTest, WhatIsNotWantedIsNotRead) {
  const std::string object = ObjectOf(1, 1000);
  const auto verdict = [&](uint64_t into, int64_t said, const std::string& bytes) {
    S3Download download(KeyOf(1), BufferStock(0).Take(into));
    EXPECT_FALSE(download.Receive(said, bytes));
    EXPECT_FALSE(download.Receive(said, bytes)) << "and nothing more";
    return download.result();
  };
  EXPECT_EQ(verdict(999, 1064, object), TierResult::kMiss);
  EXPECT_EQ(verdict(999, -1, object), TierResult::kMiss);
  EXPECT_EQ(verdict(1000, 1063, object), TierResult::kCorrupt) << "it is cut";
  EXPECT_EQ(verdict(1000, 0, object), TierResult::kCorrupt);
  EXPECT_EQ(verdict(1000, INT64_MAX, object), TierResult::kCorrupt);
  EXPECT_EQ(verdict(1000, -1, object + "x"), TierResult::kCorrupt);
  EXPECT_EQ(verdict(1000, 1064, ObjectOf(2, 1000)), TierResult::kCorrupt);
}

TEST(S3DownloadTest, EveryBitOfAValueCounts) {
  const std::string object = ObjectOf(1, 50);
  for (size_t bit = 8 * kS3HeaderBytes; bit < 8 * object.size(); ++bit) {
    std::string changed = object;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    S3Download download(KeyOf(1), BufferStock(0).Take(50));
    EXPECT_TRUE(download.Receive(static_cast<int64_t>(changed.size()), changed));
    EXPECT_EQ(download.result(), TierResult::kCorrupt) << bit;
  }
}

// ---- XML

TEST(S3XmlTest, ElementsAndText) {
  const std::string xml =
      "<?xml version=\"1.0\"?>\n<R xmlns=\"x\"><KeyCount>2</KeyCount><Key>a&amp;b&#39;&lt;&#x1F600;</Key>"
      "<Key/><Key a=\"b\" /><C><Key>second</Key></C></R>";
  EXPECT_THAT(XmlElements(xml, "Key"), ElementsAre("a&amp;b&#39;&lt;&#x1F600;", "", "", "second"));
  EXPECT_EQ(XmlText(xml, "Key"), "a&b'<\xf0\x9f\x98\x80");
  EXPECT_EQ(XmlText(XmlText(xml, "R").empty() ? xml : "", "Key"), "");
  EXPECT_EQ(XmlText(xml, "Nothing"), "");
  EXPECT_EQ(XmlText("<a>&nbsp;&#xFFFFFFFF;&#;&amp</a>", "a"), "&nbsp;&#xFFFFFFFF;&#;&amp");
  std::string all;
  for (int byte = 1; byte < 128; ++byte) all.push_back(static_cast<char>(byte));
  EXPECT_EQ(XmlText("<a>" + XmlEscape(all) + "</a>", "a"), all);
}

TEST(S3XmlTest, AnythingMayComeIn) {
  std::mt19937 random(5);
  static constexpr std::string_view kParts[] = {"<Key",
                                                "<Key>",
                                                "</Key>",
                                                "<Key/>",
                                                "<",
                                                ">",
                                                "<Contents>",
                                                "</Contents>",
                                                "&",
                                                "&#",
                                                ";",
                                                "x",
                                                "<ListBucketResult>",
                                                "</ListBucketResult>",
                                                "<Size>1</Size>"};
  for (int round = 0; round < 20000; ++round) {
    std::string xml;
    for (size_t parts = random() % 30; parts > 0; --parts) xml += kParts[random() % std::size(kParts)];
    for (const std::string_view key : XmlElements(xml, "Key")) EXPECT_LE(key.size(), xml.size());
    if (const auto page = ParseS3Page(xml)) {
      for (const S3Object& object : page->objects) EXPECT_FALSE(object.name.empty());
    }
  }
}

TEST(S3ListingTest, APageIsReadOrRefused) {
  const auto page = ParseS3Page(
      "<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated><Contents><Key>a&amp;</Key><Size>5</"
      "Size>"
      "</Contents><Contents><Key>b</Key><Size>0</Size></Contents><NextContinuationToken>t=</"
      "NextContinuationToken>"
      "</ListBucketResult>");
  ASSERT_TRUE(page.has_value());
  ASSERT_EQ(page->objects.size(), 2);
  EXPECT_EQ(page->objects[0].name, "a&");
  EXPECT_EQ(page->objects[0].bytes, 5);
  EXPECT_EQ(page->next, "t=");
  const auto last = ParseS3Page("<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>");
  ASSERT_TRUE(last.has_value());
  EXPECT_THAT(last->objects, IsEmpty());
  EXPECT_EQ(last->next, "");
  const auto wrong = [](const std::string& inner) {
    return !ParseS3Page("<ListBucketResult>" + inner + "</ListBucketResult>").has_value();
  };
  EXPECT_FALSE(ParseS3Page("<html></html>").has_value());
  EXPECT_TRUE(wrong("<IsTruncated>true</IsTruncated>")) << "and no token";
  EXPECT_TRUE(wrong("<Contents><Size>1</Size></Contents>"));
  EXPECT_TRUE(wrong("<Contents><Key>a</Key><Size>-1</Size></Contents>"));
  std::string many;
  for (size_t i = 0; i <= kS3PageNames; ++i) many += "<Contents><Key>a</Key><Size>1</Size></Contents>";
  EXPECT_TRUE(wrong(many));
}

// ---- The breaker

TEST(CircuitBreakerTest, ItOpensAfterThreeFailuresInARowForLongerEachTime) {
  using std::chrono::milliseconds;
  CircuitBreaker breaker(milliseconds(100), milliseconds(300));
  CircuitBreaker::Clock::time_point now;
  EXPECT_FALSE(breaker.Failed());
  EXPECT_FALSE(breaker.Failed());
  breaker.Replied();
  EXPECT_FALSE(breaker.Failed());
  EXPECT_FALSE(breaker.Failed());
  EXPECT_TRUE(breaker.Failed());
  for (const int pause : {100, 200, 300, 300}) {
    breaker.Open(now);
    EXPECT_EQ(breaker.open_until(), now + milliseconds(pause));
    EXPECT_FALSE(breaker.Failed()) << "it is open";
    breaker.Replied();
    EXPECT_FALSE(breaker.closed()) << "that was asked before";
    now = breaker.open_until();
    breaker.TryAgain();
    EXPECT_EQ(breaker.state(), CircuitBreaker::State::kHalfOpen);
  }
  breaker.Close();
  EXPECT_TRUE(breaker.closed());
  EXPECT_TRUE(breaker.Failed()) << "once more is enough";
  breaker.Open(now);
  breaker.TryAgain();
  breaker.Close();
  breaker.Replied();
  EXPECT_FALSE(breaker.Failed());
  breaker.Open(now);
  EXPECT_EQ(breaker.open_until(), now + milliseconds(100)) << "the pause is the first again";
}

}  // namespace
}  // namespace kvpool
