// A server that is none: whatever it says, each value is answered, nothing wrong is loaded, and nothing is waited for for ever.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/unique_fd.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::Each;

// Greets as a server does, and answers whatever comes then with what `say` makes of it, or hangs up.
class FakeServer {
 public:
  using Say = std::function<std::optional<std::string>(const std::string& asked)>;
  explicit FakeServer(Say say) : say_(std::move(say)) {
    listener_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        listen(listener_.get(), 64) != 0 ||
        getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      std::abort();
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~FakeServer() {
    stop_ = true;
    thread_.join();
  }
  RespEndpoint endpoint() const { return {.host = "127.0.0.1", .port = port_}; }
  int said() const { return said_; }

 private:
  struct Client {
    UniqueFd fd;
    bool greeted = false;
  };
  void Run() {
    std::vector<Client> clients;
    while (!stop_) {
      std::vector<pollfd> fds = {{listener_.get(), POLLIN, 0}};
      for (const Client& client : clients) fds.push_back({client.fd.get(), POLLIN, 0});
      poll(fds.data(), fds.size(), 5);
      for (size_t i = clients.size(); i-- > 0;) {
        if (fds[i + 1].revents != 0 && !Serve(&clients[i]))
          clients.erase(clients.begin() + static_cast<ptrdiff_t>(i));
      }
      if (fds[0].revents != 0)
        clients.push_back({UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC))});
    }
  }
  bool Serve(Client* client) {
    char bytes[65536];
    const ssize_t got = recv(client->fd.get(), bytes, sizeof(bytes), 0);
    if (got <= 0) return false;
    std::optional<std::string> answer = "+PONG\r\n";
    if (client->greeted) {
      answer = say_(std::string(bytes, static_cast<size_t>(got)));
      ++said_;
    }
    client->greeted = true;
    return answer.has_value() && send(client->fd.get(), answer->data(), answer->size(), MSG_NOSIGNAL) >= 0;
  }

  const Say say_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int> said_{0};
  std::thread thread_;
};

RespTier::Options Impatient(const FakeServer& server, RespCluster cluster) {
  RespTier::Options options = RespOptions(server.endpoint());
  options.cluster = cluster;
  options.io_timeout = std::chrono::milliseconds(100);
  options.refresh_pause = options.first_pause = options.longest_pause = std::chrono::milliseconds(1);
  return options;
}

// Replies as they could be, and as they could not.
std::string GarbageReply(std::mt19937* random) {
  const auto pick = [&](size_t n) { return (*random)() % n; };
  static const std::string kWhole[] = {"+OK\r\n",
                                       "$-1\r\n",
                                       ":1\r\n",
                                       ":0\r\n",
                                       ":-7\r\n",
                                       "*-1\r\n",
                                       "*0\r\n",
                                       "$0\r\n\r\n",
                                       "-ERR x\r\n",
                                       "-OOM no\r\n",
                                       "-\r\n",
                                       "-MOVED 1 127.0.0.1:1\r\n",
                                       "-ASK 1 127.0.0.1:1\r\n",
                                       "-MOVED 99999 x:1\r\n",
                                       "-MOVED\r\n",
                                       "-CLUSTERDOWN x\r\n",
                                       "-NOAUTH x\r\n",
                                       "-LOADING x\r\n",
                                       "-TRYAGAIN x\r\n",
                                       "$1048608\r\n",
                                       "$1048609\r\n",
                                       "$9223372036854775807\r\n",
                                       "$-2\r\n",
                                       "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
                                       "*65537\r\n",
                                       "*9223372036854775807\r\n",
                                       "\r\n",
                                       "%1\r\n",
                                       "HTTP/1.1 400 no\r\n\r\n",
                                       "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
                                       "*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\na\r\n:1\r\n",
                                       "$32\r\nKVP1aaaabbbbccccddddddddeeeeeeee\r\n",
                                       "$4\r\nKVP1\r\n"};
  std::string text;
  for (size_t parts = 1 + pick(4); parts > 0; --parts) {
    switch (pick(4)) {
      case 0:
      case 1:
        text += kWhole[pick(std::size(kWhole))];
        break;
      case 2: {
        const std::string& whole = kWhole[pick(std::size(kWhole))];
        text += whole.substr(0, pick(whole.size() + 1));
        break;
      }
      default:
        for (size_t bytes = pick(200); bytes > 0; --bytes) text.push_back(static_cast<char>(pick(256)));
    }
  }
  return text;
}

class RespHostileTest : public testing::TestWithParam<RespCluster> {};

TEST_P(RespHostileTest, GarbageIsNeverAValue) {
  std::mt19937 random(11);
  FakeServer server([&](const std::string&) { return GarbageReply(&random); });
  const auto tier = OpenResp(Impatient(server, GetParam()));
  uint32_t number = 0;
  const auto end = std::chrono::steady_clock::now() + 2 * kTestLimit;
  while (server.said() < 300 && std::chrono::steady_clock::now() < end) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    EXPECT_EQ(Load(tier.get(), Numbers(3, number), kValueBytes, deadline).right, 0);
    Exists(tier.get(), Numbers(3, number));
    Store(tier.get(), {number++});
  }
  EXPECT_GT(server.said(), 0);
  EXPECT_EQ(tier->usage().waiting, 0);
}

INSTANTIATE_TEST_SUITE_P(Clusters, RespHostileTest,
                         testing::Values(RespCluster::kAuto, RespCluster::kOn, RespCluster::kOff));

TEST(RespHostileServer, OneThatSendsOnInCirclesIsLeft) {
  std::unique_ptr<FakeServer> server;
  std::atomic<uint16_t> port{0};
  server = std::make_unique<FakeServer>(
      [&](const std::string&) { return absl::StrCat("-ASK 1 127.0.0.1:", port.load(), "\r\n"); });
  port = server->endpoint().port;
  const auto tier = OpenResp(Impatient(*server, RespCluster::kOff));
  EXPECT_THAT(Store(tier.get(), {1}), Each(TierResult::kFailed));
  EXPECT_THAT(Load(tier.get(), {1}).results, Each(TierResult::kFailed));
  EXPECT_GT(server->said(), 0);
}

TEST(RespHostileServer, ALineWithoutEndIsNotKept) {
  FakeServer server([](const std::string&) { return std::string(20000, '+'); });
  const auto tier = OpenResp(Impatient(server, RespCluster::kOff));
  EXPECT_THAT(Load(tier.get(), {1}).results, Each(TierResult::kFailed));
  EXPECT_GT(server.said(), 0);
}

TEST(RespHostileServer, OneThatSaysNothingIsLeftAlone) {
  FakeServer server([](const std::string&) { return std::string(); });
  const auto tier = OpenResp(Impatient(server, RespCluster::kOff));
  EXPECT_TRUE(Eventually([&] {
    EXPECT_THAT(Load(tier.get(), {1}).results, Each(TierResult::kFailed));
    return tier->usage().nodes_down == 1;
  }));
}

TEST(RespHostileServer, AValueWhoseReplyWasLostIsErased) {
  std::atomic<int> unlinked{0};
  FakeServer server([&](const std::string& asked) -> std::optional<std::string> {
    if (absl::StrContains(asked, "EXISTS")) return ":0\r\n";
    if (!absl::StrContains(asked, "UNLINK")) return std::nullopt;
    ++unlinked;
    return ":1\r\n";
  });
  RespTier::Options options = RespOptions(server.endpoint());
  options.cluster = RespCluster::kOff;
  const auto tier = OpenResp(options);
  EXPECT_THAT(Store(tier.get(), {0}, 64), Each(TierResult::kFailed));
  EXPECT_EQ(tier->CountOf(OwnerOf(0)).value_or(99), 1);
  const TierErased erased = tier->Erase(OwnerOf(0), {});
  EXPECT_EQ(erased.values, 1);
  EXPECT_TRUE(erased.complete);
  EXPECT_EQ(unlinked, 1);
  EXPECT_EQ(tier->CountOf(OwnerOf(0)).value_or(99), 0);
}

TEST(RespHostileServer, WhatWasNeverSentIsNotInDoubt) {
  FakeServer server([](const std::string&) { return std::nullopt; });
  const auto tier = OpenResp(Impatient(server, RespCluster::kOff));
  for (const uint64_t bytes : {uint64_t{64}, 2 * kMostPieceBytes}) {
    EXPECT_THAT(Store(tier.get(), {0}, bytes), Each(TierResult::kFailed));
  }
  EXPECT_EQ(tier->CountOf(OwnerOf(0)).value_or(99), 0);
}

}  // namespace
}  // namespace kvpool
