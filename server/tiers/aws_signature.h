// AWS Signature Version 4 in the Authorization header (Amazon S3 API Reference, "Authenticating Requests").
//
// As S3 has it: a path is encoded once, and its "//", "." and ".." stay, for they are a part of an object's name.
#ifndef KVPOOL_SERVER_TIERS_AWS_SIGNATURE_H_
#define KVPOOL_SERVER_TIERS_AWS_SIGNATURE_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace kvpool {

struct AwsCredentials {
  std::string access_key, secret_key;
  std::string session_token;  // Empty: the keys are for long.
};

using NamedValues = std::vector<std::pair<std::string, std::string>>;

// What is signed, nothing of it encoded.
struct AwsRequest {
  std::string method;
  std::string path;   // Begins with "/".
  NamedValues query;  // The order is no matter.
  // Names in lower case, no two alike; "host" and "x-amz-date" are among them.
  NamedValues headers;
  std::string payload_sha256;  // Hex, or kUnsignedPayload.
};
inline constexpr std::string_view kUnsignedPayload = "UNSIGNED-PAYLOAD";
inline constexpr std::string_view kEmptySha256 =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

struct AwsScope {
  std::string region, service;
};

// All but letters, digits and -._~ as %XX, and "/" where it is not kept.
std::string AwsEncode(std::string_view text, bool keep_slashes);
// As it is signed, and as it stands behind the "?".
std::string AwsQuery(const NamedValues& query);
// 20130524T000000Z
std::string AwsDate(absl::Time time);
// What stands behind "Authorization: ". REQUIRES: x-amz-date is AwsDate of some time.
std::string AwsAuthorization(const AwsRequest& request, const AwsScope& scope,
                             const AwsCredentials& credentials);
// In hex.
std::string Sha256Hex(std::string_view text);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_AWS_SIGNATURE_H_
