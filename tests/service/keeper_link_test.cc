// A daemon's end of a keeper, and the keeper's of a daemon.
#include "server/keeper/keeper_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/base/sockets.h"
#include "server/keeper/inventory.h"
#include "server/keeper/keeper_frames.h"
#include "tests/service/recovery_fixture.h"
#include "tests/support/daemon_process.h"

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
    link = *JoinKeeper(UniqueFd(pair[1]), {.patience = std::chrono::seconds(30)});
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

// ---------------------------------------------------------------------------------------- another keeper

// An inventory that is served at a path, to one daemon.
class ListeningKeeper {
 public:
  // After so many frames it does `then`, with the daemon waiting for an answer, and hangs up.
  explicit ListeningKeeper(const std::string& path, size_t frames = SIZE_MAX, std::function<void()> then = {})
      : listener_(*ListenUnix({.path = path, .type = SOCK_SEQPACKET, .group = {}, .own = true})),
        thread_([this, frames, then] {
          pollfd waiting{listener_.get(), POLLIN, 0};
          poll(&waiting, 1, 60'000);
          const UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
          while (served < frames && keeper.inventory.Serve(socket.get()).ok()) ++served;
          if (then) then();
        }) {}
  ~ListeningKeeper() { Await(); }
  // Waits until the daemon has hung up.
  void Await() {
    if (thread_.joinable()) thread_.join();
  }

  ServedKeeper keeper;  // The next daemon connects to it.
  size_t served = 0;

 private:
  const UniqueFd listener_;
  std::thread thread_;
};

std::string FactsOf(const std::vector<KeptThing>& things) {
  std::string facts;
  for (const KeptThing& thing : things) facts += thing.facts;
  return facts;
}

class AnotherKeeperTest : public KeeperLinkTest {
 protected:
  // What a daemon with this keeper takes over.
  static std::string Inherited(ServedKeeper* keeper) {
    const auto link = *JoinKeeper(keeper->Connect());
    const std::string facts = FactsOf(link->TakeInherited());
    link->Leave();
    return facts;
  }
  // One who has kept "a" and "c", and a lock, and has lost its keeper.
  void Lose() {
    link_ = *JoinKeeper(first_.Connect(), {.another = path_});
    kept_.push_back(*link_->Keep(KeptKind::kSlab, "a", Pipe('a').get()));
    Kept b = *link_->Keep(KeptKind::kSlab, "b", Pipe('b').get());
    kept_.push_back(*link_->Keep(KeptKind::kLock, "", Pipe('l').get()));
    first_.Cut();
    kept_.push_back(*link_->Keep(KeptKind::kSlab, "c", Pipe('c').get()));
    EXPECT_TRUE(link_->lost());
  }
  void TearDown() override {
    if (link_ != nullptr) link_->Leave();
    kept_.clear();
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path() + "/keeper.sock";
  ServedKeeper first_;
  std::unique_ptr<KeeperLink> link_;
  std::vector<Kept> kept_;
};

TEST_F(AnotherKeeperTest, GetsWhatIsThereAndTheFirstOneKeepsNothingThatCounts) {
  Lose();
  ListeningKeeper second(path_);
  link_->LookForAnother();
  EXPECT_FALSE(link_->lost());
  const Kept d = *link_->Keep(KeptKind::kSlab, "d", Pipe('d').get());
  kept_.erase(kept_.begin());
  link_->Flush();
  link_->Leave();
  second.Await();
  {
    auto next = *KeeperLink::Join(second.keeper.Connect());
    EXPECT_EQ(next->TakePlace().size(), 1u);
    ASSERT_TRUE(next->Trust("host").ok());
    std::vector<KeptThing> things = next->TakeInherited();
    EXPECT_EQ(FactsOf(things), "cd");
    EXPECT_EQ(WordIn(things[0].fd), 'c');
    next->Leave();
  }
  // It was only slow, and has a daemon of its own.
  auto rival = *KeeperLink::Join(first_.Connect());
  EXPECT_TRUE(rival->TakePlace().empty()) << "its lock is the other's";
  ASSERT_TRUE(rival->Trust("host").ok());
  EXPECT_TRUE(rival->TakeInherited().empty());
  rival->Leave();
}

// Wherever the daemon is killed while it gives, and wherever the keeper is: the next one has everything or nothing.
TEST_F(AnotherKeeperTest, NothingIsTakenOfWhatWasNotGivenWhole) {
  constexpr size_t kAll = 5;  // Hello, the page, two slabs and the lock.
  for (size_t frames = 0; frames <= kAll; ++frames) {
    Lose();
    std::string seen;
    ListeningKeeper second(path_, frames, [&] { seen = Inherited(&second.keeper); });
    link_->LookForAnother();
    EXPECT_EQ(link_->lost(), frames < kAll) << frames;
    TearDown();
    second.Await();
    if (frames < kAll) {
      EXPECT_EQ(seen, "") << "a daemon that was killed after " << frames << " frames";
      EXPECT_EQ(Inherited(&second.keeper), "") << "one whose keeper hung up after " << frames << " frames";
    }
  }
}

TEST_F(AnotherKeeperTest, WhatItHadBeforeIsDropped) {
  Lose();
  ListeningKeeper second(path_);
  {
    const auto before = *JoinKeeper(second.keeper.Connect());
    before->Keep(KeptKind::kSlab, "old", Pipe('o').get())->Forget();
    before->Leave();
    second.keeper.Await();
  }
  link_->LookForAnother();
  EXPECT_FALSE(link_->lost());
  link_->Leave();
  second.Await();
  EXPECT_EQ(Inherited(&second.keeper), "ac");
}

TEST_F(AnotherKeeperTest, IsTrustedWithNothingByADaemonThatDeclined) {
  Lose();
  link_->Decline();
  ListeningKeeper second(path_);
  link_->LookForAnother();
  EXPECT_TRUE(link_->lost());
  link_->Leave();
  second.Await();
  EXPECT_EQ(Inherited(&second.keeper), "");
}

TEST_F(AnotherKeeperTest, OneThatComesAfterTheDaemonGetsWhatWasThereFromTheStart) {
  link_ = KeeperLink::Alone({.another = path_});
  ASSERT_TRUE(link_->Trust("host").ok());
  kept_.push_back(*link_->Keep(KeptKind::kSlab, "a", Pipe('a').get()));
  EXPECT_TRUE(link_->lost());
  ListeningKeeper second(path_);
  link_->LookForAnother();
  EXPECT_FALSE(link_->lost());
  link_->Leave();
  second.Await();
  EXPECT_EQ(Inherited(&second.keeper), "a");
}

}  // namespace
}  // namespace kvpool
