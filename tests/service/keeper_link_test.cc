// A daemon's end of a keeper, and the keeper's of a daemon.
#include "server/keeper/keeper_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/keeper/inventory.h"
#include "server/keeper/keeper_frames.h"
#include "tests/service/recovery_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

class KeeperLinkTest : public testing::Test {
 protected:
  // A descriptor that tells which one it is.
  static UniqueFd Pipe(char word) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    EXPECT_EQ(write(ends[1], &word, 1), 1);
    close(ends[1]);
    return UniqueFd(ends[0]);
  }
  static char WordIn(const UniqueFd& fd) {
    char word = 0;
    EXPECT_EQ(read(fd.get(), &word, 1), 1);
    return word;
  }
};

TEST_F(KeeperLinkTest, WhatWasKeptIsThereInOrderAndWhatWasDroppedIsNot) {
  ServedKeeper keeper;
  {
    auto link = *JoinKeeper(keeper.Connect());
    auto a = link->Keep(KeptKind::kSlab, "a", Pipe('a').get());
    {
      const auto b = link->Keep(KeptKind::kSlab, "b", Pipe('b').get());
      ASSERT_TRUE(b.ok());
    }
    auto c = link->Keep(KeptKind::kMember, std::string(kMaxKeptFacts, 'c'), Pipe('c').get());
    ASSERT_TRUE(a.ok() && c.ok());
    link->Leave();
  }
  auto link = *JoinKeeper(keeper.Connect());
  std::vector<KeptThing> things = link->TakeInherited();
  ASSERT_EQ(things.size(), 2u);
  EXPECT_EQ(things[0].facts, "a");
  EXPECT_EQ(WordIn(things[0].fd), 'a');
  EXPECT_EQ(things[1].kind, KeptKind::kMember);
  EXPECT_EQ(things[1].facts, std::string(kMaxKeptFacts, 'c'));
  EXPECT_EQ(WordIn(things[1].fd), 'c');
  // Ids go on behind those that are taken.
  EXPECT_TRUE(link->Keep(KeptKind::kSlab, "d", Pipe('d').get()).ok());
  things.clear();
  link->Flush();
  link->Leave();
  keeper.Await();
  EXPECT_EQ(keeper.inventory.size(), 1u) << "only the link's own page";
}

// It had waited for too long, and goes on alone: nobody is to take over from it.
TEST_F(KeeperLinkTest, ADaemonThatDoesNotHearTheAnswerHandsNothingOver) {
  Inventory inventory(10);
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd keeper(pair[0]);
  {
    const UniqueFd daemon(pair[1]);
    KeeperFrame frame;
    frame.verb = KeeperVerb::kHandOver;
    ASSERT_TRUE(SendKeeperFrame(daemon.get(), frame, Pipe('p').get()).ok());
  }
  EXPECT_FALSE(inventory.Serve(keeper.get()).ok());
  EXPECT_FALSE(inventory.handing_over());
}

TEST_F(KeeperLinkTest, AKeeperThatIsFullSaysSo) {
  ServedKeeper keeper(2);  // The link has a page of its own.
  auto link = *JoinKeeper(keeper.Connect());
  const auto first = link->Keep(KeptKind::kSlab, "", Pipe('a').get());
  const auto second = link->Keep(KeptKind::kSlab, "", Pipe('b').get());
  EXPECT_TRUE(first.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("RLIMIT_NOFILE"));
  link->Leave();
}

TEST_F(KeeperLinkTest, WhoSpeaksAnotherVersionIsNotServed) {
  ServedKeeper keeper;
  const UniqueFd socket = keeper.Connect();
  KeeperFrame frame;
  frame.version = 7;
  ASSERT_TRUE(SendKeeperFrame(socket.get(), frame).ok());
  keeper.Await();
  EXPECT_EQ(keeper.ended.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(keeper.ended.message()), HasSubstr("version 7"));
  EXPECT_THAT(std::string(keeper.ended.message()), HasSubstr("speaks 2"));
}

TEST_F(KeeperLinkTest, GarbageIsNotServed) {
  ServedKeeper keeper;
  const UniqueFd socket = keeper.Connect();
  ASSERT_EQ(send(socket.get(), "hello", 5, 0), 5);
  keeper.Await();
  EXPECT_EQ(keeper.ended.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(KeeperLinkTest, AKeeperThatIsSilentIsDoneWithout) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd theirs(pair[0]);
  std::unique_ptr<KeeperLink> link;
  {
    Inventory inventory(10);
    std::thread keeper([&] {
      for (int frames = 0; frames < 2; ++frames) EXPECT_TRUE(inventory.Serve(theirs.get()).ok());
    });
    link = *JoinKeeper(UniqueFd(pair[1]), std::chrono::seconds(30));
    keeper.join();
  }
  // That is its patience. Here it has less from now on.
  timeval patience{};
  socklen_t size = sizeof(patience);
  ASSERT_EQ(getsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &patience, &size), 0);
  EXPECT_EQ(patience.tv_sec, 30);
  patience = {.tv_sec = 0, .tv_usec = 50000};
  ASSERT_EQ(setsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
  // Nobody answers, and what is sent stays unread until the socket is full.
  EXPECT_TRUE(link->Keep(KeptKind::kSlab, "", Pipe('a').get()).ok());
  char frame[sizeof(KeeperFrame)];
  ASSERT_EQ(recv(theirs.get(), frame, sizeof(frame), 0), static_cast<ssize_t>(sizeof(frame)));
  EXPECT_EQ(recv(theirs.get(), frame, sizeof(frame), 0), 0) << "the daemon still waits for it";
}

TEST_F(KeeperLinkTest, WithoutItsKeeperADaemonGoesOn) {
  std::unique_ptr<KeeperLink> link;
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  {
    Inventory inventory(10);
    const UniqueFd theirs(pair[0]);
    std::thread keeper([&] {
      for (int frames = 0; frames < 2; ++frames) EXPECT_TRUE(inventory.Serve(theirs.get()).ok());
    });
    link = *JoinKeeper(UniqueFd(pair[1]));
    keeper.join();
  }
  EXPECT_TRUE(link->Keep(KeptKind::kSlab, "", Pipe('a').get()).ok());
  link->Flush();
}

}  // namespace
}  // namespace kvpool
