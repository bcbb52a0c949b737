// One connection to the metrics address: a request, its answer, and the end, over TLS or not. Nothing here waits.
#ifndef KVPOOL_SERVER_METRICS_HTTP_CONNECTION_H_
#define KVPOOL_SERVER_METRICS_HTTP_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "proto/support/unique_fd.h"

struct ssl_ctx_st;
struct ssl_st;

namespace kvpool {

class HttpConnection {
 public:
  static constexpr size_t kMostHeadBytes = 8 << 10;  // A request line and its headers have no more.
  // What a peer still sends once it has its answer is read, up to so many bytes, since closing would take the answer back.
  static constexpr size_t kMostLateBytes = 64 << 10;

  // `peer` is its address, for the log. REQUIRES: the socket does not block.
  HttpConnection(UniqueFd socket, std::string peer) : socket_(std::move(socket)), peer_(std::move(peer)) {}
  HttpConnection(HttpConnection&&) = default;

  // Begins with a handshake. REQUIRES: nothing was read so far.
  void UseTls(ssl_ctx_st* context);

  enum class Next : uint8_t {
    kReadable,  // Advance again when there is something to read,
    kWritable,  // or room to write;
    kAnswer,    // when it was given what to Answer;
    kOver,      // never: see fault().
  };
  Next Advance();
  // REQUIRES: Advance has answered kAnswer.
  void Answer(std::string answer);

  int fd() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }
  // A request to the end of its headers, or kMostHeadBytes without one.
  const std::string& head() const { return head_; }
  // Nobody has read or written anything yet.
  bool fresh() const { return step_ == Step::kHead && tls_ == nullptr && head_.empty(); }
  bool answered() const { return step_ == Step::kLate; }
  // The bytes of an answer that has not been taken whole.
  size_t unsent() const { return answer_.size(); }
  // Why no TLS came about.
  const absl::Status& fault() const { return fault_; }

 private:
  enum class Step : uint8_t { kHandshake, kHead, kAnswer, kSend, kLate };
  struct FreeTls {
    void operator()(ssl_st* tls) const;
  };

  // Each answers kAnswer once its step is done.
  Next Handshake();
  Next ReadHead();
  Next Send();
  Next ReadLate();
  // The library's last result, as what to wait for.
  Next AfterTls(int result);

  UniqueFd socket_;
  std::string peer_;
  std::unique_ptr<ssl_st, FreeTls> tls_;  // Null: without.
  Step step_ = Step::kHead;
  std::string head_;
  std::string answer_;
  size_t sent_ = 0;        // bytes of answer_
  size_t late_bytes_ = 0;  // They came after the head.
  absl::Status fault_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_HTTP_CONNECTION_H_
