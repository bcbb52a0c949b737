// Who is called late (kvpool_give_back_late_total), and who is not.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
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

}  // namespace
}  // namespace kvpool
