#include "server/tiers/s3_endpoint.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kvpool {
namespace {

constexpr uint16_t kHttpPort = 80, kHttpsPort = 443;
constexpr size_t kMostHostBytes = 253;
constexpr size_t kLeastBucket = 3, kMostBucket = 63;

absl::Status Wrong(absl::string_view url, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("\"", url, "\" ", what, "; must be http[s]://HOST[:PORT]/BUCKET"));
}

bool GoodHost(absl::string_view host, bool address) {
  return !host.empty() && host.size() <= kMostHostBytes &&
         std::all_of(host.begin(), host.end(), [address](unsigned char c) {
           return address ? absl::ascii_isxdigit(c) || c == ':' || c == '.'
                          : absl::ascii_isalnum(c) || c == '-' || c == '.' || c == '_';
         });
}

bool GoodBucket(absl::string_view bucket) {
  const auto inner = [](unsigned char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c); };
  return bucket.size() >= kLeastBucket && bucket.size() <= kMostBucket && inner(bucket.front()) &&
         inner(bucket.back()) && std::all_of(bucket.begin(), bucket.end(), [&](unsigned char c) {
           return inner(c) || c == '-' || c == '.';
         });
}

std::string WithPort(const std::string& host, const S3Endpoint& endpoint) {
  const bool usual = endpoint.port == (endpoint.tls ? kHttpsPort : kHttpPort);
  return usual ? host : absl::StrCat(host, ":", endpoint.port);
}

std::string Bracketed(const std::string& host) {
  return absl::string_view(host).find(':') == absl::string_view::npos ? host : absl::StrCat("[", host, "]");
}

}  // namespace

absl::StatusOr<S3Endpoint> ParseS3Endpoint(std::string_view text) {
  const absl::string_view url(text.data(), text.size());
  absl::string_view rest = url;
  S3Endpoint endpoint;
  if (absl::ConsumePrefix(&rest, "http://")) {
    endpoint.tls = false;
    endpoint.port = kHttpPort;
  } else if (!absl::ConsumePrefix(&rest, "https://")) {
    return Wrong(url, "begins with neither https:// nor http://");
  }
  const size_t slash = rest.find('/');
  if (slash == absl::string_view::npos) return Wrong(url, "names no bucket");
  absl::string_view host = rest.substr(0, slash);
  const absl::string_view bucket = rest.substr(slash + 1);
  const bool address = absl::ConsumePrefix(&host, "[");
  const size_t end = address ? host.find(']') : host.find(':');
  absl::string_view port = end == absl::string_view::npos ? "" : host.substr(end + (address ? 1 : 0));
  if (address && end == absl::string_view::npos) return Wrong(url, "has a [ without its ]");
  host = host.substr(0, end);
  if (!GoodHost(host, address)) return Wrong(url, absl::StrCat("has the host \"", host, "\""));
  if (!port.empty()) {
    uint32_t number = 0;
    if (!absl::ConsumePrefix(&port, ":") || !absl::SimpleAtoi(port, &number) || number < 1 ||
        number > UINT16_MAX) {
      return Wrong(url, absl::StrCat("has the port \"", port, "\", not 1 to 65535"));
    }
    endpoint.port = static_cast<uint16_t>(number);
  }
  if (!GoodBucket(bucket)) {
    return Wrong(url, absl::StrCat("has the bucket \"", bucket, "\", not ", kLeastBucket, " to ", kMostBucket,
                                   " lower-case letters, digits, - and . (folders are for prefix=)"));
  }
  endpoint.host = std::string(host);
  endpoint.bucket = std::string(bucket);
  return endpoint;
}

std::string TextOf(const S3Endpoint& endpoint) {
  return absl::StrCat(endpoint.tls ? "https://" : "http://", WithPort(Bracketed(endpoint.host), endpoint),
                      "/", endpoint.bucket);
}

std::string HostOf(const S3Endpoint& endpoint) {
  const std::string host = Bracketed(endpoint.host);
  return WithPort(endpoint.virtual_host ? absl::StrCat(endpoint.bucket, ".", host) : host, endpoint);
}

std::string PathOf(const S3Endpoint& endpoint, std::string_view object) {
  const std::string name(object);
  if (endpoint.virtual_host) return absl::StrCat("/", name);
  return name.empty() ? absl::StrCat("/", endpoint.bucket) : absl::StrCat("/", endpoint.bucket, "/", name);
}

}  // namespace kvpool
