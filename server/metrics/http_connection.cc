#include "server/metrics/http_connection.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

constexpr size_t kChunkBytes = 4 << 10;
// In the clear, to a peer that does not speak TLS.
constexpr std::string_view kSpeaksNoTls =
    "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    "Content-Length: 31\r\n\r\nthis address is served with TLS";

}  // namespace

void HttpConnection::FreeTls::operator()(SSL* tls) const { SSL_free(tls); }

void HttpConnection::UseTls(SSL_CTX* context) {
  step_ = Step::kHandshake;
  tls_.reset(SSL_new(context));
  if (tls_ == nullptr || SSL_set_fd(tls_.get(), socket_.get()) != 1) {
    fault_ = absl::ResourceExhaustedError("there is no memory for TLS");
    return;
  }
  // OpenSSL goes on by itself while records come that say nothing (KeyUpdate), and a peer may send them for ever.
  SSL_clear_mode(tls_.get(), SSL_MODE_AUTO_RETRY);
  SSL_set_accept_state(tls_.get());
}

HttpConnection::Next HttpConnection::Advance() {
  Next next = Next::kAnswer;
  while (fault_.ok() && next == Next::kAnswer) {
    switch (step_) {
      case Step::kHandshake:
        next = Handshake();
        if (next == Next::kAnswer) step_ = Step::kHead;
        break;
      case Step::kHead:
        next = ReadHead();
        if (next != Next::kAnswer) break;
        step_ = Step::kAnswer;
        return next;
      case Step::kAnswer:
        return next;
      case Step::kSend:
        next = Send();
        if (next == Next::kAnswer) step_ = Step::kLate;
        break;
      case Step::kLate:
        next = ReadLate();
        break;
    }
  }
  return fault_.ok() ? next : Next::kOver;
}

void HttpConnection::Answer(std::string answer) {
  step_ = Step::kSend;
  head_ = std::string();
  answer_ = std::move(answer);
}

HttpConnection::Next HttpConnection::AfterTls(int result) {
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return Next::kReadable;
    case SSL_ERROR_WANT_WRITE:
      return Next::kWritable;
    default:
      return Next::kOver;
  }
}

HttpConnection::Next HttpConnection::Handshake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(tls_.get());
  if (result == 1) {
    // Nothing goes back before the request has come, and a client that joins what it sends (Nagle) waits 40 ms for an acknowledgement.
    const int on = 1;
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_QUICKACK, &on, sizeof(on));
    return Next::kAnswer;
  }
  const Next next = AfterTls(result);
  if (next != Next::kOver) return next;
  const unsigned long error = ERR_peek_last_error();
  const long verified = SSL_get_verify_result(tls_.get());
  const char* reason = ERR_reason_error_string(error);
  if (verified != X509_V_OK) {
    fault_ = absl::UnauthenticatedError(
        absl::StrCat("its certificate: ", X509_verify_cert_error_string(verified)));
  } else if (reason != nullptr) {
    // One that hangs up is no fault.
    fault_ = absl::UnauthenticatedError(absl::StrCat("no TLS came about: ", reason));
  }
  if (ERR_GET_REASON(error) == SSL_R_HTTP_REQUEST)
    send(socket_.get(), kSpeaksNoTls.data(), kSpeaksNoTls.size(), MSG_NOSIGNAL);
  return Next::kOver;
}

HttpConnection::Next HttpConnection::ReadHead() {
  std::array<char, kChunkBytes> bytes;
  while (head_.size() < kMostHeadBytes) {
    const size_t room = std::min(bytes.size(), kMostHeadBytes - head_.size());
    ssize_t size = 0;
    if (tls_ != nullptr) {
      ERR_clear_error();
      size = SSL_read(tls_.get(), bytes.data(), static_cast<int>(room));
      if (size <= 0) return AfterTls(static_cast<int>(size));
    } else {
      size = recv(socket_.get(), bytes.data(), room, 0);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno == EAGAIN) return Next::kReadable;
      if (size <= 0) return Next::kOver;
    }
    const size_t looked = head_.size() < 3 ? 0 : head_.size() - 3;
    head_.append(bytes.data(), static_cast<size_t>(size));
    if (head_.find("\r\n\r\n", looked) != std::string::npos) break;
  }
  return Next::kAnswer;
}

HttpConnection::Next HttpConnection::Send() {
  while (sent_ < answer_.size()) {
    const char* const bytes = answer_.data() + sent_;
    const size_t left = answer_.size() - sent_;
    ssize_t size = 0;
    if (tls_ != nullptr) {
      ERR_clear_error();
      size = SSL_write(tls_.get(), bytes, static_cast<int>(std::min<size_t>(left, 1 << 20)));
      if (size <= 0) return AfterTls(static_cast<int>(size));
    } else {
      size = send(socket_.get(), bytes, left, MSG_NOSIGNAL);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0) return errno == EAGAIN ? Next::kWritable : Next::kOver;
    }
    sent_ += static_cast<size_t>(size);
  }
  answer_ = std::string();
  if (tls_ != nullptr) SSL_shutdown(tls_.get());  // One that does not fit any more is not worth waiting for.
  shutdown(socket_.get(), SHUT_WR);
  return Next::kAnswer;
}

HttpConnection::Next HttpConnection::ReadLate() {
  std::array<char, kChunkBytes> bytes;
  while (late_bytes_ < kMostLateBytes) {
    const ssize_t size = recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return Next::kReadable;
    if (size <= 0) break;
    late_bytes_ += static_cast<size_t>(size);
  }
  return Next::kOver;
}

}  // namespace kvpool
