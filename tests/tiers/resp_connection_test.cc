// A connection reads values to where they are wanted, however their bytes come.
#include "server/tiers/resp_connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/unique_fd.h"
#include "server/tiers/crc32c.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using testing::ElementsAre;

constexpr uint64_t kKept = 32;

// A connection whose other end is the test.
class RespConnectionTest : public testing::Test {
 protected:
  void SetUp() override {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    ASSERT_EQ(listen(listener.get(), 1), 0);
    ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    connection_ = std::make_unique<RespConnection>(
        &loop_, &settings_, RespEndpoint{.host = "127.0.0.1", .port = ntohs(address.sin_port)}, 0,
        [](RespRequest request, const RespReply* reply) { request.done(reply); });
    node_.Reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const int on = 1;
    ASSERT_EQ(setsockopt(node_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), 0);
    Say("+PONG\r\n");
    TurnUntil([&] { return connection_->ready(); });
  }

  void Turn() { loop_.Wait(std::chrono::steady_clock::now() + std::chrono::seconds(10)); }
  void TurnUntil(const std::function<bool()>& holds) {
    const auto end = std::chrono::steady_clock::now() + kTestLimit;
    while (!holds() && std::chrono::steady_clock::now() < end) Turn();
    ASSERT_TRUE(holds()) << connection_->why();
  }
  void Say(std::string_view bytes) {
    ASSERT_EQ(send(node_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }

  // A request for a value; what came of it goes to `replies_`.
  struct Wanted {
    std::string into;
    bool over = false;
  };
  std::shared_ptr<Wanted> Ask(uint64_t bytes) {
    auto wanted = std::make_shared<Wanted>();
    wanted->into.assign(bytes, '.');
    RespRequest request{.head = "GET", .limits = {.bytes = 1 << 20}};
    request.over = std::shared_ptr<const bool>(wanted, &wanted->over);
    request.into = wanted->into.data();
    request.into_bytes = bytes;
    request.kept = kKept;
    request.done = [this, wanted](const RespReply* reply) {
      // Short ones are in the reply, as they were before.
      std::string value = wanted->into;
      if (wanted->over) {
        value = "over";
      } else if (reply->kind != RespReply::Kind::kBytes) {
        value = "none";
      } else if (reply->rest_bytes == 0) {
        value = reply->text.substr(kKept);
      } else {
        EXPECT_EQ(reply->rest_bytes, value.size());
        EXPECT_EQ(reply->rest_crc, Crc32c(value.data(), value.size()));
        ++placed_;
      }
      kept_.emplace_back(reply->text.substr(0, kKept));
      values_.push_back(std::move(value));
    };
    connection_->Send(std::move(request));
    connection_->Flush();
    return wanted;
  }

  RespLoop loop_;
  RespSettings settings_;
  std::unique_ptr<RespConnection> connection_;
  UniqueFd node_;
  std::vector<std::string> kept_, values_;
  int placed_ = 0;
};

std::string BytesOf(uint32_t number, uint64_t bytes) {
  return std::string(ValueOf(number, bytes)->data(), bytes);
}
std::string ReplyWith(std::string_view head, const std::string& value) {
  return absl::StrCat("$", head.size() + value.size(), "\r\n", std::string(head), value, "\r\n");
}

const std::string kHead = "0123456789abcdef0123456789abcdef";

TEST_F(RespConnectionTest, HoweverTheBytesAreCut) {
  constexpr uint64_t kBytes = 70'000;
  const std::string large = BytesOf(1, kBytes), small = BytesOf(2, 10);
  const std::string replies =
      ReplyWith(kHead, large) + ReplyWith(kHead, small) + "$-1\r\n" + ReplyWith(kHead, large) + "-ERR x\r\n";
  // The line, the kept bytes and the end of a value are cut at each of their bytes, what is between at some.
  for (const size_t cut : {1,     7,     8,     9,     10,    39,    40,    41,    42,    1000,   32768,
                           40000, 69999, 70000, 70039, 70040, 70041, 70042, 70043, 70044, 1000000}) {
    SCOPED_TRACE(cut);
    kept_.clear();
    values_.clear();
    for (const uint64_t bytes : {kBytes, uint64_t{10}, kBytes, kBytes, kBytes}) Ask(bytes);
    const size_t parts = cut < 7 ? 50 : replies.size();
    for (size_t at = 0, part = 0; at < replies.size(); ++part) {
      const size_t some = part < parts ? cut : replies.size();
      Say(std::string_view(replies).substr(at, some));
      at += some;
      Turn();
    }
    TurnUntil([&] { return values_.size() == 5; });
    ASSERT_THAT(values_, ElementsAre(large, small, "none", large, "none"));
    EXPECT_THAT(kept_[0] + kept_[1] + kept_[3], kHead + kHead + kHead);
  }
  EXPECT_GT(placed_, 20);
}

TEST_F(RespConnectionTest, NothingIsWrittenOnceItIsOver) {
  constexpr uint64_t kBytes = 300'000;
  const std::string value = BytesOf(1, kBytes), reply = ReplyWith(kHead, value);
  const auto first = Ask(kBytes), second = Ask(kBytes);
  Say(std::string_view(reply).substr(0, 100'000));
  Turn();
  first->over = true;
  // It is another's now.
  std::fill(first->into.begin(), first->into.end(), '!');
  Say(std::string_view(reply).substr(100'000));
  Say(reply);
  TurnUntil([&] { return values_.size() == 2; });
  EXPECT_EQ(first->into, std::string(kBytes, '!'));
  EXPECT_THAT(values_, ElementsAre("over", value));
}

TEST_F(RespConnectionTest, AStringOfAnotherLengthIsNotPlaced) {
  for (const uint64_t bytes : {99'999, 100'001, 1, 0}) {
    const std::string reply = ReplyWith(kHead, BytesOf(1, bytes));
    const auto wanted = Ask(100'000);
    for (size_t at = 0; at < reply.size(); at += 50'000) {
      Say(std::string_view(reply).substr(at, 50'000));
      Turn();
    }
    TurnUntil([&] { return !values_.empty(); });
    EXPECT_EQ(values_[0], BytesOf(1, bytes));
    EXPECT_EQ(wanted->into, std::string(100'000, '.'));
    values_.clear();
  }
  EXPECT_EQ(placed_, 0);
}

TEST_F(RespConnectionTest, ALengthThatIsWrittenInAnotherWayIsOne) {
  const std::string value = BytesOf(1, 100'000);
  Ask(100'000);
  Say(absl::StrCat("$000100032\r\n", kHead, value.substr(0, 40'000)));
  Turn();
  Say(value.substr(40'000) + "\r\n");
  TurnUntil([&] { return !values_.empty(); });
  EXPECT_EQ(values_[0], value);
  EXPECT_EQ(placed_, 1);
}

TEST_F(RespConnectionTest, APlacedStringThatDoesNotEndClosesIt) {
  Ask(100'000);
  Say(absl::StrCat("$100032\r\n", kHead, std::string(40'000, 'x')));
  Turn();
  Say(std::string(60'000, 'x') + "x\n");
  TurnUntil([&] { return !connection_->ready(); });
  EXPECT_EQ(connection_->why(), "it replies with what is no reply");
  EXPECT_TRUE(values_.empty());
  EXPECT_EQ(connection_->TakeLost().size(), 1);
}

}  // namespace
}  // namespace kvpool
