// Scrapes and probes beside peers that take their time, say what nobody understands, or are too many.
#include "server/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/unique_fd.h"
#include "server/base/log.h"
#include "server/metrics/http_connection.h"
#include "tests/process/raw_peer.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr auto kNoPatienceEnds = std::chrono::hours(1);

std::vector<prometheus::MetricFamily> OfOneGauge(double value, size_t help_bytes = 10) {
  prometheus::MetricFamily family{.name = "gauge",
                                  .help = std::string(help_bytes, 'h'),
                                  .type = prometheus::MetricType::Gauge,
                                  .metric = {}};
  family.metric.emplace_back().gauge.value = value;
  return {family};
}

// Its gauge is how often it has collected before. The first time waits until it may go on.
struct HeldCollector {
  std::vector<prometheus::MetricFamily> Collect() {
    const int before = collected++;
    if (before == 0) {
      begun.set_value();
      go_on.get_future().wait();
    }
    return OfOneGauge(before);
  }

  std::atomic<int> collected{0};
  std::promise<void> begun, go_on;
};

class MetricsServerTest : public ::testing::Test {
 protected:
  void Start(std::chrono::milliseconds patience) {
    auto server = MetricsServer::Start(
        "127.0.0.1:0", [] { return std::vector<prometheus::MetricFamily>(); }, [] { return true; }, patience);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  void StartWith(MetricsServer::Collect collect, milliseconds patience, MetricsServerOptions options = {}) {
    options.stats = &stats_;
    auto server = MetricsServer::Start(
        "127.0.0.1:0", std::move(collect), [] { return true; }, patience, options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  // A peer that has said so much.
  UniqueFd Say(const std::string& words) const { return SayTo(server_->port(), words); }
  std::string Get(const std::string& path) const {
    return Rest(Say("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  }
  std::string Ask(const std::string& words) const { return Rest(Say(words)); }
  std::vector<UniqueFd> Slow(int count) const {
    std::vector<UniqueFd> slow;
    for (int i = 0; i < count; ++i) slow.push_back(Say("GET /metrics HTTP/1.1\r\nHost: loc"));
    return slow;
  }
  // Waits until so many were refused for this.
  bool Refused(const std::string& why, uint64_t least) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (stats_.refused()[why] < least) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
  ScrapeStats stats_;
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, PeersThatSayHalfARequestStopNobody) {
  // None of them is given up within the test.
  Start(std::chrono::hours(1));
  const std::vector<UniqueFd> slow = Slow(8);
  EXPECT_THAT(Get("/metrics"), HasSubstr("200 OK"));
  EXPECT_THAT(Get("/health"), HasSubstr("serving"));
  EXPECT_THAT(Get("/metrics"), HasSubstr("200 OK"));
}

TEST_F(MetricsServerTest, PeersThatOccupyAllThreadsAreGivenUp) {
  Start(std::chrono::milliseconds(100));
  const std::vector<UniqueFd> slow = Slow(MetricsServer::kThreads + 1);
  EXPECT_THAT(Get("/health"), HasSubstr("serving"));
  EXPECT_THAT(Get("/metrics"), HasSubstr("200 OK"));
}

TEST_F(MetricsServerTest, ServesTwoPagesByGetAlone) {
  StartWith([] { return OfOneGauge(7); }, kNoPatienceEnds);
  EXPECT_THAT(Get("/metrics"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("\r\nConnection: close\r\n"),
                    HasSubstr("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
                    HasSubstr("\r\nContent-Length: 51\r\n"), HasSubstr("\r\n\r\n# HELP gauge hhhhhhhhhh\n"),
                    HasSubstr("\ngauge 7\n")));
  for (const char* const target : {"/metrics?name=gauge", "/metrics?a=b?c~", "http://host:9400/metrics"})
    EXPECT_THAT(Get(target), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("\ngauge 7\n"))) << target;
  EXPECT_THAT(Ask("\r\nGET /health HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Ask("GET /health HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  for (const char* const path : {"/", "/metrics/", "/metrics2", "//metrics", "/healthz", "*", "at/metrics",
                                 "/at://host/metrics", "http://host"})
    EXPECT_THAT(Get(path), StartsWith("HTTP/1.1 404 Not Found\r\n")) << path;
  for (const char* const method : {"POST", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW"}) {
    for (const char* const path : {"/metrics", "/health"}) {
      EXPECT_THAT(Ask(absl::StrCat(method, " ", path, " HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")),
                  AllOf(StartsWith("HTTP/1.1 405 Method Not Allowed\r\n"), HasSubstr("\r\nAllow: GET\r\n")))
          << method << path;
    }
  }
  EXPECT_THAT(Ask("HEAD /metrics HTTP/1.1\r\n\r\n"), EndsWith("\r\n\r\n"));
  for (const char* const line : {"GET /metrics", "GET /metrics HTTP/2.0", "GET  HTTP/1.1",
                                 " /metrics HTTP/1.1", "GET /metrics\r HTTP/1.1", "GET /a b HTTP/1.1", ""})
    EXPECT_THAT(Ask(absl::StrCat(line, "\r\n\r\n")), StartsWith("HTTP/1.1 400 Bad Request\r\n")) << line;
}

// They would multiply the page, or the time that it takes.
TEST_F(MetricsServerTest, HeadersChangeNothing) {
  StartWith([] { return OfOneGauge(7); }, kNoPatienceEnds);
  std::string ranges = "bytes=0-";
  while (ranges.size() < 8000) ranges += ",0-";
  const std::string page = Get("/metrics");
  for (const std::string& header :
       {"Range: " + ranges, std::string("Range: bytes=0-1"), std::string("Accept-Encoding: gzip, br"),
        std::string("Expect: 100-continue"), std::string("Connection: keep-alive")}) {
    EXPECT_EQ(Ask("GET /metrics HTTP/1.1\r\n" + header + "\r\n\r\n"), page) << header;
  }
}

TEST_F(MetricsServerTest, TooLongARequestIsNone) {
  StartWith([] { return OfOneGauge(7); }, kNoPatienceEnds);
  const std::string line = "GET /metrics HTTP/1.1\r\nX: ";
  const size_t room = HttpConnection::kMostHeadBytes - line.size() - 4;
  EXPECT_THAT(Ask(line + std::string(room, 'x') + "\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Ask(line + std::string(room + 1, 'x') + "\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(Ask(std::string(50000, 'x')), StartsWith("HTTP/1.1 400 "));
  // What follows an answered request is read, so that its answer arrives, to a bound.
  const std::string post = "POST /metrics HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n";
  EXPECT_THAT(Ask(post + std::string(HttpConnection::kMostLateBytes / 2, 'x')), StartsWith("HTTP/1.1 405 "));
  const UniqueFd flood = Say(post);
  const std::string chunk(1 << 16, 'x');
  ssize_t sent = 0;
  for (int i = 0; i < 1000 && sent >= 0; ++i)
    sent = send(flood.get(), chunk.data(), chunk.size(), MSG_NOSIGNAL);
  EXPECT_LT(sent, 0) << "it reads on";
}

TEST_F(MetricsServerTest, APeerThatSaysAByteNowAndThenIsGivenUp) {
  const auto patience = milliseconds(200);
  StartWith([] { return OfOneGauge(7); }, patience);
  const UniqueFd peer = Say("GET /metrics HTTP/1.1\r\nX: ");
  const auto begin = std::chrono::steady_clock::now();
  while (send(peer.get(), "x", 1, MSG_NOSIGNAL) == 1) {
    ASSERT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << "for ever";
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begin, patience - milliseconds(50));
  EXPECT_EQ(stats_.refused()["timeout"], 1u);
}

TEST_F(MetricsServerTest, PeersThatTakeNothingStopNobodyAndAreGivenUp) {
  const size_t large = 10 << 20;
  StartWith([=] { return OfOneGauge(7, large); }, milliseconds(500));
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 3; ++i) peers.push_back(Say("GET /metrics HTTP/1.1\r\n\r\n"));
  EXPECT_THAT(Get("/health"), HasSubstr("serving"));
  EXPECT_GT(Get("/metrics").size(), large);
  EXPECT_TRUE(Refused("timeout", 3));
}

// Four of them would be more than may wait to be taken.
TEST_F(MetricsServerTest, AnswersThatNobodyTakesAreBounded) {
  StartWith([] { return OfOneGauge(7, 20 << 20); }, kNoPatienceEnds);
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 3; ++i) peers.push_back(Say("GET /metrics HTTP/1.1\r\n\r\n"));
  EXPECT_GT(Get("/metrics").size(), size_t{20 << 20});
  peers.push_back(Say("GET /metrics HTTP/1.1\r\n\r\n"));
  EXPECT_TRUE(Refused("displaced", 1));
  EXPECT_GT(Get("/metrics").size(), size_t{20 << 20}) << "the newest are served";
}

TEST_F(MetricsServerTest, TwoThousandIdleConnectionsAreNoObstacle) {
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  constexpr size_t kIdle = 2000, kMost = 100;
  if (files.rlim_cur < kIdle + kMost + 100) GTEST_SKIP() << "this process may have too few open files";
  StartWith([] { return OfOneGauge(7); }, kNoPatienceEnds, {.max_connections = kMost});
  std::vector<UniqueFd> idle;
  for (size_t i = 0; i < kIdle; ++i) idle.push_back(Say(i % 2 == 0 ? "" : "GET /metr"));
  EXPECT_THAT(Get("/metrics"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get("/health"), HasSubstr("serving"));
  EXPECT_TRUE(Refused("displaced", kIdle + 1 - kMost));
  // The youngest are still there, and are served.
  const std::string rest = "ics HTTP/1.1\r\n\r\n";
  ASSERT_EQ(send(idle.back().get(), rest.data(), rest.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(rest.size()));
  EXPECT_THAT(Rest(idle.back()), HasSubstr("\ngauge 7\n"));
  EXPECT_EQ(Rest(idle.front()), "");
}

TEST_F(MetricsServerTest, DescriptorsAboveTheCeilingAreOthers) {
  StartWith([] { return OfOneGauge(7); }, kNoPatienceEnds, {.fd_ceiling = 3});
  EXPECT_EQ(Ask(""), "");
  EXPECT_TRUE(Refused("open_files", 1));
}

// What scrapes cost does not grow with their number.
// The descriptor that is kept to refuse with serves nobody either, as where another thread has taken it.
TEST_F(MetricsServerTest, WhoCanNotBeAcceptedWaits) {
  Start(kNoPatienceEnds);
  rlimit files;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const UniqueFd log(memfd_create("log", MFD_CLOEXEC));
  SetLog({.fd = log.get()});
  const UniqueFd waits(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const rlimit none = {.rlim_cur = 0, .rlim_max = files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server_->port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(waits.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const std::string words = "GET /health HTTP/1.1\r\n\r\n";
  EXPECT_EQ(send(waits.get(), words.data(), words.size(), MSG_NOSIGNAL), static_cast<ssize_t>(words.size()));
  std::string line(1000, '\0');
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  ssize_t logged = 0;
  while ((logged = pread(log.get(), line.data(), line.size(), 0)) <= 0 &&
         std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(1));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  SetLog({});
  EXPECT_THAT(line, HasSubstr("connections wait address=metrics error=\"Too many open files\""));
  EXPECT_THAT(Rest(waits), EndsWith("serving\n"));
  EXPECT_EQ(stats_.refused()["open_files"], 0u);
}

TEST_F(MetricsServerTest, ScrapesThatWaitShareOneAndAProbeWaitsForNone) {
  HeldCollector collector;
  StartWith([&] { return collector.Collect(); }, kNoPatienceEnds);
  const std::string request = "GET /metrics HTTP/1.1\r\n\r\n";
  const UniqueFd first = Say(request);
  collector.begun.get_future().wait();
  std::vector<UniqueFd> later;
  for (int i = 0; i < 20; ++i) later.push_back(Say(request));
  // One that gives up takes nobody's place.
  later.pop_back();
  EXPECT_THAT(Get("/health"), HasSubstr("serving"));
  collector.go_on.set_value();
  EXPECT_THAT(Rest(first), HasSubstr("\ngauge 0\n"));
  // They came after it had begun.
  for (const UniqueFd& peer : later) EXPECT_THAT(Rest(peer), HasSubstr("\ngauge 1\n"));
  EXPECT_EQ(collector.collected, 2);
}

// All who wait for a text are gone before it is there: it is too old for who came meanwhile.
TEST_F(MetricsServerTest, ATextIsForThoseWhoAskedBefore) {
  HeldCollector collector;
  StartWith([&] { return collector.Collect(); }, kNoPatienceEnds, {.max_connections = 1});
  const std::string request = "GET /metrics HTTP/1.1\r\n\r\n";
  const UniqueFd first = Say(request);
  collector.begun.get_future().wait();
  const UniqueFd second = Say(request);
  EXPECT_TRUE(Refused("displaced", 1));
  // The server reads its request meanwhile. Where it is slower, this shows nothing.
  std::this_thread::sleep_for(milliseconds(50));
  collector.go_on.set_value();
  EXPECT_THAT(Rest(second), HasSubstr("\ngauge 1\n"));
}

TEST_F(MetricsServerTest, TheEndWaitsForNoPeer) {
  StartWith([] { return OfOneGauge(7, 20 << 20); }, kNoPatienceEnds);
  const std::vector<UniqueFd> slow = Slow(20);
  const UniqueFd takes_nothing = Say("GET /metrics HTTP/1.1\r\n\r\n");
  EXPECT_THAT(Get("/health"), HasSubstr("serving"));
  const auto begin = std::chrono::steady_clock::now();
  server_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_EQ(Rest(slow[0]), "");
}

TEST_F(MetricsServerTest, HostileBytesStopNobody) {
  StartWith([] { return OfOneGauge(7); }, milliseconds(300));
  const std::vector<std::string> words = {"GET",
                                          " ",
                                          "/metrics",
                                          "/health",
                                          "HTTP/1.1",
                                          "\r\n",
                                          "\r\n\r\n",
                                          "\n",
                                          "\r",
                                          "%",
                                          "?",
                                          "#",
                                          "POST",
                                          ":",
                                          "\x16\x03\x01",
                                          std::string(1, '\0'),
                                          "%u12",
                                          "Range: bytes=0-,0-",
                                          "Content-Length: -1",
                                          "Transfer-Encoding: chunked",
                                          "PRI * HTTP/2.0"};
  std::mt19937 random(1);
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 3000; ++i) {
    std::string said;
    for (uint32_t left = random() % 30; left > 0; --left) {
      said += random() % 4 != 0 ? words[random() % words.size()]
                                : std::string(random() % 300, static_cast<char>(random()));
    }
    peers.push_back(Say(said));
    if (random() % 2 == 0) peers.erase(peers.begin() + static_cast<ptrdiff_t>(random() % peers.size()));
    if (peers.size() > 100) peers.clear();
    if (i % 100 != 0) continue;
    EXPECT_THAT(Get("/metrics"), HasSubstr("\ngauge 7\n")) << i;
  }
  peers.clear();
  EXPECT_THAT(Get("/metrics"), HasSubstr("\ngauge 7\n"));
}

TEST(MetricsAddressTest, IsANameOrANumber) {
  const auto start = [](const std::string& address) {
    return MetricsServer::Start(
        address, [] { return std::vector<prometheus::MetricFamily>(); }, [] { return true; });
  };
  for (const char* const address : {"127.0.0.1:0", "[::1]:0", "localhost:0", ":0"}) {
    const auto server = start(address);
    // Not every machine has IPv6.
    if (!server.ok() && std::string(address) == "[::1]:0") continue;
    ASSERT_TRUE(server.ok()) << server.status();
    EXPECT_GT((*server)->port(), 0) << address;
    if (std::string(address) != "127.0.0.1:0") continue;
    const std::string taken = absl::StrCat("127.0.0.1:", (*server)->port());
    EXPECT_EQ(start(taken).status(),
              absl::UnavailableError(absl::StrCat("--metrics-listen=", taken,
                                                  ": cannot serve metrics there: Address already in use")));
  }
  for (const char* const address : {"", "nowhere", "127.0.0.1:70000", "127.0.0.1:http",
                                    "no.such.name.invalid:0", "192.0.2.1:0", "[::1:0", "[]x:0"}) {
    const absl::Status status = start(address).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << address;
    EXPECT_THAT(std::string(status.message()),
                StartsWith(absl::StrCat("--metrics-listen=", address, ": cannot serve metrics there: ")));
  }
}

}  // namespace
}  // namespace kvpool
