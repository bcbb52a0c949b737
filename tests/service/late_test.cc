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

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

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
  // An engine does not unmap a slab that it is asked for so long before the time is over.
  void AskToUnmapBefore(uint64_t left_ms) {
    const auto a = HoldsOne();
    a->peer->on_leave = [](const v1::SlabLeave&) {};
    Limit(2 * kSlabBlocks);
    Housekeep(10);
    clock_.Advance(1000 - left_ms);
    a->Release({held_});
    Housekeep(10);
    ASSERT_EQ(a->peer->leaves().size(), 1u);
    EXPECT_EQ(a->peer->leaves()[0].deadline_ms(), left_ms);
    clock_.Advance(left_ms);
    Housekeep(3);
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

// It is asked, and its answer would count.
TEST_F(LateTest, WhoIsAskedInTheLastMomentIsNot) {
  options_.give_back_ms = GiveBack::kLeastAnswerMs - 1;
  const auto a = HoldsOne();
  Refusal(20);
  EXPECT_THAT(a->Pending().ShortDebugString(), HasSubstr("memory is to be given back"));
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_EQ(Space(0).give_back.late, 0);
}

TEST_F(LateTest, WhoIsAskedToUnmapInTheLastMomentIsNot) {
  AskToUnmapBefore(GiveBack::kLeastAnswerMs - 1);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_EQ(Space(0).give_back.late, 0);
}

TEST_F(LateTest, WhoIsAskedToUnmapJustInTimeIs) {
  AskToUnmapBefore(GiveBack::kLeastAnswerMs);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_EQ(Space(0).give_back.late, 1);
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

TEST_F(LateTest, WhoHasUnmappedInTimeIsNotBesideOneThatHasNot) {
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a"), b = OpenEngine(OpenRequest("a"), "b");
  a->Release(LeaseUpTo(3 * kSlabBlocks - 3, a.get(), {a.get(), b.get()}));
  ASSERT_EQ(Space(0).slabs, 3);
  b->peer->on_leave = nullptr;
  Limit(2 * kSlabBlocks);
  Housekeep(10);
  ASSERT_EQ(a->peer->leaves().size(), 1u);
  ASSERT_EQ(b->peer->leaves().size(), 1u);
  testing::internal::CaptureStderr();
  clock_.Advance(1000);
  Housekeep(3);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("(b, pid "), Not(HasSubstr("(a, pid "))));
  EXPECT_EQ(Space(0).give_back.late, 1);
}

// ---- What the log says of them

class LateLogTest : public LateTest {
 protected:
  // The housekeeper goes on for so long, in steps of 100 ms. Answers the lines of those who were late.
  std::vector<std::string> Lines(uint64_t ms) {
    testing::internal::CaptureStderr();
    for (uint64_t i = 0; i < ms; i += 100) {
      clock_.Advance(100);
      Housekeep(10);
    }
    const std::string log = testing::internal::GetCapturedStderr();
    std::vector<std::string> lines;
    for (size_t at = 0; (at = log.find("memory was not given back in time", at)) != std::string::npos; ++at)
      lines.push_back(log.substr(at, log.find('\n', at) - at));
    return lines;
  }
};

TEST_F(LateLogTest, OneLineInTenSecondsHasAllThatWereLateSinceTheLastOne) {
  const auto a = HoldsOne();
  Limit(kSlabBlocks);
  const std::string who = NameOfSession(*a, "a").substr(0, NameOfSession(*a, "a").size() - 1);
  const std::vector<std::string> first = Lines(1200);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_THAT(first[0], AllOf(HasSubstr("space=" + std::to_string(Space(0).space)), HasSubstr(who),
                              HasSubstr("has leased 1 blocks there")));
  EXPECT_THAT(first[0], Not(HasSubstr(" more")));
  EXPECT_EQ(Space(0).give_back.late, 1);
  EXPECT_THAT(Lines(9700), IsEmpty());
  // It is asked once a second, and is late each time: it is named once.
  const std::vector<std::string> second = Lines(200);
  ASSERT_EQ(second.size(), 1u);
  const uint64_t late = Space(0).give_back.late;
  EXPECT_GE(late, 9u);
  EXPECT_THAT(second[0], AllOf(HasSubstr(who), HasSubstr("; " + std::to_string(late - 2) + " more")));
  EXPECT_THAT(Lines(9000), IsEmpty());
}

TEST_F(LateLogTest, FourAreNamed) {
  StartDaemon(3);
  std::vector<std::unique_ptr<Engine>> engines;
  engines.push_back(OpenEngine(OpenRequest("a"), "e0"));
  const std::vector<uint64_t> all = LeaseAll(engines[0].get(), 2 * kSlabBlocks - 2);
  // What the others lease lies in the last slab, in which their sinks are too.
  for (int i = 1; i <= 6; ++i) {
    engines.push_back(OpenEngine(OpenRequest("a"), "e" + std::to_string(i)));
    std::vector<Engine*> here;
    for (const auto& engine : engines) here.push_back(engine.get());
    Settle(here);
    ASSERT_EQ(LeaseUpTo(1, engines.back().get(), here).size(), 1u);
  }
  engines[0]->Release(all);
  Limit(kSlabBlocks);
  const std::vector<std::string> lines = Lines(1200);
  ASSERT_EQ(lines.size(), 1u);
  size_t named = 0;
  for (size_t i = 1; i < engines.size(); ++i)
    named += lines[0].find("(e" + std::to_string(i) + ", pid ") != std::string::npos ? 1 : 0;
  EXPECT_EQ(named, 4u) << lines[0];
  EXPECT_THAT(lines[0], HasSubstr("; 2 more\""));
  EXPECT_EQ(Space(0).give_back.late, 6);
}

// ---- How often they are asked

TEST_F(LateTest, PausesBetweenTwoNoticesDouble) {
  const auto a = HoldsOne();
  Limit(kSlabBlocks);
  std::vector<uint64_t> asked_ms;
  for (uint64_t now_ms = 0; now_ms < 1000; now_ms += 20) {
    Housekeep(10);
    const v1::StepResponse pending = a->Pending();
    for (const v1::Notice& notice : pending.notices()) {
      if (notice.kind() == v1::NOTICE_KIND_REVOKE && notice.on()) asked_ms.push_back(now_ms);
    }
    clock_.Advance(20);
  }
  EXPECT_THAT(asked_ms, ElementsAre(0, 100, 300, 700));
}

}  // namespace
}  // namespace kvpool
