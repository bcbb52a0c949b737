#include "server/tiers/aws_credentials.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

// A session token has some 1,000.
constexpr size_t kMostValueBytes = 8192;

// What a header may say.
bool Plain(absl::string_view value) {
  return !value.empty() && value.size() <= kMostValueBytes &&
         std::all_of(value.begin(), value.end(), [](unsigned char c) { return absl::ascii_isgraph(c); });
}

absl::Status Wrong(absl::string_view what) { return absl::InvalidArgumentError(what); }

// What a variable of the environment says; empty: it is not set.
absl::StatusOr<std::string> Variable(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::string();
  if (!Plain(text)) {
    return Wrong(
        absl::StrCat("--tier: ", name, ": must be 1 to ", kMostValueBytes, " characters without blanks"));
  }
  return std::string(text);
}

absl::StatusOr<AwsCredentials> FromEnvironment() {
  AwsCredentials credentials;
  ASSIGN_OR_RETURN(credentials.access_key, Variable("AWS_ACCESS_KEY_ID"));
  ASSIGN_OR_RETURN(credentials.secret_key, Variable("AWS_SECRET_ACCESS_KEY"));
  ASSIGN_OR_RETURN(credentials.session_token, Variable("AWS_SESSION_TOKEN"));
  if (credentials.access_key.empty() || credentials.secret_key.empty()) {
    return Wrong(absl::StrCat("--tier: no credentials: credentials-file= is not there, and ",
                              credentials.access_key.empty() ? "AWS_ACCESS_KEY_ID" : "AWS_SECRET_ACCESS_KEY",
                              " is not set either"));
  }
  return credentials;
}

}  // namespace

absl::StatusOr<AwsCredentials> ParseAwsCredentials(std::string_view text, std::string_view profile) {
  AwsCredentials credentials;
  bool here = false, found = false;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    if (absl::ConsumePrefix(&line, "[")) {
      if (!absl::ConsumeSuffix(&line, "]"))
        return Wrong(absl::StrCat("line ", number, " begins with [ and has no ] at its end"));
      here = absl::StripAsciiWhitespace(line) == absl::string_view(profile.data(), profile.size());
      found |= here;
      continue;
    }
    const size_t equals = line.find('=');
    if (equals == absl::string_view::npos)
      return Wrong(absl::StrCat("line ", number, " is neither [PROFILE] nor NAME = VALUE"));
    if (!here) continue;
    const absl::string_view name = absl::StripTrailingAsciiWhitespace(line.substr(0, equals));
    const absl::string_view value = absl::StripLeadingAsciiWhitespace(line.substr(equals + 1));
    std::string* const into = name == "aws_access_key_id"       ? &credentials.access_key
                              : name == "aws_secret_access_key" ? &credentials.secret_key
                              : name == "aws_session_token"     ? &credentials.session_token
                                                                : nullptr;
    if (into == nullptr) continue;  // Others' tools have more.
    if (!Plain(value)) {
      return Wrong(absl::StrCat("line ", number, ": ", name, " must be 1 to ", kMostValueBytes,
                                " characters without blanks"));
    }
    *into = std::string(value);
  }
  const std::string section = absl::StrCat("[", std::string(profile), "]");
  if (!found) return Wrong(absl::StrCat("it has no ", section));
  if (credentials.access_key.empty()) return Wrong(absl::StrCat(section, " has no aws_access_key_id"));
  if (credentials.secret_key.empty()) return Wrong(absl::StrCat(section, " has no aws_secret_access_key"));
  return credentials;
}

absl::StatusOr<std::unique_ptr<AwsCredentialSource>> AwsCredentialSource::Open(const Options& options) {
  std::unique_ptr<AwsCredentialSource> source(new AwsCredentialSource(options));
  if (options.file.empty()) {
    ASSIGN_OR_RETURN(source->credentials_, FromEnvironment());
  } else {
    RETURN_IF_ERROR(source->Read());
  }
  return source;
}

absl::Status AwsCredentialSource::Read() {
  mark_.Set(options_.file);
  ASSIGN_OR_RETURN(const std::string text,
                   ReadSecretFile("tier: credentials-file", options_.file, 1, kMostCredentialsFileBytes));
  absl::StatusOr<AwsCredentials> credentials = ParseAwsCredentials(text, options_.profile);
  if (!credentials.ok()) {
    return Wrong(
        absl::StrCat("--tier: credentials-file=", options_.file, ": ", credentials.status().message()));
  }
  credentials_ = *std::move(credentials);
  ++generation_;
  return absl::OkStatus();
}

const AwsCredentials& AwsCredentialSource::Current(Clock::time_point now) {
  if (options_.file.empty() || now < look_at_) return credentials_;
  look_at_ = now + kLookPause;
  if (mark_.Holds(options_.file)) return credentials_;
  if (const absl::Status status = Read(); status.ok()) {
    LogInfo("tier's credentials were read again", {{"file", options_.file}});
  } else {
    LogWarning("tier's credentials can't be read", {{"error", status}});
  }
  return credentials_;
}

std::string AwsCredentialSource::describe() const {
  if (options_.file.empty()) return "credentials of the environment";
  return absl::StrCat("credentials of ", options_.file, " [", options_.profile, "]");
}

}  // namespace kvpool
