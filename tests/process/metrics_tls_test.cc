// TLS of the metrics address: who is served, what a peer may do to a handshake, and what happens when the files change.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/unique_fd.h"
#include "server/metrics/metrics_server.h"
#include "tests/process/raw_peer.h"
#include "tests/support/certificates.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr auto kPatientForAll = std::chrono::hours(1);

// A client after its handshake.
struct TlsPeer {
  explicit TlsPeer(UniqueFd fd) : socket(std::move(fd)) {
    SSL_set_fd(tls.get(), socket.get());
    EXPECT_EQ(SSL_connect(tls.get()), 1);
  }

  UniqueFd socket;
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context{SSL_CTX_new(TLS_client_method()),
                                                                  &SSL_CTX_free};
  const std::unique_ptr<SSL, decltype(&SSL_free)> tls{SSL_new(context.get()), &SSL_free};
};

// Two authorities, "ours" and "foreign", and what they have signed.
class MetricsTlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Certificates::CanBeMade())
      GTEST_SKIP() << "the openssl program, which makes the certificates, is not installed";
    ASSERT_NO_FATAL_FAILURE(certificates_.Make(R"(
      authorities ours foreign
      for ca in ours foreign; do sign daemon-$ca $ca 2; sign scraper-$ca $ca 2; done
      sign scraper-expired ours -1
      sign daemon-expired ours -1
      )"));
    certificates_.Use("daemon-ours");
  }
  std::string File(const std::string& name) const { return certificates_.File(name); }
  std::string Text(const std::string& name) const { return certificates_.Text(name); }
  TlsFiles Files(const std::string& client_ca) const {
    return {.certificate = File("tls.pem"),
            .key = File("tls.key"),
            .client_ca = client_ca.empty() ? "" : File(client_ca + ".pem")};
  }
  void Start(const std::string& client_ca, milliseconds patience = kPatientForAll, size_t text_bytes = 10) {
    const auto collect = [text_bytes] {
      prometheus::MetricFamily family{.name = "gauge",
                                      .help = std::string(text_bytes, 'h'),
                                      .type = prometheus::MetricType::Gauge,
                                      .metric = {}};
      family.metric.emplace_back().gauge.value = 7;
      return std::vector<prometheus::MetricFamily>{family};
    };
    auto server = MetricsServer::Start("127.0.0.1:0", collect, [] { return true; }, patience,
                                       {.tls = Files(client_ca), .stats = &stats_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  // A client that trusts a daemon of `authority`.
  std::unique_ptr<httplib::SSLClient> Client(const std::string& authority, const std::string& identity,
                                             int port) const {
    auto client = identity.empty() ? std::make_unique<httplib::SSLClient>("127.0.0.1", port)
                                   : std::make_unique<httplib::SSLClient>(
                                         "127.0.0.1", port, File(identity + ".pem"), File(identity + ".key"));
    client->set_ca_cert_path(File(authority + ".pem").c_str());
    client->enable_server_certificate_verification(true);
    client->set_read_timeout(30);
    return client;
  }
  bool Serves(const std::string& authority, const std::string& identity,
              const std::string& path = "/metrics") const {
    const httplib::Result result = Client(authority, identity, server_->port())->Get(path);
    return result && result->status == 200 &&
           (path != "/metrics" || absl::StrContains(result->body, "\ngauge 7\n"));
  }
  // A peer that has said so much, in the clear.
  UniqueFd Say(const std::string& words) const { return SayTo(server_->port(), words); }
  // Waits until so many were refused for this, and no more: a client may know before the server has counted it.
  bool Refused(const std::string& why, uint64_t times) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (stats_.refused()[why] < times && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(milliseconds(1));
    return stats_.refused()[why] == times;
  }
  // What a client says first.
  static std::string Hello() {
    const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                    &SSL_CTX_free);
    const std::unique_ptr<SSL, decltype(&SSL_free)> client(SSL_new(context.get()), &SSL_free);
    SSL_set_bio(client.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_connect(client.get());
    const char* bytes = nullptr;
    const long size = BIO_get_mem_data(SSL_get_wbio(client.get()), &bytes);
    return std::string(bytes, static_cast<size_t>(size));
  }

  Certificates certificates_;
  ScrapeStats stats_;
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsTlsTest, WithoutACaOnlyTheDaemonShowsACertificate) {
  Start("");
  EXPECT_TRUE(Serves("ours", ""));
  EXPECT_TRUE(Serves("ours", "", "/health"));
  EXPECT_TRUE(Serves("ours", "scraper-foreign")) << "nobody has asked for it";
  EXPECT_FALSE(Serves("foreign", "")) << "the daemon is not of this authority";
  certificates_.Use("daemon-expired");
  EXPECT_FALSE(Serves("ours", ""));
  certificates_.Use("daemon-ours");
  EXPECT_TRUE(Serves("ours", ""));
}

TEST_F(MetricsTlsTest, WithACaClientsShowOneOfIts) {
  Start("ours");
  EXPECT_TRUE(Serves("ours", "scraper-ours"));
  EXPECT_TRUE(Serves("ours", "scraper-ours", "/health"));
  EXPECT_EQ(stats_.refused()["tls"], 0u);
  for (const char* const identity : {"", "scraper-foreign", "scraper-expired"}) {
    EXPECT_FALSE(Serves("ours", identity)) << identity;
    EXPECT_FALSE(Serves("ours", identity, "/health")) << identity;
  }
  EXPECT_TRUE(Refused("tls", 6));
}

TEST_F(MetricsTlsTest, OldVersionsAreRefused) {
  Start("");
  const struct {
    int version;
    bool served;
  } kCases[] = {
      {TLS1_VERSION, false}, {TLS1_1_VERSION, false}, {TLS1_2_VERSION, true}, {TLS1_3_VERSION, true}};
  for (const auto& [version, served] : kCases) {
    const auto client = Client("ours", "", server_->port());
    SSL_CTX* const context = client->ssl_context();
    SSL_CTX_set_security_level(context, 0);  // Otherwise the client itself has none of the old ones.
    SSL_CTX_set_min_proto_version(context, version);
    SSL_CTX_set_max_proto_version(context, version);
    const httplib::Result result = client->Get("/health");
    EXPECT_EQ(result && result->status == 200, served) << version;
  }
  EXPECT_TRUE(Refused("tls", 2));
}

TEST_F(MetricsTlsTest, WhoSpeaksNoTlsIsToldSo) {
  Start("");
  const std::string answer = Rest(Say("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 400 Bad Request\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\n\r\nthis address is served with TLS"));
  EXPECT_EQ(Rest(Say(std::string(5000, 'x'))).find("gauge"), std::string::npos);
  EXPECT_TRUE(Serves("ours", ""));
}

TEST_F(MetricsTlsTest, AHandshakeThatDoesNotEndStopsNobodyAndIsGivenUp) {
  const auto patience = milliseconds(1000);
  Start("", patience);
  const std::string hello = Hello();
  std::vector<UniqueFd> slow;
  for (size_t i = 0; i < 100; ++i) slow.push_back(Say(hello.substr(0, i < 50 ? hello.size() : 1 + i)));
  const UniqueFd drips = Say(hello.substr(0, 1));
  EXPECT_TRUE(Serves("ours", ""));
  const auto begin = std::chrono::steady_clock::now();
  for (size_t at = 1; send(drips.get(), &hello[at], 1, MSG_NOSIGNAL) == 1; ++at) {
    ASSERT_LT(at + 1, hello.size()) << "for ever";
    std::this_thread::sleep_for(patience / 50);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  for (const UniqueFd& peer : slow) Rest(peer);
  EXPECT_TRUE(Refused("timeout", 101));
}

TEST_F(MetricsTlsTest, LargeTextsArriveWhole) {
  Start("ours", kPatientForAll, 5 << 20);
  const httplib::Result result = Client("ours", "scraper-ours", server_->port())->Get("/metrics");
  ASSERT_TRUE(result) << httplib::to_string(result.error());
  EXPECT_GT(result->body.size(), size_t{5 << 20});
  EXPECT_THAT(result->body.substr(result->body.size() - 9), HasSubstr("gauge 7"));
}

// By Nagle's rule the request waits until the end of the handshake is acknowledged, which the kernel puts off for 40 ms.
TEST_F(MetricsTlsTest, AClientThatJoinsItsBytesIsNotKeptWaiting) {
  Start("");
  auto fastest = std::chrono::nanoseconds::max();
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_TRUE(Serves("ours", "", "/health"));
    fastest = std::min(fastest, std::chrono::steady_clock::now() - begin);
  }
  EXPECT_LT(fastest, milliseconds(35));
}

TEST_F(MetricsTlsTest, HostileBytesStopNobody) {
  Start("ours", milliseconds(300));
  const std::string hello = Hello();
  std::mt19937 random(1);
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 2000; ++i) {
    std::string said = hello.substr(0, random() % (hello.size() + 1));
    for (uint32_t left = random() % 6; left > 0 && !said.empty(); --left)
      said[random() % said.size()] = static_cast<char>(random());
    if (random() % 3 == 0) said += std::string(random() % 20000, static_cast<char>(random()));
    peers.push_back(Say(said));
    if (peers.size() > 100) peers.clear();
    if (i % 100 != 0) continue;
    EXPECT_TRUE(Serves("ours", "scraper-ours")) << i;
  }
  peers.clear();
  EXPECT_TRUE(Serves("ours", "scraper-ours"));
}

// OpenSSL reads on by itself while records come that say nothing, here that another key follows.
TEST_F(MetricsTlsTest, RecordsThatSayNothingStopNobody) {
  Start("");
  const TlsPeer peer(Say(""));
  const UniqueFd& socket = peer.socket;
  SSL* const client = peer.tls.get();
  const int few_bytes = 1 << 16;  // No more are on their way.
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &few_bytes, sizeof(few_bytes));
  // They are made beforehand, as that takes as long as to read them.
  SSL_set_bio(client, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
  const char* records = nullptr;
  long size = 0;
  while ((size = BIO_get_mem_data(SSL_get_wbio(client), &records)) < 3'000'000) {
    ASSERT_EQ(SSL_key_update(client, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
    ASSERT_EQ(SSL_do_handshake(client), 1);
  }
  std::atomic<bool> all_said{false};
  std::thread says([&] {
    for (long said = 0, got = 0; said < size && got >= 0; said += got)
      got = send(socket.get(), records + said, static_cast<size_t>(size - said), MSG_NOSIGNAL);
    all_said = true;
  });
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(Serves("ours", "", "/health"));
  EXPECT_FALSE(all_said) << "the others were served once it had said all";
  server_.reset();
  says.join();
}

// OpenSSL keeps a thread's errors, and looks at them to say what a connection waits for.
TEST_F(MetricsTlsTest, WhatOneBreaksIsNobodyElses) {
  signal(SIGPIPE, SIG_IGN);  // This client's.
  const size_t large = 10 << 20;
  Start("", kPatientForAll, large);
  const auto breaks = [this] {
    const TlsPeer one(Say(""));
    const std::string no_record(100, 'x');
    send(one.socket.get(), no_record.data(), no_record.size(), MSG_NOSIGNAL);
    Rest(one.socket);
  };
  const TlsPeer other(Say(""));
  for (const std::string part : {"GET /metrics ", "HTTP/1.1\r\n", "\r\n"}) {
    breaks();
    EXPECT_EQ(SSL_write(other.tls.get(), part.data(), static_cast<int>(part.size())),
              static_cast<int>(part.size()));
    // It has been read by the time that others are served, and at last waits for room to write.
    EXPECT_TRUE(Serves("ours", ""));
  }
  breaks();
  size_t taken = 0;
  char bytes[4096];
  for (int size = 0; (size = SSL_read(other.tls.get(), bytes, sizeof(bytes))) > 0;)
    taken += static_cast<size_t>(size);
  EXPECT_GT(taken, large);
}

TEST_F(MetricsTlsTest, NewFilesCountFromTheNextConnectionOn) {
  Start("ours");
  EXPECT_TRUE(Serves("ours", "scraper-ours"));
  // Half of a pair is none, and neither is half a file: what was read before goes on.
  std::ofstream(File("tls.pem")) << Text("daemon-foreign.pem");
  EXPECT_TRUE(Serves("ours", "scraper-ours"));
  std::ofstream(File("tls.pem")) << Text("daemon-foreign.pem").substr(0, 100);
  EXPECT_TRUE(Serves("ours", "scraper-ours"));
  certificates_.Use("daemon-foreign");
  EXPECT_FALSE(Serves("ours", "scraper-ours"));
  EXPECT_TRUE(Serves("foreign", "scraper-ours"));
  std::ofstream(File("ours.pem")) << Text("foreign.pem");
  EXPECT_FALSE(Serves("foreign", "scraper-ours"));
  EXPECT_TRUE(Serves("foreign", "scraper-foreign"));
}

// A pipe without a writer would keep the thread that has all connections, and a device has no end.
TEST_F(MetricsTlsTest, WhatIsNoFileOrTooLargeKeepsNobody) {
  // The client reads its own.
  std::filesystem::copy_file(File("ours.pem"), File("ca.pem"));
  const TlsFiles files = Files("ca");
  auto daemon = DaemonProcess::Start(
      {.flags = {"--metrics-tls-cert=" + files.certificate, "--metrics-tls-key=" + files.key,
                 "--metrics-tls-client-ca=" + files.client_ca}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto serves = [&] {
    const httplib::Result result = Client("ours", "scraper-ours", (*daemon)->metrics_port())->Get("/health");
    return result && result->status == 200;
  };
  const struct {
    void (*make)(const std::string& path);
    const char* why;
  } kCases[] = {
      {[](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); }, "it is no regular file"},
      {[](const std::string& path) { std::filesystem::create_symlink("/dev/zero", path); },
       "it is no regular file"},
      {[](const std::string& path) { std::ofstream(path) << std::string((1 << 20) + 1, '#'); },
       "it has more than 1048576 bytes"},
  };
  for (const auto& [flag, file] :
       {std::pair("metrics-tls-cert", files.certificate), std::pair("metrics-tls-key", files.key),
        std::pair("metrics-tls-client-ca", files.client_ca)}) {
    const std::string kept = file + ".kept";
    for (const auto& bad : kCases) {
      const std::string why = absl::StrCat("--", flag, "=", file, ": cannot read it: ", bad.why);
      SCOPED_TRACE(why);
      std::filesystem::rename(file, kept);
      ASSERT_NO_FATAL_FAILURE(bad.make(file));
      ASSERT_TRUE(serves()) << "what was read before goes on";
      EXPECT_THAT((*daemon)->AwaitInLog(why), HasSubstr(why));
      EXPECT_EQ(WatchedTlsFiles::Open(kMetricsTlsNames, files).status(), absl::InvalidArgumentError(why));
      std::filesystem::rename(kept, file);
      ASSERT_TRUE(serves());
    }
  }
  EXPECT_EQ((*daemon)->Stop(), 0);
}

TEST_F(MetricsTlsTest, TheDaemonSaysWhatIsWrongWithItsFiles) {
  const std::vector<std::string> flags = {"--metrics-tls-cert=" + File("tls.pem"),
                                          "--metrics-tls-key=" + File("tls.key"),
                                          "--metrics-tls-client-ca=" + File("ours.pem")};
  auto daemon = DaemonProcess::Start({.flags = flags});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto scrape = [&](const std::string& authority, const std::string& identity) {
    const httplib::Result result = Client(authority, identity, (*daemon)->metrics_port())->Get("/metrics");
    return result && result->status == 200 ? result->body : "";
  };
  EXPECT_THAT(scrape("ours", "scraper-ours"),
              HasSubstr("\nkvpool_metrics_connections_refused_total{reason=\"tls\"} 0\n"));
  EXPECT_EQ(scrape("ours", "scraper-foreign"), "");
  EXPECT_THAT(scrape("ours", "scraper-ours"),
              HasSubstr("\nkvpool_metrics_connections_refused_total{reason=\"tls\"} 1\n"));
  EXPECT_THAT((*daemon)->AwaitInLog("metrics connection refused"),
              HasSubstr("its certificate: unable to get local issuer certificate"));

  std::ofstream(File("tls.key")) << Text("daemon-foreign.key");
  (*daemon)->Signal(SIGHUP);
  const std::string why = absl::StrCat("--metrics-tls-key=", File("tls.key"),
                                       ": is not the key of --metrics-tls-cert=", File("tls.pem"));
  EXPECT_THAT((*daemon)->AwaitInLog("metrics certificates refused"), HasSubstr(why));
  EXPECT_NE(scrape("ours", "scraper-ours"), "");
  std::vector<std::string> command = {DaemonProcess::Program(), "--device=host", "--capacity=16MiB",
                                      "--socket=" + File("k.sock"), "--metrics-listen=127.0.0.1:0"};
  command.insert(command.end(), flags.begin(), flags.end());
  const ProgramEnd end = RunProgram(command);
  EXPECT_EQ(end.exit_code, 2) << end.output;
  EXPECT_THAT(end.output, HasSubstr(why));

  certificates_.Use("daemon-foreign");
  (*daemon)->Signal(SIGHUP);
  EXPECT_THAT((*daemon)->AwaitInLog("metrics certificates read"), HasSubstr(File("tls.pem")));
  EXPECT_NE(scrape("foreign", "scraper-ours"), "");
  EXPECT_EQ((*daemon)->Stop(), 0);
}

}  // namespace
}  // namespace kvpool
