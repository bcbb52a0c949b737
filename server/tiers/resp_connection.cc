#include "server/tiers/resp_connection.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

// No event has this id: the waker.
constexpr uint64_t kWakerId = 0;
// A node that gives its replies byte by byte has so many times the pause that is allowed between two of them.
constexpr int kMostIoTimeouts = 6;
constexpr size_t kMostVectors = 32;
// A resolver that hangs keeps a thread for each, and a store may name hundreds of nodes.
constexpr int kMostLookups = 32;
// Small texts are joined up to this size.
constexpr size_t kChunkBytes = 16 << 10;
constexpr std::string_view kLineEnd = "\r\n";

socklen_t SizeOf(const sockaddr_storage& address) {
  return address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

absl::Status TlsError(const std::string& what) {
  char words[256] = "no reason given";
  if (const unsigned long error = ERR_get_error(); error != 0)
    ERR_error_string_n(error, words, sizeof(words));
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", words));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SSL_CTX>> MakeRespTls(const RespTls& tls) {
  ERR_clear_error();
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free);
  if (context == nullptr) return TlsError("tls");
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // A node that closes without saying so has ended all the same: replies have lengths.
  SSL_CTX_set_options(context.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
  if (tls.ca_file.empty()) {
    if (SSL_CTX_set_default_verify_paths(context.get()) != 1) return TlsError("the system's authorities");
  } else if (SSL_CTX_load_verify_file(context.get(), tls.ca_file.c_str()) != 1) {
    return TlsError(absl::StrCat("ca=", tls.ca_file));
  }
  if (!tls.cert_file.empty()) {
    if (SSL_CTX_use_certificate_chain_file(context.get(), tls.cert_file.c_str()) != 1)
      return TlsError(absl::StrCat("cert=", tls.cert_file));
    if (SSL_CTX_use_PrivateKey_file(context.get(), tls.key_file.c_str(), SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(context.get()) != 1) {
      return TlsError(absl::StrCat("key=", tls.key_file));
    }
  }
  return context;
}

// ------------------------------------------------------------------------------------------------- the loop

RespLoop::RespLoop() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  waker_->fd.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakerId}};
  const bool made = epoll_.valid() && waker_->fd.valid() &&
                    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, waker_->fd.get(), &event) == 0;
  KVPOOL_CHECK(made, "no epoll or eventfd: errno %d", errno);
}

void RespLoop::Waker::Wake() {
  if (woken.exchange(true)) return;
  const uint64_t one = 1;
  // A counter that is full wakes as well.
  [[maybe_unused]] const ssize_t written = write(fd.get(), &one, sizeof(one));
}

void RespLoop::Wait(std::chrono::steady_clock::time_point until) {
  using std::chrono::ceil;
  using std::chrono::milliseconds;
  const auto left = until - std::chrono::steady_clock::now();
  const auto ms = left <= left.zero() ? milliseconds(0)
                                      : std::min<milliseconds>(ceil<milliseconds>(left), milliseconds(60000));
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), static_cast<int>(ms.count()));
  for (int i = 0; i < count; ++i) {
    // The kernel packs it: nothing may refer to what is in it.
    const epoll_event event = events[static_cast<size_t>(i)];
    const uint64_t id = event.data.u64;
    if (id == kWakerId) {
      uint64_t times;
      [[maybe_unused]] const ssize_t got = read(waker_->fd.get(), &times, sizeof(times));
      // Whoever finds it true has left his work where it is looked for next.
      waker_->woken = false;
      continue;
    }
    // One that came earlier may have closed it.
    const auto found = connections_.find(id);
    if (found != connections_.end()) found->second->OnEvents(event.events);
  }
}

// ------------------------------------------------------------------------------------------ how it comes up

RespConnection::RespConnection(RespLoop* loop, const RespSettings* settings, const RespEndpoint& endpoint,
                               uint32_t attempt, Answer answer)
    : loop_(*loop),
      settings_(*settings),
      endpoint_(endpoint),
      attempt_(attempt),
      answer_(std::move(answer)),
      id_(++loop->last_id_),
      since_(Clock::now()),
      progress_(since_) {
  loop_.connections_[id_] = this;
  if (const auto numeric = Resolve(endpoint_, AI_NUMERICHOST); !numeric.empty()) {
    Connect(numeric);
    return;
  }
  // A resolver may take half a minute, and can't be told to stop: it writes to what it shares, and nobody waits for it.
  if (loop_.lookups_->fetch_add(1) >= kMostLookups) {
    --*loop_.lookups_;
    Close("too many names are looked up");
    return;
  }
  lookup_ = std::make_shared<Lookup>();
  const auto look_up = [lookup = lookup_, waker = loop_.waker_, lookups = loop_.lookups_,
                        endpoint = endpoint_] {
    std::vector<sockaddr_storage> found = Resolve(endpoint, 0);
    {
      MutexLock lock(&lookup->mu);
      lookup->found = std::move(found);
      lookup->over = true;
    }
    --*lookups;
    waker->Wake();
  };
  try {
    std::thread(look_up).detach();
  } catch (const std::system_error&) {
    --*loop_.lookups_;
    Close("no thread is left");
  }
}

RespConnection::~RespConnection() {
  Close("it is not needed any more");
  loop_.connections_.erase(id_);
}

std::vector<sockaddr_storage> RespConnection::Resolve(const RespEndpoint& endpoint, int flags) {
  addrinfo hints{};
  hints.ai_flags = flags | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const std::string port = absl::StrCat(endpoint.port);
  if (getaddrinfo(endpoint.host.c_str(), port.c_str(), &hints, &list) != 0) return {};
  std::vector<sockaddr_storage> found;
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    if (at->ai_family != AF_INET && at->ai_family != AF_INET6) continue;
    std::memcpy(&found.emplace_back(), at->ai_addr, at->ai_addrlen);
  }
  freeaddrinfo(list);
  return found;
}

void RespConnection::Connect(const std::vector<sockaddr_storage>& addresses) {
  if (addresses.empty()) return Close("its name has no address");
  const sockaddr_storage& address = addresses[attempt_ % addresses.size()];
  fd_.Reset(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_.valid()) return Close("no socket is left");
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  state_ = State::kConnecting;
  if (connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), SizeOf(address)) != 0 &&
      errno != EINPROGRESS) {
    return Close(errno == ECONNREFUSED ? "it refuses connections" : "it can't be connected to");
  }
  epoll_event event{.events = EPOLLOUT, .data = {.u64 = id_}};
  watched_ = event.events;
  if (epoll_ctl(loop_.epoll_.get(), EPOLL_CTL_ADD, fd_.get(), &event) != 0) Close("epoll takes no more");
}

bool RespConnection::Begin() {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
    Close(error == ECONNREFUSED ? "it refuses connections" : "it can't be connected to");
    return false;
  }
  state_ = State::kGreeting;
  input_ = std::make_unique_for_overwrite<char[]>(kInputBytes);
  std::string greeting;
  if (!settings_.password.empty()) {
    ++greetings_;
    const std::string_view password = settings_.password;
    if (settings_.user.empty()) {
      AppendRespCommand({"AUTH", password}, &greeting);
    } else {
      AppendRespCommand({"AUTH", settings_.user, password}, &greeting);
    }
  }
  ++greetings_;
  AppendRespCommand({"PING"}, &greeting);
  PutText(greeting);
  if (settings_.tls == nullptr) return true;
  ssl_.reset(SSL_new(settings_.tls.get()));
  bool set = ssl_ != nullptr && SSL_set_fd(ssl_.get(), fd_.get()) == 1;
  in6_addr bytes;
  const char* const host = endpoint_.host.c_str();
  const bool numeric = inet_pton(AF_INET, host, &bytes) == 1 || inet_pton(AF_INET6, host, &bytes) == 1;
  if (set && numeric) {
    set = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_.get()), host) == 1;
  } else if (set) {
    set = SSL_set1_host(ssl_.get(), host) == 1 && SSL_set_tlsext_host_name(ssl_.get(), host) == 1;
  }
  if (!set) Close("TLS can't be set up");
  if (set) SSL_set_connect_state(ssl_.get());
  return set;
}

bool RespConnection::Handshake() {
  if (ssl_ == nullptr || tls_done_) return true;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  tls_wants_write_ = false;
  if (result == 1) {
    tls_done_ = true;
    return true;
  }
  const int error = SSL_get_error(ssl_.get(), result);
  tls_wants_write_ = error == SSL_ERROR_WANT_WRITE;
  if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) return false;
  const long verified = SSL_get_verify_result(ssl_.get());
  Close(verified == X509_V_OK ? std::string("no TLS came about")
                              : absl::StrCat("its certificate: ", X509_verify_cert_error_string(verified)));
  return false;
}

void RespConnection::Greeted(const RespReply& reply) {
  if (reply.kind == RespReply::Kind::kError) {
    const std::string_view code = reply.code();
    return Close(absl::StrCat("it greets with ",
                              code.empty() ? "an error" : absl::string_view(code.data(), code.size())));
  }
  if (reply.kind != RespReply::Kind::kText) return Close("it greets with what is no greeting");
  if (--greetings_ == 0) state_ = State::kReady;
}

// --------------------------------------------------------------------------------------------------- in use

void RespConnection::Send(RespRequest request) {
  const Clock::time_point now = Clock::now();
  if (in_flight_.empty()) progress_ = now;
  if (request.sent != nullptr) *request.sent = true;
  Put(request);
  window_ += request.cost();
  in_flight_.push_back({std::move(request), now});
}

void RespConnection::Put(const RespRequest& request) {
  if (request.asking) PutText("*1\r\n$6\r\nASKING\r\n");
  PutText(request.head);
  if (request.value == nullptr) return;
  output_.push_back({.value = request.value, .begin = request.begin, .bytes = request.bytes});
  PutText(request.tail);
}

void RespConnection::PutText(std::string_view text) {
  if (text.empty()) return;
  if (output_.empty() || output_.back().value != nullptr || output_.back().text.size() > kChunkBytes) {
    output_.emplace_back();
  }
  output_.back().text.append(text);
}

void RespConnection::Flush() {
  if (state_ != State::kReady && state_ != State::kGreeting) return;
  if (!output_.empty() && Handshake() && state_ != State::kClosed && Write() == Io::kClosed) {
    // What it said before is worth having.
    ReadAll();
    Close("it was closed while written to");
  }
  if (state_ != State::kClosed) Watch();
}

RespConnection::Io RespConnection::Write() {
  while (!output_.empty()) {
    size_t written = 0;
    if (ssl_ != nullptr) {
      ERR_clear_error();
      const std::string_view rest = output_.front().rest();
      const int result = SSL_write_ex(ssl_.get(), rest.data(), rest.size(), &written);
      if (result != 1) {
        const int error = SSL_get_error(ssl_.get(), result);
        return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? Io::kAgain : Io::kClosed;
      }
    } else {
      std::array<iovec, kMostVectors> vectors;
      msghdr message{};
      message.msg_iov = vectors.data();
      for (const Chunk& chunk : output_) {
        if (message.msg_iovlen == vectors.size()) break;
        const std::string_view rest = chunk.rest();
        vectors[message.msg_iovlen++] = {const_cast<char*>(rest.data()), rest.size()};
      }
      const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Io::kAgain : Io::kClosed;
      written = static_cast<size_t>(sent);
    }
    progress_ = Clock::now();
    while (written > 0) {
      Chunk& chunk = output_.front();
      const size_t part = std::min(written, chunk.rest().size());
      written -= part;
      chunk.begin += part;
      if (chunk.value != nullptr) chunk.bytes -= part;
      if (chunk.rest().empty()) output_.pop_front();
    }
  }
  return Io::kDone;
}

RespConnection::Io RespConnection::ReadSome() {
  if (input_end_ == kInputBytes || (input_begin_ > 0 && input_begin_ + input_needs_ > kInputBytes)) {
    std::memmove(input_.get(), input_.get() + input_begin_, input_end_ - input_begin_);
    input_end_ -= input_begin_;
    input_begin_ = 0;
  }
  const size_t had = input_end_ - input_begin_;
  const size_t room =
      std::min(kInputBytes - input_end_, std::max(kReadBytes, input_needs_ - std::min(input_needs_, had)));
  std::array<iovec, 2> vectors = {{{input_.get() + input_end_, room}}};
  int count = 1;
  if (place_left_ > 0) {
    const RespRequest& request = in_flight_.front().request;
    if (*request.over) {
      // Nobody wants it: each read lies over the last one.
      vectors[0].iov_len = std::min(room, place_left_);
    } else {
      vectors[1] = vectors[0];
      vectors[0] = {request.into + (request.into_bytes - place_left_), place_left_};
      count = 2;
    }
  }
  size_t got = 0;
  if (ssl_ != nullptr) {
    ERR_clear_error();
    const int result = SSL_read_ex(ssl_.get(), vectors[0].iov_base, vectors[0].iov_len, &got);
    if (result != 1) {
      const int error = SSL_get_error(ssl_.get(), result);
      return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? Io::kAgain : Io::kClosed;
    }
  } else {
    const ssize_t read = readv(fd_.get(), vectors.data(), count);
    if (read < 0 && errno == EINTR) return Io::kDone;
    if (read < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Io::kAgain : Io::kClosed;
    if (read == 0) return Io::kClosed;
    got = static_cast<size_t>(read);
  }
  const uint64_t placed = std::min<uint64_t>(got, place_left_);
  // They are in the processor's cache now.
  if (placed > 0) place_crc_ = Crc32c(vectors[0].iov_base, placed, place_crc_);
  place_left_ -= placed;
  input_end_ += got - placed;
  progress_ = Clock::now();
  return Io::kDone;
}

void RespConnection::ReadAll() {
  while (state_ != State::kClosed) {
    const Io io = ReadSome();
    if (io == Io::kAgain) return;
    if (io == Io::kDone && !Understand()) return;
    if (io != Io::kClosed) continue;
    closed_idle_ = state_ == State::kReady && in_flight_.empty();
    return Close("it closed the connection");
  }
}

bool RespConnection::Understand() {
  while (input_end_ > input_begin_ && state_ != State::kClosed) {
    if (input_end_ - input_begin_ < input_needs_) return true;
    const bool greeting = state_ == State::kGreeting;
    if (!greeting && in_flight_.empty()) {
      Close("it replies to nothing");
      return false;
    }
    // ASKING has a reply of its own, in front of the command's.
    const bool asking = !greeting && in_flight_.front().request.asking;
    const RespLimits limits = greeting || asking ? RespLimits{} : in_flight_.front().request.limits;
    RespReply reply;
    size_t used = 0;
    const std::string_view input(input_.get() + input_begin_, input_end_ - input_begin_);
    const RespParse parsed = placed_behind_ > 0 ? EndPlace(input, in_flight_.front().request, &reply, &used)
                                                : ParseRespReply(input, limits, &reply, &used);
    if (parsed == RespParse::kBroken || (parsed == RespParse::kPart && used > kInputBytes)) {
      Close("it replies with what is no reply");
      return false;
    }
    if (parsed == RespParse::kPart) {
      if (input.size() == kInputBytes) {
        Close("its reply is too long");
        return false;
      }
      input_needs_ = used;
      if (!greeting && !asking) BeginPlace(in_flight_.front().request, used);
      return true;
    }
    placed_behind_ = 0;
    input_needs_ = 1;
    if (greeting) {
      Greeted(reply);
    } else if (asking) {
      in_flight_.front().request.asking = false;
    } else {
      RespRequest request = std::move(in_flight_.front().request);
      in_flight_.pop_front();
      window_ -= request.cost();
      ++replies_;
      answer_(std::move(request), &reply);
    }
    input_begin_ += used;
  }
  if (input_begin_ == input_end_) input_begin_ = input_end_ = 0;
  return state_ != State::kClosed;
}

void RespConnection::BeginPlace(const RespRequest& request, size_t reply_bytes) {
  const std::string_view input(input_.get() + input_begin_, input_end_ - input_begin_);
  const size_t line = input.find(kLineEnd);
  if (request.into == nullptr || *request.over || input[0] != '$' || line == std::string_view::npos) return;
  const size_t behind = line + kLineEnd.size() + request.kept;
  if (reply_bytes != behind + request.into_bytes + kLineEnd.size()) return;
  if (input.size() < behind) {
    input_needs_ = behind;
    return;
  }
  placed_behind_ = behind;
  const size_t came = std::min<uint64_t>(input.size() - behind, request.into_bytes);
  std::memcpy(request.into, input.data() + behind, came);
  place_left_ = request.into_bytes - came;
  place_crc_ = Crc32c(request.into, came);
  char* const from = input_.get() + input_begin_ + behind;
  std::memmove(from, from + came, input.size() - behind - came);
  input_end_ -= came;
  input_needs_ = behind + kLineEnd.size();
}

RespParse RespConnection::EndPlace(std::string_view input, const RespRequest& request, RespReply* reply,
                                   size_t* used) const {
  if (input.substr(placed_behind_, kLineEnd.size()) != kLineEnd) return RespParse::kBroken;
  *used = placed_behind_ + kLineEnd.size();
  reply->kind = RespReply::Kind::kBytes;
  reply->text = input.substr(placed_behind_ - request.kept, request.kept);
  reply->rest_bytes = request.into_bytes;
  reply->rest_crc = place_crc_;
  return RespParse::kWhole;
}

void RespConnection::OnEvents(uint32_t events) {
  if (state_ == State::kConnecting) {
    if (!Begin()) return;
  } else if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && Handshake() && state_ != State::kClosed) {
    ReadAll();
  }
  if (state_ != State::kClosed) Flush();
}

void RespConnection::Watch() {
  const bool writes = !output_.empty() && (ssl_ == nullptr || tls_done_ || tls_wants_write_);
  const uint32_t events = EPOLLIN | (writes ? EPOLLOUT : 0u);
  if (events == watched_) return;
  watched_ = events;
  epoll_event event{.events = events, .data = {.u64 = id_}};
  if (epoll_ctl(loop_.epoll_.get(), EPOLL_CTL_MOD, fd_.get(), &event) != 0) Close("epoll lost it");
}

RespConnection::Clock::time_point RespConnection::due() const {
  switch (state_) {
    case State::kResolving:
    case State::kConnecting:
    case State::kGreeting:
      return since_ + settings_.connect_timeout;
    case State::kReady:
      if (in_flight_.empty()) return Clock::time_point::max();
      return std::min(progress_ + settings_.io_timeout,
                      in_flight_.front().since + kMostIoTimeouts * settings_.io_timeout);
    case State::kClosed:
      return Clock::time_point::max();
  }
  return Clock::time_point::max();
}

void RespConnection::Check(Clock::time_point now) {
  if (state_ == State::kResolving && lookup_ != nullptr) {
    std::vector<sockaddr_storage> found;
    bool over = false;
    {
      MutexLock lock(&lookup_->mu);
      over = lookup_->over;
      found = lookup_->found;
    }
    if (over) Connect(found);
  }
  if (now < due()) return;
  Close(state_ == State::kReady ? "it does not reply" : "no connection came about in time");
}

void RespConnection::Close(std::string why) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  why_ = std::move(why);
  ssl_.reset();
  fd_.Reset();
  output_.clear();
  input_.reset();
}

std::deque<RespRequest> RespConnection::TakeLost() {
  std::deque<RespRequest> lost;
  for (InFlight& in_flight : in_flight_) lost.push_back(std::move(in_flight.request));
  in_flight_.clear();
  return lost;
}

}  // namespace kvpool
