// The end of a connection whose peer has its answer.
#include "server/metrics/http_connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <optional>
#include <string>

#include "proto/support/unique_fd.h"

namespace kvpool {
namespace {

using Next = HttpConnection::Next;

class LateBytesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    peer_.Reset(ends[0]);
    connection_.emplace(UniqueFd(ends[1]), "peer");
    Say("GET / HTTP/1.1\r\n\r\n");
    ASSERT_EQ(connection_->Advance(), Next::kAnswer);
    connection_->Answer("answer");
  }
  void Say(const std::string& words) const {
    ASSERT_EQ(send(peer_.get(), words.data(), words.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(words.size()));
  }

  UniqueFd peer_;
  std::optional<HttpConnection> connection_;
};

// To close while bytes are on their way would take the answer back.
TEST_F(LateBytesTest, ItGoesOnUntilThePeerHasHungUp) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(connection_->Advance(), Next::kReadable);
    EXPECT_TRUE(connection_->answered());
    ASSERT_NO_FATAL_FAILURE(Say("more"));
  }
  EXPECT_EQ(connection_->Advance(), Next::kReadable);
  peer_.Reset();
  EXPECT_EQ(connection_->Advance(), Next::kOver);
  EXPECT_TRUE(connection_->fault().ok());
}

TEST_F(LateBytesTest, APeerThatGoesOnSayingMoreIsLeft) {
  const std::string words(HttpConnection::kMostLateBytes / 16, 'm');
  for (int i = 0; i < 15; ++i) {
    ASSERT_NO_FATAL_FAILURE(Say(words));
    ASSERT_EQ(connection_->Advance(), Next::kReadable) << i;
  }
  ASSERT_NO_FATAL_FAILURE(Say(words));
  EXPECT_EQ(connection_->Advance(), Next::kOver);
}

}  // namespace
}  // namespace kvpool
