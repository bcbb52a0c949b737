// A request to a bucket, and its answer.
#ifndef KVPOOL_SERVER_TIERS_S3_REQUEST_H_
#define KVPOOL_SERVER_TIERS_S3_REQUEST_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "server/tiers/aws_signature.h"
#include "server/tiers/buffers.h"
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
  // The digest of what is sent, in hex; empty, with a value: that is not signed, which is for TLS.
  std::string payload_sha256;
  // Gets the bytes of an answer of status 200, in order. False: no more is wanted, and the answer is done with. Null: they are
  // the answer's body.
  std::function<bool(const S3Response& so_far, std::string_view bytes)> receive;
  Clock::time_point deadline = Clock::time_point::max();  // It is not tried again beyond this.
  bool patient = false;              // The store may work on it for long before it answers.
  std::shared_ptr<const bool> over;  // It is true once nobody waits any more; null: never.
  // Null: there was no answer.
  std::function<void(const S3Response* response)> done;
  int attempts = 0;          // So many were answered already.
  uint64_t credentials = 0;  // See AwsCredentialSource::generation.
};

// Where the requests of a client go, and how patient it is.
struct S3ClientOptions {
  S3Endpoint endpoint;
  std::string region = "us-east-1";
  std::string ca_file;  // Empty: the system's authorities.
  int connections = 16;
  // io_timeout: nothing moved for so long.
  std::chrono::milliseconds connect_timeout{3000}, io_timeout{10000};
  std::chrono::milliseconds first_pause{500}, longest_pause{30000};  // The breaker's.
  std::chrono::milliseconds retry_pause{50};                         // Twice as long each time.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_REQUEST_H_
