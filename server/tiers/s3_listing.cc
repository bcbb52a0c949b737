#include "server/tiers/s3_listing.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/tiers/s3_xml.h"

namespace kvpool {
namespace {

constexpr size_t kMostTokenBytes = 4096;

}  // namespace

std::optional<S3Page> ParseS3Page(std::string_view xml) {
  const auto results = XmlElements(xml, "ListBucketResult");
  if (results.size() != 1) return std::nullopt;
  S3Page page;
  for (const std::string_view contents : XmlElements(results[0], "Contents")) {
    S3Object object{.name = XmlText(contents, "Key")};
    if (object.name.empty() || !absl::SimpleAtoi(XmlText(contents, "Size"), &object.bytes) ||
        page.objects.size() == kS3PageNames) {
      return std::nullopt;
    }
    page.objects.push_back(std::move(object));
  }
  if (XmlText(results[0], "IsTruncated") == "true") {
    page.next = XmlText(results[0], "NextContinuationToken");
    if (page.next.empty() || page.next.size() > kMostTokenBytes) return std::nullopt;
  }
  return page;
}

void ListS3(S3Client* client, const std::string& prefix, const std::string& token, S3PageDone done) {
  S3Request request{
      .query = {{"list-type", "2"}, {"max-keys", absl::StrCat(kS3PageNames)}, {"prefix", prefix}}};
  if (!token.empty()) request.query.emplace_back("continuation-token", token);
  request.done = [done = std::move(done)](const S3Response* response) {
    done(response != nullptr && response->status == 200 ? ParseS3Page(response->body) : std::nullopt,
         response);
  };
  client->Send(std::move(request));
}

}  // namespace kvpool
