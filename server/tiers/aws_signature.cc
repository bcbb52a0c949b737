#include "server/tiers/aws_signature.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

constexpr std::string_view kAlgorithm = "AWS4-HMAC-SHA256";
constexpr size_t kDayBytes = 8;  // YYYYMMDD

std::string Hmac(std::string_view key, std::string_view text) {
  unsigned char out[EVP_MAX_MD_SIZE];
  unsigned bytes = 0;
  const auto* const data = reinterpret_cast<const unsigned char*>(text.data());
  KVPOOL_CHECK(
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), data, text.size(), out, &bytes) != nullptr,
      "OpenSSL has no HMAC of %zu bytes", text.size());
  return {reinterpret_cast<const char*>(out), bytes};
}

// Blanks around a header's value go, and those within it become one.
std::string Trimmed(std::string_view value) {
  std::string text(value);
  absl::RemoveExtraAsciiWhitespace(&text);
  return text;
}

}  // namespace

std::string AwsEncode(std::string_view text, bool keep_slashes) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (absl::ascii_isalnum(byte) || c == '-' || c == '.' || c == '_' || c == '~' ||
        (c == '/' && keep_slashes)) {
      out.push_back(c);
    } else {
      out.append({'%', kDigits[byte >> 4], kDigits[byte & 15]});
    }
  }
  return out;
}

std::string AwsQuery(const NamedValues& query) {
  NamedValues encoded;
  for (const auto& [name, value] : query) {
    encoded.emplace_back(AwsEncode(name, false), AwsEncode(value, false));
  }
  std::sort(encoded.begin(), encoded.end());
  return absl::StrJoin(encoded, "&", absl::PairFormatter("="));
}

std::string AwsDate(absl::Time time) { return absl::FormatTime("%Y%m%dT%H%M%SZ", time, absl::UTCTimeZone()); }

std::string Sha256Hex(std::string_view text) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

std::string AwsAuthorization(const AwsRequest& request, const AwsScope& scope,
                             const AwsCredentials& credentials) {
  NamedValues headers = request.headers;
  std::sort(headers.begin(), headers.end());
  std::string lines, names, date;
  for (const auto& [name, value] : headers) {
    absl::StrAppend(&lines, name, ":", Trimmed(value), "\n");
    absl::StrAppend(&names, names.empty() ? "" : ";", name);
    if (name == "x-amz-date") date = value;
  }
  KVPOOL_CHECK(date.size() > kDayBytes, "a request without x-amz-date");
  const std::string canonical =
      absl::StrCat(request.method, "\n", AwsEncode(request.path, true), "\n", AwsQuery(request.query), "\n",
                   lines, "\n", names, "\n", request.payload_sha256);
  const std::string day = date.substr(0, kDayBytes);
  const std::string place = absl::StrCat(day, "/", scope.region, "/", scope.service, "/aws4_request");
  std::string key = absl::StrCat("AWS4", credentials.secret_key);
  for (const std::string& part : {day, scope.region, scope.service, std::string("aws4_request")})
    key = Hmac(key, part);
  const std::string signature =
      Hmac(key, absl::StrCat(std::string(kAlgorithm), "\n", date, "\n", place, "\n", Sha256Hex(canonical)));
  return absl::StrCat(std::string(kAlgorithm), " Credential=", credentials.access_key, "/", place,
                      ", SignedHeaders=", names, ", Signature=", absl::BytesToHexString(signature));
}

}  // namespace kvpool
