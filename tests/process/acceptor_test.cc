// Connections at the limit of open files.
#include "server/base/acceptor.h"

#include <arpa/inet.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include <string>
#include <vector>

namespace kvpool {
namespace {

class AcceptorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files_), 0);
    epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
    listener_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address_);
    ASSERT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address_), size), 0);
    ASSERT_EQ(listen(listener_.get(), 8), 0);
    ASSERT_EQ(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address_), &size), 0);
    ASSERT_TRUE(acceptor_.Begin(epoll_.get(), listener_.get(), kKey, "test").ok());
  }
  void TearDown() override { AllowAll(); }

  UniqueFd Connect() const {
    UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)), 0);
    return client;
  }
  // Whether the epoll set says at this moment that there is something to accept.
  bool Reported() const {
    epoll_event event{};
    const int count = epoll_wait(epoll_.get(), &event, 1, 0);
    return count == 1 && event.data.u64 == kKey && event.events == EPOLLIN;
  }
  // No descriptor can be opened, whichever is closed before.
  void AllowNone() const {
    const rlimit none = {.rlim_cur = 0, .rlim_max = files_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  void AllowAll() const { ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files_), 0); }
  // Opens files until there is no descriptor.
  static std::vector<UniqueFd> TakeAll() {
    std::vector<UniqueFd> taken;
    do {
      taken.emplace_back(dup(0));
    } while (taken.back().valid());
    EXPECT_EQ(errno, EMFILE);
    taken.pop_back();
    return taken;
  }

  static constexpr uint64_t kKey = 77, kNow = 1'000'000;
  rlimit files_{};
  UniqueFd epoll_, listener_;
  sockaddr_in address_{};
  Acceptor acceptor_;
};

TEST_F(AcceptorTest, AnswersConnectionsAndThenNone) {
  EXPECT_FALSE(Reported());
  const UniqueFd one = Connect(), other = Connect();
  EXPECT_TRUE(Reported());
  for (const UniqueFd* const client : {&one, &other}) {
    const Acceptor::Arrival arrival = acceptor_.Accept(kNow);
    ASSERT_EQ(arrival.kind, Acceptor::Kind::kConnection);
    sockaddr_in own{};
    socklen_t size = sizeof(own);
    ASSERT_EQ(getsockname(client->get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    EXPECT_EQ(reinterpret_cast<const sockaddr_in&>(arrival.address).sin_port, own.sin_port);
    char byte;
    EXPECT_EQ(recv(arrival.socket.get(), &byte, 1, 0), -1);
    EXPECT_EQ(errno, EAGAIN);
  }
  EXPECT_EQ(acceptor_.Accept(kNow).kind, Acceptor::Kind::kNone);
  EXPECT_EQ(acceptor_.resume_ms(), UINT64_MAX);
}

TEST_F(AcceptorTest, WithoutFilesEachIsGivenOutToBeRefused) {
  const UniqueFd clients[] = {Connect(), Connect()};
  const rlimit few = {.rlim_cur = static_cast<rlim_t>(clients[1].get()) + 1, .rlim_max = files_.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const std::vector<UniqueFd> taken = TakeAll();
  for (int i = 0; i < 2; ++i) {
    const Acceptor::Arrival arrival = acceptor_.Accept(kNow);
    EXPECT_EQ(arrival.kind, Acceptor::Kind::kWithoutFiles);
    EXPECT_TRUE(arrival.socket.valid());
  }
  EXPECT_EQ(acceptor_.Accept(kNow).kind, Acceptor::Kind::kNone);
  EXPECT_EQ(acceptor_.resume_ms(), UINT64_MAX);
}

// Otherwise the thread that waits for the epoll set would go in circles.
TEST_F(AcceptorTest, WhereNothingCanBeAcceptedTheSetIsSilentForAWhileAndNobodyIsLost) {
  const UniqueFd one = Connect(), other = Connect();
  AllowNone();
  for (uint64_t now = kNow; now < kNow + 3 * Acceptor::kPauseMs; now += Acceptor::kPauseMs) {
    ASSERT_TRUE(Reported());
    EXPECT_EQ(acceptor_.Accept(now).kind, Acceptor::Kind::kNone);
    EXPECT_FALSE(Reported());
    EXPECT_EQ(acceptor_.resume_ms(), now + Acceptor::kPauseMs);
    acceptor_.Resume(now + Acceptor::kPauseMs - 1);
    EXPECT_FALSE(Reported());
    acceptor_.Resume(now + Acceptor::kPauseMs);
    EXPECT_EQ(acceptor_.resume_ms(), UINT64_MAX);
  }
  AllowAll();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(acceptor_.Accept(kNow).kind, Acceptor::Kind::kConnection);
  EXPECT_FALSE(Reported());
}

// The one that another had taken is kept again, once there is one.
TEST_F(AcceptorTest, ADescriptorIsKeptAgain) {
  const UniqueFd one = Connect();
  AllowNone();
  EXPECT_EQ(acceptor_.Accept(kNow).kind, Acceptor::Kind::kNone);
  AllowAll();
  EXPECT_EQ(acceptor_.Accept(kNow).kind, Acceptor::Kind::kConnection);
  const UniqueFd other = Connect();
  const rlimit few = {.rlim_cur = static_cast<rlim_t>(other.get()) + 1, .rlim_max = files_.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const std::vector<UniqueFd> taken = TakeAll();
  EXPECT_EQ(acceptor_.Accept(kNow).kind, Acceptor::Kind::kWithoutFiles);
}

}  // namespace
}  // namespace kvpool
