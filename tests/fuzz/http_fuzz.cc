// What a peer of the metrics address says, in pieces of any size, and takes or does not: its answer is that to its first line, however
// the bytes were cut, and whole. With TLS the bytes are any, or those of a client.
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/support/check.h"
#include "proto/support/unique_fd.h"
#include "server/metrics/http_connection.h"
#include "server/metrics/http_pages.h"
#include "tests/fuzz/input.h"

namespace kvpool::fuzz {
namespace {

constexpr int kMaxActions = 60;
constexpr int kMostKeys = 30;  // OpenSSL takes 32 of a peer.
constexpr const char* kWords[] = {"GET /metrics HTTP/1.1\r\n",
                                  "GET /health HTTP/1.0\r\n\r\n",
                                  "GET",
                                  "HEAD",
                                  " ",
                                  "/metrics",
                                  "/health",
                                  "http://host",
                                  "HTTP/1.1",
                                  "\r\n",
                                  "\r\n\r\n",
                                  "\r",
                                  "\n",
                                  "?",
                                  "X: y\r\n",
                                  "\x16\x03\x01"};

template <auto kFree>
struct Frees {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
template <typename T, auto kFree>
using Owned = std::unique_ptr<T, Frees<kFree>>;
using Context = Owned<SSL_CTX, &SSL_CTX_free>;

// The status that RFC 9112 and this address have for what was said; none: it is not all.
std::optional<int> StatusFor(const std::string& said) {
  const std::string head = said.substr(0, HttpConnection::kMostHeadBytes);
  const size_t end = head.find("\r\n\r\n");
  if (end == std::string::npos && head.size() < HttpConnection::kMostHeadBytes) return std::nullopt;
  const size_t begin = head.starts_with("\r\n") ? 2 : 0;
  if (end == std::string::npos || end < begin) return 400;
  const std::string line = head.substr(begin, head.find("\r\n", begin) - begin);
  const std::vector<std::string> parts = absl::StrSplit(line, ' ');
  const bool printable = std::all_of(line.begin(), line.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
  if (!printable || parts.size() != 3 || parts[0].empty() || parts[1].empty()) return 400;
  if (parts[2] != "HTTP/1.1" && parts[2] != "HTTP/1.0") return 400;
  return parts[0] == "GET" ? 200 : 405;
}

// A server that shows a certificate of its own making.
SSL_CTX* ServerContext() {
  static const Context made = [] {
    const Owned<EVP_PKEY, &EVP_PKEY_free> key(EVP_EC_gen("P-256"));
    const Owned<X509, &X509_free> certificate(X509_new());
    X509_gmtime_adj(X509_getm_notBefore(certificate.get()), 0);
    X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 1 << 30);
    X509_set_pubkey(certificate.get(), key.get());
    KVPOOL_CHECK(X509_sign(certificate.get(), key.get(), EVP_sha256()) > 0, "no certificate");
    Context context(SSL_CTX_new(TLS_server_method()));
    KVPOOL_CHECK(SSL_CTX_use_certificate(context.get(), certificate.get()) == 1 &&
                     SSL_CTX_use_PrivateKey(context.get(), key.get()) == 1,
                 "the certificate does not serve");
    SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    return context;
  }();
  return made.get();
}

class Story {
 public:
  explicit Story(Input* input);
  void Run();

 private:
  enum class Spoken : uint8_t {
    kClear,
    kTls,
    kAnyBytes
  };  // The last to a server that waits for a handshake.

  void Act();
  void Say(const std::string& bytes);
  void Send();
  void Take(size_t most);
  void Turn();
  void Check();

  Input& input_;
  Spoken spoken_ = Spoken::kClear;
  UniqueFd peer_;
  std::optional<HttpConnection> connection_;
  Owned<SSL, &SSL_free> client_;
  std::string text_;  // The page.
  bool text_there_ = false;
  HttpPages pages_{[this](const std::string&) -> std::optional<HttpPage> {
    if (!text_there_) return std::nullopt;
    return HttpPage{.status = 200, .text = text_};
  }};
  std::string said_;     // What the peer says, in the clear.
  std::string to_send_;  // The same, or its records.
  std::string taken_;
  int keys_ = 0;
  HttpConnection::Next next_ = HttpConnection::Next::kReadable;
};

Story::Story(Input* input) : input_(*input) {
  const uint8_t how = input_.Byte();
  int ends[2];
  KVPOOL_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "errno %d",
               errno);
  peer_.Reset(ends[0]);
  connection_.emplace(UniqueFd(ends[1]), "peer");
  if (how % 2 == 0) {
    const int small = 1;
    setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  }
  text_ = std::string(how / 2 % 4 == 0 ? 50000 : 40, 't');
  text_there_ = how / 8 % 2 == 0;
  if (how / 16 % 4 == 2) spoken_ = Spoken::kTls;
  if (how / 16 % 4 == 3) spoken_ = Spoken::kAnyBytes;
  if (spoken_ != Spoken::kClear) connection_->UseTls(ServerContext());
  if (spoken_ != Spoken::kTls) return;
  static const Context context(SSL_CTX_new(TLS_client_method()));
  client_.reset(SSL_new(context.get()));
  if (how / 64 % 2 == 1) SSL_set_max_proto_version(client_.get(), TLS1_2_VERSION);
  SSL_set_connect_state(client_.get());
  SSL_set_bio(client_.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
  SSL_do_handshake(client_.get());
}

void Story::Run() {
  for (int i = 0; i < kMaxActions && !input_.empty(); ++i) Act();
  text_there_ = true;
  // Who takes what there is gets all that is due.
  for (int i = 0; i < 10000 && next_ != HttpConnection::Next::kOver; ++i) {
    const size_t before = taken_.size();
    Send();
    Turn();
    Take(SIZE_MAX);
    if (taken_.size() == before && connection_->unsent() == 0 && i > 20) break;
  }
  Take(SIZE_MAX);
  Check();
}

void Story::Act() {
  switch (input_.Below(10)) {
    case 0:
      return Say(input_.Bytes(input_.Byte()));
    case 1:
      return Say(std::string(input_.Byte() * 40, static_cast<char>(input_.Byte())));
    case 2:
      return Take(input_.Byte() * 16);
    case 3:
      text_there_ = true;
      return;
    case 4:
      if (!input_.OneIn(8)) return Turn();
      shutdown(peer_.get(), SHUT_WR);
      return;
    case 5:
      // Another key, which says nothing.
      if (client_ == nullptr || SSL_is_init_finished(client_.get()) == 0 || ++keys_ > kMostKeys)
        return Turn();
      if (SSL_version(client_.get()) != TLS1_3_VERSION) return Turn();
      SSL_key_update(client_.get(), SSL_KEY_UPDATE_REQUESTED);
      return Say("");
    case 6:
    case 7:
      return Turn();
    default:
      return Say(kWords[input_.Below(std::size(kWords))]);
  }
}

void Story::Say(const std::string& bytes) {
  if (client_ == nullptr) {
    to_send_ += bytes;
    said_ += bytes;
    return Send();
  }
  if (SSL_is_init_finished(client_.get()) != 0) {
    SSL_do_handshake(client_.get());
    if (!bytes.empty() && SSL_write(client_.get(), bytes.data(), static_cast<int>(bytes.size())) > 0)
      said_ += bytes;
  }
  Send();
}

// In pieces that the input chooses, while there is something to choose from.
void Story::Send() {
  if (client_ != nullptr) {
    char* bytes = nullptr;
    const long size = BIO_get_mem_data(SSL_get_wbio(client_.get()), &bytes);
    to_send_.append(bytes, static_cast<size_t>(std::max(size, 0l)));
    (void)BIO_reset(SSL_get_wbio(client_.get()));
  }
  const size_t piece = input_.empty() ? to_send_.size() : std::min<size_t>(to_send_.size(), input_.Number());
  const ssize_t sent = send(peer_.get(), to_send_.data(), piece, MSG_NOSIGNAL);
  if (sent > 0) to_send_.erase(0, static_cast<size_t>(sent));
}

void Story::Take(size_t most) {
  char bytes[4096];
  while (most > 0) {
    const ssize_t size = recv(peer_.get(), bytes, std::min(most, sizeof(bytes)), 0);
    if (size <= 0) break;
    most -= static_cast<size_t>(size);
    if (client_ == nullptr) {
      taken_.append(bytes, static_cast<size_t>(size));
    } else {
      BIO_write(SSL_get_rbio(client_.get()), bytes, static_cast<int>(size));
    }
  }
  if (client_ == nullptr) return;
  SSL_do_handshake(client_.get());
  for (int size = 0; (size = SSL_read(client_.get(), bytes, sizeof(bytes))) > 0;)
    taken_.append(bytes, static_cast<size_t>(size));
}

void Story::Turn() {
  if (next_ == HttpConnection::Next::kOver) return;
  next_ = connection_->Advance();
  if (next_ != HttpConnection::Next::kAnswer) return;
  const std::string& head = connection_->head();
  KVPOOL_CHECK(head.size() <= HttpConnection::kMostHeadBytes, "a head of %zu bytes", head.size());
  KVPOOL_CHECK(said_.starts_with(head), "the head is not what was said");
  KVPOOL_CHECK(StatusFor(head).has_value(), "half a head");
  std::optional<std::string> answer = pages_.Answer(head);
  KVPOOL_CHECK(answer.has_value() || (!text_there_ && StatusFor(head) == 200), "no answer");
  if (answer.has_value()) connection_->Answer(*std::move(answer));
}

void Story::Check() {
  if (spoken_ == Spoken::kAnyBytes) return;
  // What was put into records may be on its way still, once the peer has shut its side.
  if (spoken_ == Spoken::kTls && !to_send_.empty()) return;
  const std::optional<int> status = StatusFor(said_.substr(0, said_.size() - to_send_.size()));
  if (!status.has_value()) {
    KVPOOL_CHECK(taken_.empty(), "an answer to half a request");
    return;
  }
  const std::string begin = absl::StrCat("HTTP/1.1 ", *status, " ");
  KVPOOL_CHECK(taken_.starts_with(begin), "not %d: %s", *status, taken_.substr(0, 100).c_str());
  const size_t end = taken_.find("\r\n\r\n"), length = taken_.find("\r\nContent-Length: ");
  KVPOOL_CHECK(length < end, "an answer without an end or a length");
  const std::string text = taken_.substr(end + 4);
  // A head alone is for those who asked for no more.
  const bool whole = taken_.substr(length + 18, end - length - 18) == absl::StrCat(text.size());
  const bool none = text.empty() && *status == 405;
  KVPOOL_CHECK(whole || none, "a text of %zu bytes", text.size());
  KVPOOL_CHECK(*status != 200 || text == text_, "the page is another");
}

}  // namespace
}  // namespace kvpool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvpool::fuzz::Input input(data, size);
  kvpool::fuzz::Story(&input).Run();
  return 0;
}
