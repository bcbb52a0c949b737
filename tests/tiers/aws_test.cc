// Signatures, against those that AWS published, and the files that keys are in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/tiers/aws_credentials.h"
#include "server/tiers/aws_signature.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::HasSubstr;

std::string SignatureOf(const AwsRequest& request, const AwsScope& scope, const AwsCredentials& credentials) {
  const std::string text = AwsAuthorization(request, scope, credentials);
  return text.substr(text.find("Signature=") + 10);
}

// ---- The test suite of Signature Version 4. Of its paths only those that S3 has as well: it takes none apart.

class AwsSuite : public testing::Test {
 protected:
  AwsRequest Get(const NamedValues& query = {}) const {
    return {.method = "GET",
            .path = "/",
            .query = query,
            .headers = {{"x-amz-date", "20150830T123600Z"}, {"host", "example.amazonaws.com"}},
            .payload_sha256 = std::string(kEmptySha256)};
  }
  std::string Sign(const AwsRequest& request) const {
    return SignatureOf(
        request, {.region = "us-east-1", .service = "service"},
        {.access_key = "AKIDEXAMPLE", .secret_key = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"});
  }
};

TEST_F(AwsSuite, Vanilla) {
  EXPECT_EQ(AwsAuthorization(
                Get(), {.region = "us-east-1", .service = "service"},
                {.access_key = "AKIDEXAMPLE", .secret_key = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}),
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
            "SignedHeaders=host;x-amz-date, "
            "Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
  AwsRequest post = Get();
  post.method = "POST";
  EXPECT_EQ(Sign(post), "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b");
}

TEST_F(AwsSuite, QueriesAreSorted) {
  EXPECT_EQ(Sign(Get({{"Param2", "value2"}, {"Param1", "value1"}})),
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500");
}

TEST_F(AwsSuite, UnreservedCharactersStay) {
  const std::string all = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  EXPECT_EQ(Sign(Get({{all, all}})), "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197");
}

TEST_F(AwsSuite, Utf8InPathsAndQueries) {
  AwsRequest request = Get();
  request.path = "/\xe1\x88\xb4";
  EXPECT_EQ(Sign(request), "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85");
  EXPECT_EQ(Sign(Get({{"\xe1\x88\xb4", "bar"}})),
            "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04");
}

TEST_F(AwsSuite, SpacesInPaths) {
  AwsRequest request = Get();
  request.path = "/example space/";
  EXPECT_EQ(Sign(request), "652487583200325589f1fba4c7e578f72c47cb61beeca81406b39ddec1366741");
}

TEST_F(AwsSuite, HeadersAreTrimmed) {
  AwsRequest request = Get();
  request.headers.emplace_back("my-header2", " \"a   b   c\" ");
  request.headers.emplace_back("my-header1", " value1");
  EXPECT_EQ(Sign(request), "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736");
}

TEST_F(AwsSuite, SessionTokens) {
  AwsRequest request = Get();
  request.method = "POST";
  request.headers.emplace_back(
      "x-amz-security-token",
      "AQoDYXdzEPT//////////"
      "wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwthAx7mSEI/"
      "qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNV"
      "XAkiY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2"
      "ICCR/oLxBA==");
  EXPECT_EQ(Sign(request), "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead");
}

// ---- The examples of the Amazon S3 API Reference

class S3Examples : public testing::Test {
 protected:
  std::string Sign(const std::string& method, const std::string& path, const NamedValues& query,
                   const NamedValues& headers, const std::string& sha256 = std::string(kEmptySha256)) const {
    AwsRequest request{
        .method = method, .path = path, .query = query, .headers = headers, .payload_sha256 = sha256};
    request.headers.emplace_back("host", "examplebucket.s3.amazonaws.com");
    request.headers.emplace_back("x-amz-date", "20130524T000000Z");
    request.headers.emplace_back("x-amz-content-sha256", sha256);
    return SignatureOf(
        request, {.region = "us-east-1", .service = "s3"},
        {.access_key = "AKIAIOSFODNN7EXAMPLE", .secret_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"});
  }
};

TEST_F(S3Examples, GetObject) {
  EXPECT_EQ(Sign("GET", "/test.txt", {}, {{"range", "bytes=0-9"}}),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

TEST_F(S3Examples, PutObject) {
  EXPECT_EQ(Sign("PUT", "/test$file.text", {},
                 {{"date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                 Sha256Hex("Welcome to Amazon S3.")),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
}

TEST_F(S3Examples, GetBucketLifecycle) {
  EXPECT_EQ(Sign("GET", "/", {{"lifecycle", ""}}, {}),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
}

TEST_F(S3Examples, ListObjects) {
  EXPECT_EQ(Sign("GET", "/", {{"prefix", "J"}, {"max-keys", "2"}}, {}),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(AwsEncodeTest, EveryByteIsItselfOrTwoDigits) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  const std::string encoded = AwsEncode(all, false);
  EXPECT_EQ(encoded.size(), 66 + 3 * (256 - 66));
  EXPECT_EQ(AwsEncode("a/../b//c=@%", true), "a/../b//c%3D%40%25") << "once, and no step is taken";
  EXPECT_EQ(AwsEncode("a/b", false), "a%2Fb");
}

TEST(AwsDateTest, IsUtc) { EXPECT_EQ(AwsDate(absl::FromUnixSeconds(1369353600)), "20130524T000000Z"); }

// ---- Keys

TEST(AwsCredentialsTest, AProfileOfManyIsRead) {
  const std::string text =
      "; AWS's tools write more than is used here\n[default]\r\naws_access_key_id=A\naws_secret_access_key = "
      "s/+=1\nregion = x\n\n# another\n[ two ]\n  aws_access_key_id  =  B  \naws_secret_access_key = "
      "t\naws_session_token=u==\n";
  const auto one = ParseAwsCredentials(text, "default");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->access_key + " " + one->secret_key + " " + one->session_token, "A s/+=1 ");
  const auto two = ParseAwsCredentials(text, "two");
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->access_key + " " + two->secret_key + " " + two->session_token, "B t u==");
}

TEST(AwsCredentialsTest, WhatIsWrongIsNamed) {
  const auto error = [](const std::string& text) {
    return std::string(ParseAwsCredentials(text, "default").status().message());
  };
  EXPECT_EQ(error(""), "it has no [default]");
  EXPECT_EQ(error("[default]\naws_secret_access_key=x"), "[default] has no aws_access_key_id");
  EXPECT_EQ(error("[default]\naws_access_key_id=x\n"), "[default] has no aws_secret_access_key");
  EXPECT_EQ(error("[default\n"), "line 1 begins with [ and has no ] at its end");
  EXPECT_EQ(error("[default]\nAKIA\n"), "line 2 is neither [PROFILE] nor NAME = VALUE");
  const std::string blank = "[default]\naws_secret_access_key=se cret";
  EXPECT_EQ(error(blank), "line 2: aws_secret_access_key must be 1 to 8192 characters without blanks");
  EXPECT_THAT(error("[default]\naws_session_token=" + std::string(8193, 't')), HasSubstr("1 to 8192"));
}

TEST(AwsCredentialSourceTest, AFileThatIsReplacedIsReadAgain) {
  const TierFolder folder(TierFolder::On::kMemory);
  const std::string file = folder.path() + "/keys";
  // As Kubernetes has a Secret: the name is a link to a folder that is changed for another.
  const auto publish = [&](const std::string& generation, const std::string& key) {
    const std::string data = folder.path() + "/" + generation;
    ASSERT_EQ(mkdir(data.c_str(), 0700), 0);
    std::ofstream(data + "/keys") << "[default]\naws_access_key_id=" << key << "\naws_secret_access_key=s\n";
    ASSERT_EQ(chmod((data + "/keys").c_str(), 0600), 0);
    ASSERT_EQ(symlink(data.c_str(), (folder.path() + "/..new").c_str()), 0);
    ASSERT_EQ(rename((folder.path() + "/..new").c_str(), (folder.path() + "/..data").c_str()), 0);
  };
  publish("1", "A");
  ASSERT_EQ(symlink("..data/keys", file.c_str()), 0);
  auto opened = AwsCredentialSource::Open({.file = file});
  ASSERT_TRUE(opened.ok()) << opened.status();
  AwsCredentialSource& source = **opened;
  auto now = AwsCredentialSource::Clock::time_point() + std::chrono::hours(1);
  EXPECT_EQ(source.Current(now).access_key, "A");
  const uint64_t first = source.generation();
  publish("2", "B");
  EXPECT_EQ(source.Current(now).access_key, "A") << "it was looked at a moment ago";
  now += AwsCredentialSource::kLookPause;
  EXPECT_EQ(source.Current(now).access_key, "B");
  EXPECT_NE(source.generation(), first);
  publish("3", "C");
  source.Refused();
  EXPECT_EQ(source.Current(now).access_key, "C") << "it was refused";
  // What can't be read changes nothing.
  ASSERT_EQ(unlink((folder.path() + "/..data").c_str()), 0);
  source.Refused();
  EXPECT_EQ(source.Current(now).access_key, "C");
}

TEST(AwsCredentialSourceTest, TheEnvironmentIsReadWhereThereIsNoFile) {
  for (const char* const name : {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
    unsetenv(name);
  const auto error = [] { return std::string(AwsCredentialSource::Open({}).status().message()); };
  EXPECT_THAT(error(), HasSubstr("credentials-file= is not there, and AWS_ACCESS_KEY_ID is not set either"));
  setenv("AWS_ACCESS_KEY_ID", "A", 1);
  EXPECT_THAT(error(), HasSubstr("AWS_SECRET_ACCESS_KEY is not set either"));
  setenv("AWS_SECRET_ACCESS_KEY", "s\n", 1);
  EXPECT_EQ(error(), "--tier: AWS_SECRET_ACCESS_KEY: must be 1 to 8192 characters without blanks");
  setenv("AWS_SECRET_ACCESS_KEY", "s", 1);
  setenv("AWS_SESSION_TOKEN", "t", 1);
  const auto source = AwsCredentialSource::Open({});
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->Current({}).session_token, "t");
  EXPECT_EQ((*source)->describe(), "credentials of the environment");
}

TEST(AwsCredentialSourceTest, AFileThatOthersMayReadIsRefused) {
  const TierFolder folder(TierFolder::On::kMemory);
  const std::string file = folder.path() + "/keys";
  std::ofstream(file) << "[default]\n";
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  EXPECT_EQ(
      AwsCredentialSource::Open({.file = file}).status().message(),
      absl::StrCat("--tier: credentials-file=", file, ": its mode is 644; at most 640, for it is a secret"));
  EXPECT_THAT(std::string(AwsCredentialSource::Open({.file = "/no/such/file"}).status().message()),
              HasSubstr("--tier: credentials-file=/no/such/file: it can't be opened"));
}

}  // namespace
}  // namespace kvpool
