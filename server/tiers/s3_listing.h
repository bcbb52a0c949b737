// What is in a bucket: pages of names.
#ifndef KVPOOL_SERVER_TIERS_S3_LISTING_H_
#define KVPOOL_SERVER_TIERS_S3_LISTING_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/tiers/s3_client.h"

namespace kvpool {

// DeleteObjects takes as many names as a page has.
inline constexpr size_t kS3PageNames = 1000;

struct S3Object {
  std::string name;
  uint64_t bytes = 0;
};
struct S3Page {
  std::vector<S3Object> objects;
  std::string next;  // The token of the page behind it; empty: it is the last.
};
// Nothing: that is no answer to ListObjectsV2. A page has kS3PageNames at most, whatever the store says.
std::optional<S3Page> ParseS3Page(std::string_view xml);

// Asks for the page of this token, empty: the first. `done` gets null where there is none to be had, with what the store said.
using S3PageDone = std::function<void(std::optional<S3Page> page, const S3Response* response)>;
void ListS3(S3Client* client, const std::string& prefix, const std::string& token, S3PageDone done);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_LISTING_H_
