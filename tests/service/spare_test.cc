// What a space could give, who is not asked, and when another one is asked instead.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

class SpareTest : public GiveBackTest {
 protected:
  // Model "a" has three slabs and "c" the others, all of them full of cached blocks.
  void FillTwo(uint32_t of_c) {
    StartDaemon(3 + of_c);
    a_ = OpenEngine(OpenRequest("a"), "a");
    const auto limit = [this](uint32_t blocks) {
      SetShare(0, [&](v1::SetShareRequest* request) { request->set_limit_blocks(blocks); });
    };
    limit(3 * kSlabBlocks - 1);
    Fill(a_.get(), 3);
    c_ = OpenEngine(OpenRequest("c"), "c");
    Fill(c_.get(), of_c);
    limit(0);
  }
  std::unique_ptr<Engine> a_, c_;
};

// Two slabs have 31 blocks beside the null block.
TEST_F(SpareTest, ASlabIsNoSpareWhereOneBlockOfItIsNeeded) {
  const auto a = Full(3);
  SetShare(0, [](v1::SetShareRequest* request) {
    request->set_keep_guaranteed(false);
    request->set_guaranteed_blocks(2 * kSlabBlocks);
  });
  EXPECT_THAT(Refusal(10), HasSubstr("all of it is held, promised or kept for it"));
  EXPECT_EQ(Space(0).give_back.asked, 0);
}

TEST_F(SpareTest, WhoLetsNothingBeUnmappedIsNotAsked) {
  engines_give_back_ = false;
  const auto a = Full(3);
  Refusal(10);
  EXPECT_EQ(Space(0).give_back.asked, 0);
}

// What a limit takes is what could go.
TEST_F(SpareTest, WhatIsHeldBeyondALimitIsNotAskedFor) {
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  const std::vector<uint64_t> held = LeaseAll(a.get(), 3 * kSlabBlocks - 2);
  SetShare(0, [](v1::SetShareRequest* request) { request->set_limit_blocks(kSlabBlocks); });
  GoOn({a.get()});
  EXPECT_EQ(Space(0).give_back.asked, 0);
  a->Release(held);
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 1);
}

// It would take from one that waits what that is about to be given. What it has can't come, which is known at once.
TEST_F(SpareTest, ASpaceThatWaitsForMemoryIsNotAskedForItsOwn) {
  options_.give_back_ms = 2000;
  ASSERT_NO_FATAL_FAILURE(FillTwo(2));
  c_->peer->on_leave = nullptr;
  const auto second = Attach("a2");
  std::atomic<bool> over{false};
  std::thread opening([&] {
    v1::OpenSession request = OpenRequest("a");
    request.set_guaranteed_blocks(3 * kSlabBlocks + 4);
    EXPECT_FALSE(second->Open(request).ok());
    over = true;
  });
  while (Space(1).give_back.asked == 0 && !over) std::this_thread::yield();
  // More than the slab that leaves the other one.
  EXPECT_THAT(Refusal(20), HasSubstr("it waits for memory itself"));
  EXPECT_EQ(Space(0).give_back.asked, 0);
  opening.join();
}

// A member has a while to unmap what it was asked for, also once nobody waits for it any more.
TEST_F(SpareTest, WhereASlabIsNotUnmappedAnotherSpaceIsAsked) {
  options_.give_back_ms = 60'000;
  ASSERT_NO_FATAL_FAILURE(FillTwo(3));
  a_->peer->on_leave = nullptr;
  std::unique_ptr<Engine> b;
  std::unique_ptr<Engine> d = Attach("d");
  v1::OpenSession request = OpenRequest("d");
  request.set_guaranteed_blocks(10);
  absl::Status first, second;
  WhileTimePasses([&] {
    first = OpenB(10, &b);
    second = d->Open(request);
  });
  EXPECT_TRUE(first.ok()) << first;
  EXPECT_TRUE(second.ok()) << second;
  EXPECT_EQ(a_->peer->leaves().size(), 1u);
  EXPECT_EQ(Space(0).give_back.missed, 0) << "there was time left";
  EXPECT_EQ(Space(1).give_back.slabs, 2);
}

class WhichSlabTest : public HolesTest {};

// A session's sink keeps its slab for as long as the session is there, whatever else is in it.
TEST_F(WhichSlabTest, WhatIsLeasedElsewhereIsAskedFor) {
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  std::vector<uint64_t> first, second, last, rest;
  uint32_t in_second = 0, in_last = 0;
  for (const uint64_t block : LeaseAll(a.get(), 3 * kSlabBlocks - 2)) {
    const uint32_t slab = IdOf(block) / kSlabBlocks;
    if (slab == 1 && in_second++ < 3) {
      second.push_back(block);
    } else if (slab == 2 && in_last++ < 2) {
      last.push_back(block);
    } else {
      (slab == 0 ? first : rest).push_back(block);
    }
  }
  a->Release(rest);
  const auto b = OpenEngine(OpenRequest("a"), "b");
  ASSERT_EQ(Index(b->member->session->sink.id) / kSlabBlocks, 1u);
  a->Release(second);
  a->Pending();
  SetShare(0, [](v1::SetShareRequest* request) { request->set_limit_blocks(2 * kSlabBlocks); });
  for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
  EXPECT_THAT(a->Pending().ShortDebugString(), HasSubstr("memory is to be given back"));
  a->Release(last);
  GoOn({a.get(), b.get()});
  EXPECT_EQ(Left(*a), std::vector<uint32_t>{2});
}

TEST_F(WhichSlabTest, OfTwoThatAreEmptyTheLaterOneGoes) {
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  a->Release(LeaseAll(a.get(), 3 * kSlabBlocks - 2));
  SetShare(0, [](v1::SetShareRequest* request) { request->set_limit_blocks(2 * kSlabBlocks); });
  GoOn({a.get()});
  EXPECT_EQ(Left(*a), std::vector<uint32_t>{2});
}

}  // namespace
}  // namespace kvpool
