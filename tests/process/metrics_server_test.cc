// Scrapes and probes beside peers that take their time.
#include "server/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/support/unique_fd.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

class MetricsServerTest : public ::testing::Test {
 protected:
  void Start(std::chrono::milliseconds patience) {
    auto server = MetricsServer::Start(
        "127.0.0.1:0", [] { return std::vector<prometheus::MetricFamily>(); }, [] { return true; }, patience);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  // A peer that has said so much. What it reads it waits for, but not for ever.
  UniqueFd Say(const std::string& words) const {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    UniqueFd peer(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    EXPECT_EQ(setsockopt(peer.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    EXPECT_EQ(send(peer.get(), words.data(), words.size(), MSG_NOSIGNAL), static_cast<ssize_t>(words.size()));
    return peer;
  }
  std::string Get(const std::string& path) const {
    const UniqueFd peer = Say("GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
    std::string answer;
    char bytes[4096];
    for (ssize_t got = 0; (got = recv(peer.get(), bytes, sizeof(bytes), 0)) > 0;) {
      answer.append(bytes, static_cast<size_t>(got));
    }
    return answer;
  }
  std::vector<UniqueFd> Slow(int count) const {
    std::vector<UniqueFd> slow;
    for (int i = 0; i < count; ++i) slow.push_back(Say("GET /metrics HTTP/1.1\r\nHost: loc"));
    return slow;
  }
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

}  // namespace
}  // namespace kvpool
