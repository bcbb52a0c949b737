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
  // Of five slabs model "a" has three and "c" two, all of them full of cached blocks.
  void FillTwo() {
    StartDaemon(5);
    a_ = OpenEngine(OpenRequest("a"), "a");
    const auto limit = [this](uint32_t blocks) {
      SetShare(0, [&](v1::SetShareRequest* request) { request->set_limit_blocks(blocks); });
    };
    limit(3 * kSlabBlocks - 1);
    Fill(a_.get(), 3);
    c_ = OpenEngine(OpenRequest("c"), "c");
    Fill(c_.get(), 2);
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
  ASSERT_NO_FATAL_FAILURE(FillTwo());
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

// A member has a while to unmap what it was asked for.
TEST_F(SpareTest, WhereASlabIsNotUnmappedAnotherSpaceIsAsked) {
  options_.give_back_ms = 60'000;
  ASSERT_NO_FATAL_FAILURE(FillTwo());
  a_->peer->on_leave = nullptr;
  // The test's clock stands still: whoever waits must not wait for it.
  std::atomic<bool> done{false};
  std::thread time([&] {
    while (!done) {
      clock_.Advance(10);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::unique_ptr<Engine> b;
  const absl::Status opened = OpenB(10, &b);
  done = true;
  time.join();
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(a_->peer->leaves().size(), 1u);
  EXPECT_EQ(Space(0).give_back.missed, 0) << "there was time left";
  EXPECT_EQ(Space(1).give_back.slabs, 1);
}

}  // namespace
}  // namespace kvpool
