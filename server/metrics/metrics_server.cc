#include "server/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <prometheus/text_serializer.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/mutex.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "proto/support/unique_fd.h"
#include "server/access/refusal_log.h"
#include "server/base/acceptor.h"
#include "server/base/clock.h"
#include "server/metrics/http_connection.h"
#include "server/metrics/http_pages.h"

namespace kvpool {
namespace {

using Time = std::chrono::steady_clock::time_point;

Time Now() { return std::chrono::steady_clock::now(); }

uint64_t NowMs() { return MonotonicClock()->NowMs(); }

constexpr uint64_t kListenerKey = 0, kWakeKey = 1, kFirstId = 2;
constexpr int kAcceptsPerTurn = 64;
constexpr int kBacklog = 1024;
// Of all answers together that peers have not taken. One may be larger.
constexpr size_t kMostUnsentBytes = 64 << 20;
constexpr std::chrono::milliseconds kMostWait{60000};

absl::StatusOr<UniqueFd> ListenAt(const addrinfo& at) {
  UniqueFd socket(::socket(at.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  // The daemon before may have left connections that the kernel has not forgotten yet.
  if (socket.valid() && setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      bind(socket.get(), at.ai_addr, at.ai_addrlen) == 0 && listen(socket.get(), kBacklog) == 0) {
    return socket;
  }
  return absl::UnavailableError(strerror(errno));
}

absl::StatusOr<UniqueFd> ListenTcp(const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > UINT16_MAX)
    return absl::UnavailableError("write host:port, with a port of 0 to 65535");
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
  absl::StatusOr<UniqueFd> listener = absl::UnavailableError("it has no address");
  for (const addrinfo* at = list.get(); at != nullptr && !listener.ok(); at = at->ai_next)
    listener = ListenAt(*at);
  return listener;
}

// "127.0.0.1:9400", "[::1]:9400".
std::string NameOf(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET6) {
    const auto& of_six = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &of_six.sin6_addr, text, sizeof(text));
    return absl::StrCat("[", text, "]:", ntohs(of_six.sin6_port));
  }
  const auto& of_four = reinterpret_cast<const sockaddr_in&>(address);
  inet_ntop(AF_INET, &of_four.sin_addr, text, sizeof(text));
  return absl::StrCat(text, ":", ntohs(of_four.sin_port));
}

}  // namespace

class MetricsServer::Rep {
 public:
  Rep(Collect collect, Serving serving, std::chrono::milliseconds patience,
      const MetricsServerOptions& options)
      : collect_(std::move(collect)),
        serving_(std::move(serving)),
        patience_(patience),
        options_(options),
        pages_([this](const std::string& path) { return PageAt(path); }) {}
  ~Rep();

  absl::Status Open(const std::string& address) ABSL_LOCKS_EXCLUDED(tls_mu_);
  int port() const;
  void LookAtCertificates() ABSL_LOCKS_EXCLUDED(tls_mu_) {
    MutexLock lock(&tls_mu_);
    if (tls_.has_value()) tls_->Look();
  }

 private:
  struct Peer {
    HttpConnection connection;
    Time deadline;
    uint32_t events = 0;  // What epoll is asked to say. 0: it waits for an answer.
    size_t unsent = 0;    // It counts in unsent_bytes_.
  };
  using Peers = std::map<uint64_t, Peer>;

  // ---- The thread that has the connections
  void Serve();
  int WaitMs() const;
  bool Accept();
  void OnEvents(uint64_t id, uint32_t events);
  void Advance(Peers::iterator peer);
  void Watch(Peers::iterator peer, uint32_t events);
  void SetDeadline(Peers::iterator peer, std::chrono::milliseconds patience);
  void CloseLate();
  // With a line in the log, within its bounds.
  void Refuse(Peers::iterator peer, ScrapeRefusal why, const absl::Status& status);
  void Count(ScrapeRefusal why) {
    if (options_.stats != nullptr) options_.stats->Count(why);
  }
  void Close(Peers::iterator peer);
  void BeginTls(HttpConnection* connection) ABSL_LOCKS_EXCLUDED(tls_mu_);
  // So many bytes more are about to be unsent: those that have waited longest to be taken give way.
  void MakeRoom(size_t bytes);
  std::optional<HttpPage> PageAt(const std::string& path);
  void AskForText() ABSL_LOCKS_EXCLUDED(mu_);
  void TakeText() ABSL_LOCKS_EXCLUDED(mu_);

  // ---- The thread that collects
  void MakeTexts() ABSL_LOCKS_EXCLUDED(mu_);
  std::string Text() const;

  void Wake() const {
    const uint64_t one = 1;
    // A counter that is full wakes as well.
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  }

  const Collect collect_;
  const Serving serving_;
  const std::chrono::milliseconds patience_;
  const MetricsServerOptions options_;
  UniqueFd listener_, epoll_, wake_;
  std::atomic<bool> stopping_{false};

  Mutex tls_mu_;
  std::optional<WatchedTlsFiles> tls_ ABSL_GUARDED_BY(tls_mu_);

  Mutex mu_;
  CondVar asked_;
  bool wanted_ ABSL_GUARDED_BY(mu_) = false;              // A text is to be made.
  std::optional<std::string> made_ ABSL_GUARDED_BY(mu_);  // It was, and nobody has taken it.

  // ---- These belong to the thread that has the connections.
  HttpPages pages_;
  Acceptor acceptor_;
  Peers peers_;
  uint64_t next_id_ = kFirstId;
  std::set<std::pair<Time, uint64_t>> deadlines_;
  // Scrapes that a text is being made for, and those that came after it was begun.
  std::set<uint64_t> collecting_, waiting_;
  bool making_ = false;  // A text is, though all who have asked for it may be gone.
  size_t unsent_bytes_ = 0;
  const std::string* text_ = nullptr;  // The page /metrics, while those who wait for it are answered.
  RefusalLog refusals_{"metrics connection refused"};

  std::thread collector_, server_;
};

absl::Status MetricsServer::Rep::Open(const std::string& address) {
  if (!options_.tls.certificate.empty()) {
    ASSIGN_OR_RETURN(WatchedTlsFiles files, WatchedTlsFiles::Open(kMetricsTlsNames, options_.tls));
    MutexLock lock(&tls_mu_);
    tls_ = std::move(files);
  }
  absl::StatusOr<UniqueFd> listener = ListenTcp(address);
  if (!listener.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "--metrics-listen=", address, ": cannot serve metrics there: ", listener.status().message()));
  }
  listener_ = *std::move(listener);
  epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeKey}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return absl::UnavailableError(
        absl::StrCat("no descriptors for --metrics-listen=", address, ": ", strerror(errno)));
  }
  RETURN_IF_ERROR(acceptor_.Begin(epoll_.get(), listener_.get(), kListenerKey, "metrics"));
  collector_ = NamedThread("metrics-text", [this] { MakeTexts(); });
  server_ = NamedThread("metrics", [this] { Serve(); });
  return absl::OkStatus();
}

MetricsServer::Rep::~Rep() {
  stopping_ = true;
  if (server_.joinable()) {
    Wake();
    server_.join();
  }
  if (collector_.joinable()) {
    {
      MutexLock lock(&mu_);
      asked_.Signal();
    }
    collector_.join();
  }
}

int MetricsServer::Rep::port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void MetricsServer::Rep::Serve() {
  // OpenSSL writes to connections that their peers have closed.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  while (!stopping_) {
    std::array<epoll_event, 64> ready;
    const int count = epoll_wait(epoll_.get(), ready.data(), ready.size(), WaitMs());
    KVPOOL_CHECK(count >= 0 || errno == EINTR, "epoll_wait: errno %d", errno);
    // Newcomers come last: they displace others, of which some may have spoken in this round.
    bool arrivals = false;
    for (int i = 0; i < count; ++i) {
      // The kernel packs it: nothing may refer to what is in it.
      const epoll_event event = ready[static_cast<size_t>(i)];
      if (event.data.u64 == kWakeKey) {
        uint64_t times;
        [[maybe_unused]] const ssize_t got = read(wake_.get(), &times, sizeof(times));
        TakeText();
      } else if (event.data.u64 == kListenerKey) {
        arrivals = true;
      } else {
        OnEvents(event.data.u64, event.events);
      }
    }
    acceptor_.Resume(NowMs());
    for (int taken = 0; arrivals && taken < kAcceptsPerTurn; ++taken) arrivals = Accept();
    CloseLate();
  }
}

int MetricsServer::Rep::WaitMs() const {
  std::optional<std::chrono::milliseconds> left;
  if (!deadlines_.empty())
    left = std::chrono::ceil<std::chrono::milliseconds>(deadlines_.begin()->first - Now());
  if (const uint64_t resume = acceptor_.resume_ms(), now = NowMs(); resume != UINT64_MAX) {
    const std::chrono::milliseconds pause(resume - std::min(now, resume));
    left = std::min(left.value_or(pause), pause);
  }
  if (!left.has_value()) return -1;
  return static_cast<int>(std::clamp(*left, std::chrono::milliseconds(0), kMostWait).count());
}

// False: there is none.
bool MetricsServer::Rep::Accept() {
  auto [kind, socket, address] = acceptor_.Accept(NowMs());
  if (kind == Acceptor::Kind::kWithoutFiles) Count(ScrapeRefusal::kOpenFiles);
  if (kind != Acceptor::Kind::kConnection) return kind != Acceptor::Kind::kNone;
  if (peers_.size() >= options_.max_connections) {
    Refuse(peers_.find(deadlines_.begin()->second), ScrapeRefusal::kDisplaced,
           absl::ResourceExhaustedError(absl::StrCat("displaced by a newer connection: at most ",
                                                     options_.max_connections, " may be open")));
  }
  const uint64_t id = next_id_++;
  const bool room = socket.get() < options_.fd_ceiling;
  const auto peer = peers_.emplace(id, Peer{HttpConnection(std::move(socket), NameOf(address)), {}}).first;
  SetDeadline(peer, patience_);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = id}};
  peer->second.events = event.events;
  if (!room || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer->second.connection.fd(), &event) != 0) {
    Refuse(peer, ScrapeRefusal::kOpenFiles,
           absl::ResourceExhaustedError(absl::StrCat("the daemon has ", options_.fd_ceiling,
                                                     " open files, its limit for connections")));
  }
  return true;
}

void MetricsServer::Rep::OnEvents(uint64_t id, uint32_t events) {
  // One that came earlier may have displaced it.
  const auto peer = peers_.find(id);
  if (peer == peers_.end()) return;
  // It waits for an answer of ours, and its peer is gone.
  if (peer->second.events == 0) return Close(peer);
  BeginTls(&peer->second.connection);
  Advance(peer);
}

void MetricsServer::Rep::BeginTls(HttpConnection* connection) {
  if (!connection->fresh()) return;
  std::shared_ptr<ssl_ctx_st> context;
  {
    MutexLock lock(&tls_mu_);
    if (!tls_.has_value()) return;
    tls_->Look();
    context = tls_->context();
  }
  connection->UseTls(context.get());
}

void MetricsServer::Rep::MakeRoom(size_t bytes) {
  while (unsent_bytes_ > 0 && unsent_bytes_ + bytes > kMostUnsentBytes) {
    const auto oldest = std::find_if(deadlines_.begin(), deadlines_.end(), [&](const auto& deadline) {
      return peers_.find(deadline.second)->second.unsent > 0;
    });
    Refuse(peers_.find(oldest->second), ScrapeRefusal::kDisplaced,
           absl::ResourceExhaustedError(absl::StrCat("displaced by a newer answer: at most ",
                                                     kMostUnsentBytes, " bytes may wait to be taken")));
  }
}

void MetricsServer::Rep::Advance(Peers::iterator peer) {
  HttpConnection& connection = peer->second.connection;
  while (true) {
    const HttpConnection::Next next = connection.Advance();
    unsent_bytes_ += connection.unsent() - peer->second.unsent;
    peer->second.unsent = connection.unsent();
    switch (next) {
      case HttpConnection::Next::kReadable:
        return Watch(peer, EPOLLIN);
      case HttpConnection::Next::kWritable:
        return Watch(peer, EPOLLOUT);
      case HttpConnection::Next::kOver:
        if (connection.fault().ok()) return Close(peer);
        return Refuse(peer, ScrapeRefusal::kTls, connection.fault());
      case HttpConnection::Next::kAnswer: {
        std::optional<std::string> answer = pages_.Answer(connection.head());
        if (!answer.has_value()) {
          waiting_.insert(peer->first);
          SetDeadline(peer, patience_ * kCollectPatiences);
          Watch(peer, 0);
          return AskForText();
        }
        MakeRoom(answer->size());
        connection.Answer(*std::move(answer));
        SetDeadline(peer, patience_);
      }
    }
  }
}

void MetricsServer::Rep::Watch(Peers::iterator peer, uint32_t events) {
  if (peer->second.events == events) return;
  peer->second.events = events;
  epoll_event event{.events = events, .data = {.u64 = peer->first}};
  KVPOOL_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer->second.connection.fd(), &event) == 0,
               "epoll_ctl: errno %d", errno);
}

void MetricsServer::Rep::SetDeadline(Peers::iterator peer, std::chrono::milliseconds patience) {
  deadlines_.erase({peer->second.deadline, peer->first});
  peer->second.deadline = Now() + patience;
  deadlines_.emplace(peer->second.deadline, peer->first);
}

void MetricsServer::Rep::CloseLate() {
  const auto now = Now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto peer = peers_.find(deadlines_.begin()->second);
    if (peer->second.connection.answered()) {
      Close(peer);
      continue;
    }
    const bool ours = peer->second.events == 0;
    Refuse(
        peer, ScrapeRefusal::kTimeout,
        absl::DeadlineExceededError(ours ? absl::StrCat("the answer was not there within ",
                                                        (patience_ * kCollectPatiences).count(), " ms")
                                         : absl::StrCat("it has not asked, or not taken its answer, within ",
                                                        patience_.count(), " ms")));
  }
}

void MetricsServer::Rep::Refuse(Peers::iterator peer, ScrapeRefusal why, const absl::Status& status) {
  Count(why);
  refusals_.Add(
      {.process = nullptr, .address = peer->second.connection.peer(), .names = {}, .certificate = {}},
      "scrape", status);
  Close(peer);
}

void MetricsServer::Rep::Close(Peers::iterator peer) {
  deadlines_.erase({peer->second.deadline, peer->first});
  waiting_.erase(peer->first);
  collecting_.erase(peer->first);
  unsent_bytes_ -= peer->second.unsent;
  peers_.erase(peer);
}

std::optional<HttpPage> MetricsServer::Rep::PageAt(const std::string& path) {
  if (path == "/health") {
    return serving_() ? HttpPage{.status = 200, .text = "serving\n"}
                      : HttpPage{.status = 503, .text = "draining\n"};
  }
  if (path != "/metrics") return HttpPage{.status = 404, .text = "there are /metrics and /health\n"};
  if (text_ == nullptr) return std::nullopt;
  return HttpPage{.status = 200, .text = *text_};
}

void MetricsServer::Rep::AskForText() {
  if (making_ || waiting_.empty()) return;
  making_ = true;
  collecting_.swap(waiting_);
  MutexLock lock(&mu_);
  wanted_ = true;
  asked_.Signal();
}

void MetricsServer::Rep::TakeText() {
  std::optional<std::string> text;
  {
    MutexLock lock(&mu_);
    text = std::exchange(made_, std::nullopt);
  }
  if (!text.has_value()) return;
  making_ = false;
  text_ = &*text;
  const std::set<uint64_t> answered = std::exchange(collecting_, {});
  for (const uint64_t id : answered) Advance(peers_.find(id));
  text_ = nullptr;
  AskForText();
}

void MetricsServer::Rep::MakeTexts() {
  while (true) {
    {
      MutexLock lock(&mu_);
      while (!wanted_ && !stopping_) asked_.Wait(&mu_);
      if (stopping_) return;
      wanted_ = false;
    }
    std::string text = Text();
    {
      MutexLock lock(&mu_);
      made_ = std::move(text);
    }
    Wake();
  }
}

std::string MetricsServer::Rep::Text() const {
  std::string text;
  for (prometheus::MetricFamily& family : collect_()) {
    text += prometheus::TextSerializer().Serialize({std::move(family)});
    // A thread that computes goes on to the kernel's next tick, 4 ms, though verbs wait for its processor.
    std::this_thread::yield();
  }
  return text;
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address,
                                                                    Collect collect, Serving serving,
                                                                    std::chrono::milliseconds patience,
                                                                    const MetricsServerOptions& options) {
  auto rep = std::make_unique<Rep>(std::move(collect), std::move(serving), patience, options);
  RETURN_IF_ERROR(rep->Open(address));
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(rep)));
}

MetricsServer::MetricsServer(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}

MetricsServer::~MetricsServer() = default;

int MetricsServer::port() const { return rep_->port(); }

void MetricsServer::LookAtCertificates() { rep_->LookAtCertificates(); }

}  // namespace kvpool
