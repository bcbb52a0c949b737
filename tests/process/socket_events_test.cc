// Events of sockets and alarms on one thread, which is this one.
#include "server/rpc/socket_events.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace kvpool {
namespace {

class Tag final : public RpcTag {
 public:
  Tag(std::string* said, char name) : said_(*said), name_(name) {}
  void Run(bool ok) override { (said_ += name_) += ok ? "+" : "-"; }

 private:
  std::string& said_;
  const char name_;
};

// Both ends of a connection, of which one is watched.
class Watched final : public SocketOwner {
 public:
  explicit Watched(SocketEvents* events) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    here_.Reset(ends[0]);
    there_.Reset(ends[1]);
    EXPECT_TRUE(events->Watch(here_.get(), this).ok());
  }
  void OnSocket(uint32_t events) override { heard_.push_back(events); }
  void Speak() const { EXPECT_EQ(send(there_.get(), "x", 1, 0), 1); }
  void HangUp() { there_.Reset(); }
  int here() const { return here_.get(); }
  int there() const { return there_.get(); }
  const std::vector<uint32_t>& heard() const { return heard_; }

 private:
  UniqueFd here_, there_;
  std::vector<uint32_t> heard_;
};

class SocketEventsTest : public testing::Test {
 protected:
  // Runs what has come.
  void RunAll() {
    RpcEvents::Event event;
    while (events_->Look(&event)) event.tag->Run(event.ok);
  }

  std::unique_ptr<SocketEvents> events_ = *SocketEvents::Make();
  std::string said_;
  Tag a_{&said_, 'a'}, b_{&said_, 'b'}, c_{&said_, 'c'};
};

TEST_F(SocketEventsTest, TagsComeBackInOrderFromAnyThread) {
  events_->Return(&a_, false);
  std::thread([&] { events_->Post(&b_); }).join();
  const auto alarm = events_->MakeAlarm();
  alarm->Set(&c_);
  RunAll();
  EXPECT_EQ(said_, "a-b+c+");
}

TEST_F(SocketEventsTest, WhoWaitsIsWoken) {
  for (int i = 0; i < 100; ++i) {
    std::thread other([&] { events_->Post(&a_); });
    RpcEvents::Event event;
    ASSERT_TRUE(events_->Wait(&event));
    EXPECT_EQ(event.tag, &a_);
    other.join();
  }
  std::thread shuts([&] { events_->Shut(); });
  RpcEvents::Event event;
  EXPECT_FALSE(events_->Wait(&event));
  shuts.join();
}

TEST_F(SocketEventsTest, WhatIsThereComesBeforeTheEnd) {
  events_->Post(&a_);
  events_->Shut();
  RpcEvents::Event event;
  ASSERT_TRUE(events_->Wait(&event));
  EXPECT_EQ(event.tag, &a_);
  EXPECT_FALSE(events_->Wait(&event));
}

TEST_F(SocketEventsTest, AlarmsComeWhenTheyAreDueOrCancelled) {
  const auto soon = events_->MakeAlarm(), late = events_->MakeAlarm(), never = events_->MakeAlarm();
  late->SetAfter(std::chrono::hours(1), &b_);
  never->SetAfter(std::chrono::hours(2), &c_);
  soon->SetAfter(std::chrono::milliseconds(2), &a_);
  RpcEvents::Event event;
  ASSERT_TRUE(events_->Wait(&event));
  event.tag->Run(event.ok);
  late->Cancel();
  RunAll();
  EXPECT_EQ(said_, "a+b-");
}

TEST_F(SocketEventsTest, AnAlarmThatWasDueComesOnceThoughItIsCancelled) {
  const auto alarm = events_->MakeAlarm();
  alarm->SetAfter(std::chrono::milliseconds(1), &a_);
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  // While others come back it is found to be due, and waits behind them.
  for (int i = 0; i < 10; ++i) events_->Return(&b_, true);
  RpcEvents::Event event;
  for (int i = 0; i < 9; ++i) {
    ASSERT_TRUE(events_->Look(&event));
    ASSERT_EQ(event.tag, &b_);
  }
  alarm->Cancel();
  RunAll();
  EXPECT_EQ(said_, "b+a+");
}

TEST_F(SocketEventsTest, SocketsAreHeardBesideATagThatAlwaysComesBack) {
  Watched socket(events_.get());
  socket.Speak();
  RpcEvents::Event event;
  events_->Return(&a_, true);
  int turns = 0;
  for (; socket.heard().empty() && turns < 1000; ++turns) {
    ASSERT_TRUE(events_->Wait(&event));
    events_->Return(event.tag, true);
  }
  EXPECT_LE(turns, 16);
  events_->Unwatch(socket.here());
}

TEST_F(SocketEventsTest, AChangeIsToldOnceAndRoomOnlyToWhoAsks) {
  Watched socket(events_.get());
  RunAll();
  EXPECT_TRUE(socket.heard().empty()) << "room to write was not asked for";
  socket.Speak();
  RunAll();
  RunAll();
  ASSERT_EQ(socket.heard().size(), 1u);
  EXPECT_EQ(socket.heard()[0], EPOLLIN);
  events_->AwaitRoom(socket.here(), &socket, true);
  RunAll();
  ASSERT_EQ(socket.heard().size(), 2u);
  EXPECT_EQ(socket.heard()[1] & EPOLLOUT, EPOLLOUT);
  events_->AwaitRoom(socket.here(), &socket, false);
  socket.HangUp();
  RunAll();
  EXPECT_EQ(socket.heard().back() & (EPOLLHUP | EPOLLRDHUP), EPOLLHUP | EPOLLRDHUP);
  events_->Unwatch(socket.here());
  const size_t heard = socket.heard().size();
  RunAll();
  EXPECT_EQ(socket.heard().size(), heard);
}

TEST_F(SocketEventsTest, WhatNobodyTookIsOverWithoutOk) {
  events_->Post(&a_);
  events_ = nullptr;
  EXPECT_EQ(said_, "a-");
}

}  // namespace
}  // namespace kvpool
