// What one daemon leaves of its place, and what the next one makes of it, with a keeper in between.
#include "server/place.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "tests/service/recovery_fixture.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

// A daemon as far as its place goes. For the keeper its end is a kill.
struct Tenure {
  explicit Tenure(ServedKeeper* keeper) : link(*KeeperLink::Join(keeper->Connect())), place(link.get()) {
    EXPECT_TRUE(link->Trust("host").ok());
  }
  ~Tenure() { link->Leave(); }
  std::unique_ptr<KeeperLink> link;
  Place place;
};

class PlaceTest : public testing::Test {
 protected:
  ListenOptions Options() const { return {.path = socket_, .type = SOCK_STREAM}; }
  UniqueFd Connect() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, socket_.c_str(), sizeof(address.sun_path) - 1);
    const bool connected = connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    return connected ? std::move(socket) : UniqueFd();
  }
  static bool Accepts(const UniqueFd& listener) {
    return UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)).valid();
  }
  void LeaveListener() {
    Tenure tenure(&keeper_);
    ASSERT_TRUE(tenure.place.Listen(Options()).ok());
    tenure.place.Keep();
  }
  // Whether the next daemon has the earlier one's listener, with whom waits there; whatever it has, it serves.
  bool NextTakesOver(const ListenOptions& options) {
    Tenure tenure(&keeper_);
    const absl::StatusOr<UniqueFd> listener = tenure.place.Listen(options);
    EXPECT_TRUE(listener.ok()) << listener.status();
    const bool waited = Accepts(*listener);
    EXPECT_EQ(tenure.place.inherited(), waited);
    const UniqueFd client = Connect();
    EXPECT_TRUE(client.valid() && Accepts(*listener));
    tenure.place.Keep();
    return waited;
  }

  const TemporaryDirectory directory_;
  const std::string lock_ = directory_.path() + "/lock", socket_ = directory_.path() + "/socket";
  ServedKeeper keeper_;
};

TEST_F(PlaceTest, TheNextDaemonAcceptsWhoConnectedInBetween) {
  LeaveListener();
  const UniqueFd client = Connect();
  ASSERT_TRUE(client.valid());
  EXPECT_TRUE(NextTakesOver(Options()));
  const UniqueFd other = Connect();
  EXPECT_TRUE(NextTakesOver(Options())) << "it is not with the keeper any more";
}

TEST_F(PlaceTest, AListenerWhoseFileIsGoneIsReplaced) {
  LeaveListener();
  const UniqueFd client = Connect();
  unlink(socket_.c_str());
  EXPECT_FALSE(NextTakesOver(Options()));
}

TEST_F(PlaceTest, AListenerWhoseFileIsAnothersIsReplaced) {
  LeaveListener();
  const UniqueFd client = Connect();
  const absl::StatusOr<UniqueFd> others = ListenUnix(Options());
  ASSERT_TRUE(others.ok());
  EXPECT_FALSE(NextTakesOver(Options()));
}

TEST_F(PlaceTest, AListenerThatWasBoundOtherwiseIsReplaced) {
  LeaveListener();
  const UniqueFd client = Connect();
  ListenOptions options = Options();
  options.group = getegid();
  EXPECT_FALSE(NextTakesOver(options));
  const UniqueFd other = Connect();
  EXPECT_TRUE(NextTakesOver(options));
  ASSERT_EQ(chmod(socket_.c_str(), 0600), 0);
  const UniqueFd third = Connect();
  EXPECT_FALSE(NextTakesOver(options)) << "somebody has changed the mode";
}

// One of before would find its locks taken.
TEST_F(PlaceTest, NothingIsKeptOfADaemonThatHasNotServed) {
  {
    Tenure tenure(&keeper_);
    ASSERT_TRUE(tenure.place.Lock(lock_).ok());
    ASSERT_TRUE(tenure.place.Listen(Options()).ok());
  }
  EXPECT_TRUE(FileLock::Take(lock_).ok());
  EXPECT_FALSE(Connect().valid());
}

TEST_F(PlaceTest, WhatWasWithdrawnIsFreeUntilItIsKeptAgain) {
  std::optional<Tenure> tenure(std::in_place, &keeper_);
  ASSERT_TRUE(tenure->place.Listen(Options()).ok());
  tenure->place.Keep();
  tenure->place.Withdraw();
  tenure->place.Keep();
  tenure.reset();
  UniqueFd client = Connect();
  EXPECT_TRUE(NextTakesOver(Options()));
  tenure.emplace(&keeper_);
  ASSERT_TRUE(tenure->place.Listen(Options()).ok());
  tenure->place.Keep();
  tenure->place.Withdraw();
  tenure->link->Flush();
  tenure.reset();
  keeper_.Await();
  EXPECT_FALSE(Connect().valid());
}

TEST_F(PlaceTest, ALockIsTheKeepersUntilTheNextDaemonHasIt) {
  struct stat locked, there;
  {
    Tenure tenure(&keeper_);
    ASSERT_TRUE(tenure.place.Lock(lock_).ok());
    tenure.place.Keep();
    ASSERT_EQ(stat(lock_.c_str(), &locked), 0);
    // Its end removes the file, which that of a process that is killed does not.
    ASSERT_EQ(link(lock_.c_str(), (lock_ + "ed").c_str()), 0);
  }
  ASSERT_EQ(rename((lock_ + "ed").c_str(), lock_.c_str()), 0);
  EXPECT_TRUE(absl::IsAlreadyExists(FileLock::Take(lock_).status()));
  {
    Tenure fails(&keeper_);
    ASSERT_TRUE(fails.place.Lock(lock_).ok());
    EXPECT_TRUE(fails.place.inherited());
  }
  ASSERT_EQ(stat(lock_.c_str(), &there), 0) << "the daemon after it has no file to find its lock by";
  EXPECT_EQ(there.st_ino, locked.st_ino);
  EXPECT_TRUE(absl::IsAlreadyExists(FileLock::Take(lock_).status()));
  {
    Tenure serves(&keeper_);
    ASSERT_TRUE(serves.place.Lock(lock_).ok());
    serves.place.Keep();
    serves.place.Close();
  }
  keeper_.Await();
  EXPECT_FALSE(std::filesystem::exists(lock_));
  EXPECT_TRUE(FileLock::Take(lock_).ok());
}

TEST_F(PlaceTest, ALockWhoseFileIsGoneIsTakenAnew) {
  {
    Tenure tenure(&keeper_);
    ASSERT_TRUE(tenure.place.Lock(lock_).ok());
    tenure.place.Keep();
  }
  ASSERT_FALSE(std::filesystem::exists(lock_));
  Tenure next(&keeper_);
  ASSERT_TRUE(next.place.Lock(lock_).ok());
  EXPECT_FALSE(next.place.inherited());
  EXPECT_TRUE(absl::IsAlreadyExists(FileLock::Take(lock_).status()));
}

TEST_F(PlaceTest, TheEpochGrowsWhateverTheClockSays) {
  {
    Tenure tenure(&keeper_);
    EXPECT_EQ(tenure.place.NextEpoch(1000), 1000u);
    ASSERT_TRUE(tenure.place.KeepEpoch().ok());
  }
  {
    Tenure tenure(&keeper_);
    EXPECT_EQ(tenure.place.NextEpoch(17), 1001u);
  }
  {
    Tenure tenure(&keeper_);
    EXPECT_EQ(tenure.place.NextEpoch(5000), 5000u) << "a start that fails has had one too";
  }
  Tenure tenure(&keeper_);
  EXPECT_EQ(tenure.place.NextEpoch(17), 5001u);
}

}  // namespace
}  // namespace kvpool
