// Connections to the gRPC socket that gRPC never has: each is closed, and counted by why.
#include "server/rpc/stream_acceptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/step_frames.h"
#include "server/base/log.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

class StreamAcceptorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // What is written stays in the file of the log.
    log_.Reset(memfd_create("log", MFD_CLOEXEC));
    SetLog({.fd = log_.get()});
  }
  void TearDown() override {
    acceptor_.reset();
    SetLog({});
  }
  void Start(StreamAcceptorOptions options, Connections::Limits limits = {}) {
    options.path = path_ = absl::StrCat(directory_.path(), "/socket");
    if (options.fd_ceiling == 0) options.fd_ceiling = 4000;
    connections_ = std::make_unique<Connections>(limits);
    // Whoever is let in is told so, and where.
    const auto tells = [this](const char* where) {
      return [this, where](UniqueFd socket, const std::shared_ptr<const PeerCredentials>& peer) {
        EXPECT_EQ(peer->pid, getpid());
        EXPECT_EQ(send(socket.get(), where, 1, MSG_NOSIGNAL), 1);
        let_in_.push_back(std::move(socket));
      };
    };
    auto acceptor = StreamAcceptor::Start(options, connections_.get(), &stats_, tells("g"), tells("f"));
    ASSERT_TRUE(acceptor.ok()) << acceptor.status();
    acceptor_ = *std::move(acceptor);
  }
  UniqueFd Connect() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    UniqueFd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return client;
  }
  static void Say(const UniqueFd& client, const std::string& words) {
    EXPECT_EQ(send(client.get(), words.data(), words.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(words.size()));
  }
  // Waits for what becomes of it: 'g' is gRPC's, 'f' that of Step frames, 0 neither.
  static char IsLetIn(const UniqueFd& client) {
    char byte = 0;
    return recv(client.get(), &byte, 1, 0) == 1 ? byte : '\0';
  }
  // {reason: how many} of those that occurred.
  std::map<std::string, uint64_t> Refused() const {
    std::map<std::string, uint64_t> refused = stats_.Snapshot().refused_connections;
    EXPECT_EQ(refused.size(), 6u) << "each has a series from the start";
    std::erase_if(refused, [](const auto& entry) { return entry.second == 0; });
    return refused;
  }
  std::string Log() const {
    std::string text(1 << 16, '\0');
    const ssize_t got = pread(log_.get(), text.data(), text.size(), 0);
    text.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return text;
  }

  using Counts = std::map<std::string, uint64_t>;
  TemporaryDirectory directory_;
  UniqueFd log_;
  std::string path_;
  RpcStats stats_;
  std::unique_ptr<Connections> connections_;
  std::vector<UniqueFd> let_in_;
  std::unique_ptr<StreamAcceptor> acceptor_;
};

TEST_F(StreamAcceptorTest, WhoSpeaksIsLetInAndWhoHangsUpIsNotRefused) {
  Start({});
  const UniqueFd client = Connect(), framer = Connect();
  Connect();
  Say(client, kPreface);
  EXPECT_EQ(IsLetIn(client), 'g');
  Say(framer, std::string(kStepPreface) + "and more");
  EXPECT_EQ(IsLetIn(framer), 'f');
  EXPECT_EQ(Refused(), Counts());
  EXPECT_EQ(Log(), "");
}

// Closing it may take as long as the peer likes, on the thread that reads.
TEST_F(StreamAcceptorTest, NobodySendsADescriptor) {
  Start({});
  int knows = 0;
  socklen_t size = sizeof(knows);
  const UniqueFd client = Connect();
  constexpr int kSoPassRights = 83;
  if (getsockopt(client.get(), SOL_SOCKET, kSoPassRights, &knows, &size) != 0) {
    GTEST_SKIP() << "this kernel can't refuse descriptors (Linux 6.16 can)";
  }
  iovec bytes = {.iov_base = const_cast<char*>(kStepPreface.data()), .iov_len = kStepPreface.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int sent = client.get();
  memcpy(CMSG_DATA(rights), &sent, sizeof(sent));
  EXPECT_EQ(sendmsg(client.get(), &message, MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST_F(StreamAcceptorTest, OtherBytesThanThePreface) {
  Start({});
  const UniqueFd client = Connect();
  Say(client, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_FALSE(IsLetIn(client));
  EXPECT_EQ(Refused(), (Counts{{"protocol", 1}}));
  EXPECT_THAT(Log(),
              ::testing::HasSubstr(absl::StrCat(
                  "gRPC connection refused category=audit method=connect uid=", getuid(), " pid=", getpid(),
                  " code=INVALID_ARGUMENT error=\"the first bytes are neither the preface of HTTP/2 nor of "
                  "Step frames\"")));
}

TEST_F(StreamAcceptorTest, SilenceThatIsTooLong) {
  Start({.path = "", .group = {}, .preface_timeout_ms = 1});
  EXPECT_FALSE(IsLetIn(Connect()));
  EXPECT_EQ(Refused(), (Counts{{"preface_timeout", 1}}));
  EXPECT_THAT(Log(), ::testing::HasSubstr("no preface within 1 ms"));
}

TEST_F(StreamAcceptorTest, SilentOnesAreDisplacedByOthersAndTheLogHasABound) {
  Start({.path = "", .group = {}, .preface_timeout_ms = 3600000, .max_silent = 1});
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 101; ++i) {
    clients.push_back(Connect());
    if (i > 0) {
      EXPECT_FALSE(IsLetIn(clients[i - 1])) << i;
    }
  }
  Say(clients.back(), kPreface);
  EXPECT_TRUE(IsLetIn(clients.back()));
  EXPECT_EQ(Refused(), (Counts{{"displaced", 100}}));
  const std::string log = Log();
  EXPECT_LT(std::count(log.begin(), log.end(), '\n'), 50) << log;
}

TEST_F(StreamAcceptorTest, TooManyConnectionsAndTooFewDescriptors) {
  Start({}, {.all = 2, .of_uid = 1});
  const UniqueFd first = Connect(), second = Connect();
  Say(first, kPreface);
  EXPECT_TRUE(IsLetIn(first));
  Say(second, kPreface);
  EXPECT_FALSE(IsLetIn(second));
  EXPECT_EQ(Refused(), (Counts{{"connections", 1}}));
  EXPECT_THAT(Log(), ::testing::HasSubstr("connections of one user: 1"));
  acceptor_.reset();
  Start({.path = "", .group = {}, .fd_ceiling = 1});
  EXPECT_FALSE(IsLetIn(Connect()));
  EXPECT_EQ(Refused(), (Counts{{"connections", 1}, {"open_files", 1}}));
  EXPECT_THAT(Log(), ::testing::HasSubstr("the daemon has 1 open files, its limit for connections"));
}

}  // namespace
}  // namespace kvpool
