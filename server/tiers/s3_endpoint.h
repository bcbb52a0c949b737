// Where a bucket is, and how its objects are addressed.
#ifndef KVPOOL_SERVER_TIERS_S3_ENDPOINT_H_
#define KVPOOL_SERVER_TIERS_S3_ENDPOINT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvpool {

struct S3Endpoint {
  bool tls = true;
  std::string host;  // An IPv6 address has no brackets here.
  uint16_t port = 443;
  std::string bucket;
  bool virtual_host = false;  // BUCKET.HOST, instead of HOST/BUCKET.

  friend bool operator==(const S3Endpoint&, const S3Endpoint&) = default;
};

// http[s]://HOST[:PORT]/BUCKET. INVALID_ARGUMENT says which part is wrong, and what it may be.
absl::StatusOr<S3Endpoint> ParseS3Endpoint(std::string_view url);
// As it was written.
std::string TextOf(const S3Endpoint& endpoint);
// What a request says it asks, with the port where that is not the scheme's.
std::string HostOf(const S3Endpoint& endpoint);
// The path of an object, or, of no name, of the bucket; not encoded.
std::string PathOf(const S3Endpoint& endpoint, std::string_view object);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_ENDPOINT_H_
