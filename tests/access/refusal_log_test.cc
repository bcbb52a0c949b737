// Which refusals have a line of the log.
#include "server/access/refusal_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "tests/support/fake_clock.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class RefusalLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe(pipe_), 0);
    SetLog({.fd = pipe_[1]});
  }
  void TearDown() override {
    SetLog({});
    close(pipe_[0]);
    close(pipe_[1]);
  }
  static Peer User(uint32_t uid) {
    return {.process = std::make_shared<PeerCredentials>(PeerCredentials{.pid = 17, .uid = uid, .gid = 1}),
            .address = "",
            .names = {},
            .certificate = {}};
  }
  // The line that this refusal has; empty: none.
  std::string Refuse(const Peer& peer, const absl::Status& status = absl::PermissionDeniedError("no")) {
    refusals_.Add(peer, "OpenSession", status);
    // A line that ends what was written: to read from an empty pipe would wait.
    LogError("end");
    char text[4096];
    const ssize_t got = read(pipe_[0], text, sizeof text);
    const std::string lines(text, got < 0 ? 0 : static_cast<size_t>(got));
    return lines.find('\n') == lines.size() - 1 ? "" : lines;
  }
  int pipe_[2];
  FakeClock clock_;
  RefusalLog refusals_{"opening refused", &clock_};
};

TEST_F(RefusalLogTest, OneUsersRefusalsHideNobodyElses) {
  for (uint32_t i = 0; i < RefusalLog::kMostLines; ++i)
    EXPECT_THAT(Refuse(User(1)), HasSubstr("opening refused"));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Refuse(User(1)), "");
  EXPECT_THAT(Refuse(User(2)), HasSubstr("uid=2 "));
  EXPECT_THAT(Refuse(User(2)), Not(HasSubstr("left_out")));
  EXPECT_THAT(Refuse({.process = nullptr, .address = "ipv4:10.0.0.1:5", .names = {}, .certificate = {}}),
              HasSubstr("10.0.0.1"));
  // Nor do those for one reason hide those for another.
  EXPECT_THAT(Refuse(User(1), absl::InvalidArgumentError("odd")), HasSubstr("odd"));
  clock_.Advance(RefusalLog::kWindowMs);
  EXPECT_THAT(Refuse(User(1)), HasSubstr("left_out=100"));
  EXPECT_THAT(Refuse(User(1)), Not(HasSubstr("left_out")));
}

TEST_F(RefusalLogTest, UsersBeyondTheBoundShare) {
  constexpr uint32_t kUsers = RefusalLog::kMostUsers;
  for (uint32_t uid = 0; uid < kUsers; ++uid) EXPECT_NE(Refuse(User(uid)), "") << uid;
  uint32_t logged = 0;
  for (uint32_t uid = kUsers; uid < kUsers + 20; ++uid) logged += Refuse(User(uid)) != "";
  EXPECT_EQ(logged, RefusalLog::kMostLines);
  EXPECT_NE(Refuse(User(0)), "") << "it has a budget of its own";
  // Who has been quiet for a window makes room. What was left out is not forgotten with them.
  for (uint32_t i = 0; i < RefusalLog::kMostLines; ++i) Refuse(User(3));
  clock_.Advance(RefusalLog::kWindowMs);
  EXPECT_NE(Refuse(User(kUsers)), "");
  EXPECT_THAT(Refuse({.process = nullptr, .address = "ipv4:10.0.0.1:5", .names = {}, .certificate = {}}),
              HasSubstr("left_out=16"));
}

}  // namespace
}  // namespace kvpool
