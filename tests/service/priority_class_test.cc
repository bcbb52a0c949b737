// Who gives memory to whom where spaces are of several classes.
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

using PriorityClassTest = GiveBackTest;

// Whatever weights say, and however much the lower one uses what it has, but for what it is promised.
TEST_F(PriorityClassTest, AHigherClassTakesWhatALowerOneIsNotPromised) {
  const auto a = Full(8);
  const auto b = OpenSmall("b");
  SetWeight(0, 1000);
  SetPriority(0, v1::PRIORITY_CLASS_BATCH);
  SetPriority(1, v1::PRIORITY_CLASS_INTERACTIVE);
  v1::SetShareRequest keep;
  keep.set_space(Space(0).space);
  keep.set_guaranteed_blocks(20);
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(keep, &response).ok());
  EXPECT_EQ(response.priority_class(), v1::PRIORITY_CLASS_BATCH);
  for (int round = 0; round < 60; ++round) {
    Churn(a.get(), "a" + std::to_string(round));
    Churn(b.get(), "b" + std::to_string(round));
    Settle({a.get(), b.get()});
  }
  EXPECT_EQ(Space(0).slabs, 2) << "20 blocks are promised to it";
  EXPECT_EQ(Space(1).slabs, 6);
  // What is held is not taken either, and what is let go is.
  SetPriority(0, v1::PRIORITY_CLASS_UNSPECIFIED);
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_STANDARD) << "nothing says another";
}

// A lease waits for memory of a lower class before it evicts, though no weight says that it is its own.
TEST_F(PriorityClassTest, ALeaseOfAHigherClassEvictsNothingWhileALowerOneHasSome) {
  const auto a = Full(8);
  const auto b = OpenSmall("b");
  SetPriority(0, v1::PRIORITY_CLASS_BATCH);
  Settle({a.get(), b.get()});
  uint32_t sealed = 0;
  for (int round = 0; round < 200 && sealed < 5 * kSlabBlocks; ++round) {
    const v1::LeaseResult lease = b->LeaseAsked(3, 1);
    for (const uint64_t block : lease.blocks()) {
      b->Seal({block}, {Key("b" + std::to_string(sealed++))});
      b->Release({block});
    }
    Settle({a.get(), b.get()});
    clock_.Advance(10);
  }
  EXPECT_GE(sealed, 5 * kSlabBlocks);
  EXPECT_EQ(Evicted(1), 0);
  EXPECT_GT(Evicted(0), 0);
  EXPECT_GE(Space(1).slabs, 6);
}

// A lower class evicts its own, waits for nothing, and gets nothing: but its guarantee.
TEST_F(PriorityClassTest, ALowerClassTakesNothingOfAHigherOneButItsGuarantee) {
  Rules("");
  const auto a = Full(8);
  const auto b = OpenSmall("b");
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  SetWeight(1, 1000);
  const auto asked = Space(0).give_back.asked;
  for (int round = 0; round < 40; ++round) {
    Churn(b.get(), "b" + std::to_string(round));
    Settle({a.get(), b.get()});
  }
  EXPECT_EQ(Space(0).slabs, 7) << "its cache is idle, of less weight, and stays";
  EXPECT_EQ(Space(0).give_back.asked, asked);
  EXPECT_GT(Evicted(1), 0);
  // Without a guarantee an opening of the class gets nothing of it either, and is told so.
  Rules("priority = batch");
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_BATCH) << "of the same rule";
  SetPriority(0, v1::PRIORITY_CLASS_STANDARD);
  b->Release(b->Lease(1));
  const std::vector<uint64_t> held = LeaseUpTo(kSlabBlocks - 3, b.get(), {a.get(), b.get()});
  const auto c = Attach("c");
  const absl::Status refused = c->Open(OpenRequest("c"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("it is of class standard, above batch"));
  EXPECT_EQ(Space(0).slabs, 7);
  v1::OpenSession request = OpenRequest("c");
  request.set_guaranteed_blocks(20);
  const absl::Status opened = c->Open(request);
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(0).slabs, 5);
  b->Release(held);
}

TEST_F(PriorityClassTest, AGuaranteeIsOfTheLowestClassFirst) {
  Rules("space-blocks = 63");
  StartDaemon(8);
  const auto a = OpenEngine(OpenRequest("a"), "a"), c = OpenEngine(OpenRequest("c"), "c");
  a->Release(LeaseAll(a.get(), 4 * kSlabBlocks - 2));
  c->Release(LeaseAll(c.get(), 4 * kSlabBlocks - 2));
  ASSERT_EQ(Space(0).slabs + Space(1).slabs, 8);
  SetWeight(1, 1000);
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(40, &b).ok());
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(Space(1).slabs, 1) << "whatever its weight";
  // There is nothing left there, and what is promised comes of whoever has it.
  SetPriority(2, v1::PRIORITY_CLASS_BATCH);
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  const auto d = OpenSmall("d", 20);
  EXPECT_EQ(Space(0).slabs, 2);
  EXPECT_EQ(d->Lease(20).size(), 20);
}

// Weights are among equals: those of a class divide what higher ones leave.
TEST_F(PriorityClassTest, WeightsDecideAmongEquals) {
  const auto a = Full(12);
  const auto b = OpenSmall("b"), c = OpenSmall("c");
  SetWeight(0, 1000);
  SetWeight(1, 1);
  SetWeight(2, 4);
  SetPriority(0, v1::PRIORITY_CLASS_BATCH);
  v1::SetShareRequest keep;
  keep.set_space(Space(0).space);
  keep.set_guaranteed_blocks(20);
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(keep, &response).ok());
  for (int round = 0; round < 100; ++round) {
    for (const auto& [engine, name] : {std::pair{a.get(), "a"}, {b.get(), "b"}, {c.get(), "c"}})
      Churn(engine, name + std::to_string(round));
    Settle({a.get(), b.get(), c.get()});
  }
  EXPECT_EQ(std::tuple(Space(0).slabs, Space(1).slabs, Space(2).slabs), std::tuple(2u, 2u, 8u));
}

// What a rule says bounds what an opening asks for, and follows the rule.
TEST_F(PriorityClassTest, AnOpeningAsksForAClassWithinItsRule) {
  Rules("priority = standard");
  StartDaemon(4);
  v1::OpenSession request = OpenRequest("a");
  request.set_priority_class(v1::PRIORITY_CLASS_INTERACTIVE);
  const auto a = Attach("a");
  const absl::Status refused = a->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(refused.message(), "priority_class is interactive; rule [rule] gives priority = standard");
  request.set_priority_class(static_cast<v1::PriorityClass>(4));
  EXPECT_EQ(a->Open(request).message(), "priority_class is 4; must be 0 to 3");
  request.set_priority_class(v1::PRIORITY_CLASS_BATCH);
  ASSERT_TRUE(a->Open(request).ok());
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_BATCH);
  testing::internal::CaptureStderr();
  Rules("priority = interactive");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "nothing has changed";
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_BATCH) << "it asked for that";
  request.set_priority_class(v1::PRIORITY_CLASS_UNSPECIFIED);
  const auto second = OpenEngine(request, "a2");
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_INTERACTIVE) << "of the last opening";
  testing::internal::CaptureStderr();
  Rules("priority = batch");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("old_priority=interactive priority=batch"));
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_BATCH);
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  Rules("priority = standard");
  EXPECT_EQ(Space(0).priority, v1::PRIORITY_CLASS_INTERACTIVE) << "an operator comes first";
}

// What a higher class can't use is not left for it: here, since another of its devices is full.
TEST_F(PriorityClassTest, NothingIsLeftForAHigherClassWhoseOtherDeviceIsFull) {
  StartDaemon(4, /*devices=*/2);
  v1::OpenSession of_wide = OpenRequest("b"), of_low = OpenRequest("a"), of_other = OpenRequest("c");
  of_wide.set_ranks(2);
  of_low.add_device_uuids("mem0");
  of_other.add_device_uuids("mem1");
  of_other.set_tenant("two");
  const auto wide = Attach("b"), rank1 = Attach("b"), low = Attach("a"), other = Attach("c");
  ASSERT_TRUE(wide->Open(of_wide).ok());
  ASSERT_TRUE(rank1->Join(*wide, JoinRequest(*wide, 1, "b")).ok());
  Settle({wide.get(), rank1.get()});
  ASSERT_TRUE(low->Open(of_low).ok());
  ASSERT_TRUE(other->Open(of_other).ok());
  const std::vector<Engine*> all = {wide.get(), rank1.get(), low.get(), other.get()};
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  SetPriority(2, v1::PRIORITY_CLASS_INTERACTIVE);
  const std::vector<uint64_t> held = LeaseUpTo(3 * kSlabBlocks - 2, other.get(), all);
  ASSERT_EQ(Used(1), 4 * kSlabBlocks * kBlockBytes);
  const auto churn = [&](const std::string& name) {
    for (int i = 0; i < 20; ++i) {
      Churn(wide.get(), name + "w" + std::to_string(i));
      Churn(low.get(), name + "l" + std::to_string(i));
      Settle(all);
    }
  };
  churn("full");
  EXPECT_EQ(Space(0).slabs, 1);
  EXPECT_EQ(Space(1).slabs, 3) << "all there is on its device";
  // What both can use goes to the higher one.
  other->Die();
  clock_.Advance(options_.idle_space_ms);
  Settle(all);
  churn("free");
  EXPECT_EQ(Space(0).slabs, 3);
  EXPECT_EQ(Space(1).slabs, 1);
}

class HolesOfClassesTest : public HolesTest {};

// Here, since its limit has no room for the whole slab that would come next.
TEST_F(HolesOfClassesTest, NothingIsLeftForAHigherClassWhoseHoleIsBeyondItsLimit) {
  constexpr uint32_t kTwoUnits = 2 * kSlabBlocks;
  options_.slab_bytes = kTwoUnits * kBlockBytes;
  const auto high = Full(12);
  ASSERT_EQ(Space(0).slabs, 6);
  Hold(high.get(), 11);
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  const auto low = OpenSmall("b"), ends = OpenSmall("c");
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  ASSERT_EQ(Left(*high).size(), 2);
  const auto limit = [this](uint32_t blocks) {
    SetShare(0, [&](v1::SetShareRequest* request) { request->set_limit_blocks(blocks); });
  };
  limit(4 * kTwoUnits + kSlabBlocks - 1);
  ends->Die();
  clock_.Advance(options_.idle_space_ms);
  Settle({high.get(), low.get()});
  const auto churn = [&](const std::string& name) {
    for (int i = 0; i < 10; ++i) {
      Churn(high.get(), name + "h" + std::to_string(i));
      Churn(low.get(), name + "l" + std::to_string(i));
      Settle({high.get(), low.get()});
    }
  };
  churn("hole");
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(Space(1).slabs, 2) << "all there is";
  // Who must have more there is told what is in the way.
  const auto more = Attach("more");
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(4 * kTwoUnits + kSlabBlocks / 2);
  const absl::Status refused = more->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("may have 16 more blocks, and the slab that it gave back from block 32 on has 32"));
  EXPECT_EQ(Space(1).slabs, 2) << "its memory would be of no use";
  limit(5 * kTwoUnits - 1);
  churn("whole");
  EXPECT_EQ(Space(0).slabs, 5);
  EXPECT_EQ(Space(1).slabs, 1);
}

// Who must have holes filled has memory of any class for it, as for all that a guarantee needs.
TEST_F(HolesOfClassesTest, AGuaranteeHasHolesFilledByAHigherClass) {
  options_.give_back_ms = 600'000;
  StartDaemon(6);
  const auto high = OpenSmall("b");
  const auto a = OpenEngine(OpenRequest("a"), "a");
  Fill(a.get(), 5);
  const uint64_t held = Hold(a.get(), 4);
  const auto more = OpenSmall("b", kSlabBlocks);
  ASSERT_EQ(Left(*a), std::vector<uint32_t>{1});
  more->Die();
  Settle({a.get(), high.get()});
  ASSERT_EQ(Space(0).slabs, 2);
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  engines_take_holes_ = false;
  const auto old = Attach("old");
  v1::OpenSession request = OpenRequest("a");
  const absl::Status refused = old->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("of class interactive, above batch"));
  request.set_guaranteed_blocks(1);
  absl::Status opened;
  WhileEnginesGoOn({a.get(), high.get()}, [&] { opened = old->Open(request); });
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(0).slabs, 1);
  EXPECT_EQ(Space(1).slabs, 5);
  a->Release({held});
}

}  // namespace
}  // namespace kvpool
