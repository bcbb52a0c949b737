// The keys that requests to S3 are signed with, from a file in the form that AWS's tools have, or from the environment.
//
//   [default]
//   aws_access_key_id = AKIA…
//   aws_secret_access_key = …
//   aws_session_token = …        only with keys that end soon
//
// A file that is replaced, as Kubernetes does it with a Secret and operators with a rename, is read again: whoever rotates keys
// need not know of the daemon.
#ifndef KVPOOL_SERVER_TIERS_AWS_CREDENTIALS_H_
#define KVPOOL_SERVER_TIERS_AWS_CREDENTIALS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/tiers/aws_signature.h"
#include "server/tiers/file_mark.h"

namespace kvpool {

inline constexpr size_t kMostCredentialsFileBytes = 65536;

// One profile of such a file. INVALID_ARGUMENT says what is missing or wrong, and on which line; no secret is in it.
absl::StatusOr<AwsCredentials> ParseAwsCredentials(std::string_view text, std::string_view profile);

// Not thread-safe.
class AwsCredentialSource {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::string
        file;  // Empty: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of the environment.
    std::string profile = "default";
  };
  // So often it is asked whether the file is another.
  static constexpr std::chrono::seconds kLookPause{1};

  // INVALID_ARGUMENT names the file or the variable.
  static absl::StatusOr<std::unique_ptr<AwsCredentialSource>> Open(const Options& options);
  // Where a file can't be read any more, the keys are those of before: they may still be good, and the log says so.
  const AwsCredentials& Current(Clock::time_point now);
  // The keys were refused: the next look is not put off.
  void Refused() { look_at_ = Clock::time_point::min(); }
  // It differs between keys that were read at different times.
  uint64_t generation() const { return generation_; }
  // Where they are from.
  std::string describe() const;

 private:
  explicit AwsCredentialSource(const Options& options) : options_(options) {}
  absl::Status Read();

  const Options options_;
  AwsCredentials credentials_;
  uint64_t generation_ = 0;
  FileMark mark_;
  Clock::time_point look_at_ = Clock::time_point::min();
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_AWS_CREDENTIALS_H_
