// Who is called late (kvpool_give_back_late_total), and who is not.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

class LateTest : public GiveBackTest {
 protected:
  // An engine that has all of three slabs and holds one block, of the last of them.
  std::unique_ptr<Engine> HoldsOne() {
    StartDaemon(3);
    auto a = OpenEngine(OpenRequest("a"), "a");
    std::vector<uint64_t> all = LeaseAll(a.get(), 3 * kSlabBlocks - 2);
    const auto last = std::max_element(all.begin(), all.end(),
                                       [](uint64_t one, uint64_t other) { return IdOf(one) < IdOf(other); });
    held_ = *last;
    all.erase(last);
    a->Release(all);
    return a;
  }
  void Limit(uint32_t blocks) {
    SetShare(0, [&](v1::SetShareRequest* request) { request->set_limit_blocks(blocks); });
  }
  void Housekeep(int times) {
    for (int i = 0; i < times; ++i) daemon_->HousekeepOnce();
  }
  uint64_t held_ = 0;
};

// Nobody looked between that and the end of the time.
TEST_F(LateTest, WhoLetGoInTimeIsNot) {
  const auto a = HoldsOne();
  Limit(kSlabBlocks);
  Housekeep(10);
  clock_.Advance(950);
  Housekeep(3);
  a->Release({held_});
  clock_.Advance(50);
  Housekeep(3);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_EQ(Space(0).give_back.late, 0);
}

// An opening asks until its time is over, the space's limit until later, which is what the session was told.
TEST_F(LateTest, WhoWasToldALaterTimeIsNotWhenAnEarlierOneIsOver) {
  const auto a = HoldsOne();
  Limit(2 * kSlabBlocks);
  Housekeep(10);
  EXPECT_EQ(Space(0).give_back.asked, 1);
  // It wants the other slab, too.
  Refusal(20);
  EXPECT_EQ(Space(0).give_back.late, 0);
  clock_.Advance(999);
  Housekeep(3);
  EXPECT_EQ(Space(0).give_back.late, 0);
  clock_.Advance(1);
  Housekeep(3);
  EXPECT_EQ(Space(0).give_back.late, 1);
}

// The slab that it was asked for has gone. Another one stays since a process has yet to map it.
TEST_F(LateTest, WhoGaveAllBackIsNot) {
  const auto a = HoldsOne();
  const auto answer = std::exchange(a->peer->on_leave, [](const v1::SlabLeave&) {});
  Limit(kSlabBlocks);
  Housekeep(10);
  a->Release({held_});
  clock_.Advance(100);
  Housekeep(3);
  ASSERT_EQ(a->peer->leaves().size(), 1u);
  const auto maps_nothing = Attach("a2");
  ASSERT_TRUE(maps_nothing->Open(OpenRequest("a")).ok());
  answer(a->peer->leaves()[0]);
  Housekeep(3);
  ASSERT_EQ(Space(0).give_back.slabs, 1);
  clock_.Advance(900);
  Housekeep(3);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_EQ(Space(0).give_back.late, 0);
}

// A session can't release its sink, and is asked for what else it has there.
TEST_F(LateTest, WhoHasNothingButItsSinkThereIsNot) {
  StartDaemon(2);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  std::vector<uint64_t> all = LeaseAll(a.get(), 2 * kSlabBlocks - 2);
  std::sort(all.begin(), all.end(), [](uint64_t one, uint64_t other) { return IdOf(one) < IdOf(other); });
  a->Release({all.begin() + kSlabBlocks - 2, all.end()});
  all.resize(kSlabBlocks - 2);
  const auto b = OpenEngine(OpenRequest("a"), "b");
  ASSERT_EQ(Index(b->member->session->sink.id), kSlabBlocks) << "in the second slab";
  const std::vector<uint64_t> beside = b->Lease(1);
  ASSERT_GT(IdOf(beside[0]), kSlabBlocks);
  a->Release(all);
  Limit(kSlabBlocks);
  Housekeep(10);
  b->Release(beside);
  clock_.Advance(500);
  Housekeep(3);
  clock_.Advance(500);
  Housekeep(3);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_EQ(Space(0).give_back.late, 0);
}

}  // namespace
}  // namespace kvpool
