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
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/tiers/aws_credentials.h"
#include "server/tiers/aws_signature.h"
#include "server/tiers/buffers.h"
#include "server/tiers/circuit_breaker.h"
#include "server/tiers/s3_endpoint.h"

namespace kvpool {

struct S3Response {
  int status = 0;
  std::string code;             // An error's, if it is a word: "NoSuchKey".
  std::string body;             // What no one received.
  int64_t content_length = -1;  // -1: it was not said.
  std::string etag;
  std::string region;          // Where the bucket is; empty: it was not said.
  int64_t date = -1;           // Seconds since 1970 by the clock of the store; -1: it was not said.
  bool delete_marker = false;  // The bucket keeps versions.
};

struct S3Request {
  // Who is served first, where not all can be.
  enum class Rank : uint8_t { kLoad, kAsk, kStore };
  using Clock = std::chrono::steady_clock;

  Rank rank = Rank::kAsk;
  std::string method = "GET";
  std::string object;  // Empty: the bucket.
  NamedValues query, headers;
  // What is sent: `text`, then part of a value.
  std::string text;
  std::shared_ptr<const TierBuffer> value;
  uint64_t begin = 0, bytes = 0;
  std::string
      payload_sha256;  // The bytes of a value have this; empty: they are not signed, which is for TLS.
  // Gets the bytes of an answer of status 200, in order. False: no more is wanted, and the answer is done with. Null: they are
  // the answer's body.
  std::function<bool(const S3Response& so_far, std::string_view bytes)> receive;
  Clock::time_point deadline = Clock::time_point::max();  // It is not tried again beyond this.
  bool patient = false;              // The store may work on it for long before it answers.
  std::shared_ptr<const bool> over;  // It is true once nobody waits any more; null: never.
  // Null: there was no answer.
  std::function<void(const S3Response* response)> done;
  int attempts = 0;  // So many were answered already.
  uint64_t credentials = 0;
};

struct S3Transfer;

// Not thread-safe, but for Wake.
class S3Client {
 public:
  using Clock = S3Request::Clock;
  struct Options {
    S3Endpoint endpoint;
    std::string region = "us-east-1";
    std::string ca_file;  // Empty: the system's authorities.
    int connections = 16;
    // io_timeout: nothing moved for so long.
    std::chrono::milliseconds connect_timeout{3000}, io_timeout{10000};
    std::chrono::milliseconds first_pause{500}, longest_pause{30000};  // The breaker's.
    std::chrono::milliseconds retry_pause{50};                         // Twice as long each time.
  };
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
  // What such an answer means, in words for operators. Nothing that the store says is in it but a code and a region.
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
