// Requests to one bucket, and their answers: libcurl carries the bytes, on the thread of whoever calls Turn.
//
//   queued ──► on a connection ──► answered
//     ▲               │
//     └── a pause ◄───┘ 429, 500, 502, 503 or 504, while attempts and the deadline allow
//
// A connection that fails, one on which nothing moves, and a request that ends with such a status are failures to the breaker
// (circuit_breaker.h). While it is open all requests fail at once; then HEAD of the bucket tries whether the store answers.
#ifndef KVPOOL_SERVER_TIERS_S3_CLIENT_H_
#define KVPOOL_SERVER_TIERS_S3_CLIENT_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/tiers/aws_credentials.h"
#include "server/tiers/circuit_breaker.h"
#include "server/tiers/s3_endpoint.h"
#include "server/tiers/s3_request.h"

namespace kvpool {

struct S3Transfer;

// Not thread-safe, but for Wake.
class S3Client {
 public:
  using Clock = S3Request::Clock;
  using Options = S3ClientOptions;
  static constexpr int kMostAttempts = 4;
  // One connection of so many is for loads alone: what is stored may take long.
  static constexpr int kForLoads = 4;
  // A patient request has so many times io_timeout.
  static constexpr int kPatience = 12;

  // INVALID_ARGUMENT: a file that TLS needs.
  static absl::StatusOr<std::unique_ptr<S3Client>> Open(const Options& options,
                                                        std::unique_ptr<AwsCredentialSource> credentials);
  // What is under way is dropped, and not answered.
  ~S3Client();

  const S3Endpoint& endpoint() const { return options_.endpoint; }
  std::string describe() const { return credentials_->describe(); }
  bool down() const { return !breaker_.closed(); }
  // It is answered by Turn.
  void Send(S3Request request);
  // Sends what there is room for, answers what has come, and then waits for more until Wake, or `until`.
  void Turn(Clock::time_point until);
  // Thread-safe.
  void Wake();
  // Asks for the bucket, for so long at most. FAILED_PRECONDITION: the store says no, and why it does. UNAVAILABLE: it does not
  // answer, is not able to, or what answers is something else. REQUIRES: nothing is under way.
  absl::Status Probe(const std::string& prefix, std::chrono::milliseconds most);
  // What such an answer means, in words for operators. Nothing that the store says is in it but a code, a region and its clock.
  std::string Explain(const S3Response& response) const;

 private:
  struct Curl;

  S3Client(const Options& options, std::unique_ptr<AwsCredentialSource> credentials);
  // The next one that may go while so many connections are busy.
  bool Next(int busy, S3Request* request);
  void FailQueue();
  void Start(S3Request request);
  void Try();
  // `why` is a constant phrase of libcurl's; empty: there is an answer.
  void End(S3Transfer* transfer, std::string_view why);
  void Failed(std::string_view why);
  // The pause before it is tried again; nothing: it is answered.
  std::optional<Clock::duration> Again(const S3Request& request, const S3Response& response,
                                       Clock::time_point now);
  Clock::time_point EndStuck(Clock::time_point now);
  Clock::time_point Work(Clock::time_point now);

  const Options options_;
  const std::unique_ptr<AwsCredentialSource> credentials_;
  std::array<std::deque<S3Request>, 3> queues_;  // Indexed by rank.
  std::multimap<Clock::time_point, S3Request> again_;
  CircuitBreaker breaker_;
  bool trying_ = false;    // The HEAD of a breaker that is half open is under way.
  bool answered_ = false;  // Something was in this turn.
  std::minstd_rand random_;
  std::string last_failure_ = "nothing was asked";
  std::unique_ptr<Curl> curl_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_CLIENT_H_
