// Memory goes from one space to another while engines are in both.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(GiveBackTest, AnotherModelGetsItsGuaranteeAndWhatIsHotStays) {
  const auto a = Full(6);
  // The blocks of the two last slabs are the hottest.
  ASSERT_EQ(Found(a.get(), 64, 96), 32);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(30, &b).ok());
  EXPECT_EQ(b->Lease(30).size(), 30);
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(a->peer->leaves().size(), 2);
  EXPECT_EQ(a->peer->leaves()[0].slab(), 5);
  EXPECT_EQ(a->peer->leaves()[0].capacity_blocks(), 5 * kSlabBlocks);
  EXPECT_EQ(Found(a.get(), 64, 96), 32) << "they have moved";
  EXPECT_EQ(Found(a.get(), 2, 64), 30) << "the coldest have made room for them";
  EXPECT_EQ(Used(), 6 * kSlabBlocks * kBlockBytes);
}

TEST_F(GiveBackTest, WhatMovesBeforeItHasItsSumGetsOne) {
  options_.verify = true;
  options_.verify_sample_bytes = 0;
  const auto a = Full(3);
  ASSERT_EQ(Found(a.get(), 33, 48), 15);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_GT(Space(0).pool.moved, 0u);
  daemon_->VerifyOnce(0);
  const auto cached = Space(0).blocks[static_cast<size_t>(BlockState::kCached)];
  EXPECT_GT(cached, 0u);
  EXPECT_EQ(Space(0).checks.checked[static_cast<size_t>(CheckedWhen::kSeal)], cached);
}

TEST_F(GiveBackTest, ChainsMoveWithTheirChildren) {
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  const std::vector<std::string> keys = Keys("chain", 5);
  const std::vector<uint64_t> chain = CacheChain(a.get(), keys);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  const v1::MatchResult match = a->Match(keys);
  ASSERT_EQ(match.groups(0).blocks_size(), 5);
  for (const uint64_t block : match.groups(0).blocks()) EXPECT_LT(IdOf(block), 2 * kSlabBlocks);
  EXPECT_EQ(IdOf(match.groups(0).blocks(2)), IdOf(chain[2])) << "this one stays where it is";
}

TEST_F(GiveBackTest, WhatIsNotWhatWasSealedKeepsNoSlab) {
  options_.give_back_ms = 2000;  // It is given back, however slow the machine is.
  options_.verify = true;
  options_.verify_sample_bytes = 1 << 20;
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  const std::vector<std::string> keys = Keys("chain", 5);
  const std::vector<uint64_t> chain = CacheChain(a.get(), keys);
  daemon_->VerifyOnce(0);
  scripts_[0]->memory[(IdOf(chain[0]) - 2 * kSlabBlocks) * kBlockBytes] ^= 1;
  daemon_->VerifyOnce(1000);
  const auto failed = [this] { return Space(0).checks.failed[static_cast<size_t>(CheckedWhen::kSample)]; };
  ASSERT_EQ(failed(), 1u);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Space(0).slabs, 2u);
  // Where it lies now it is as wrong, and free once nothing is behind it.
  daemon_->VerifyOnce(1000);
  EXPECT_EQ(failed(), 1u);
  EXPECT_EQ(Space(0).checks.checked[static_cast<size_t>(CheckedWhen::kSeal)], 5u);
  const auto left = [this] { return Space(0).pool.evicted[static_cast<size_t>(EvictReason::kDamaged)]; };
  EXPECT_EQ(left(), 0u);
  v1::EvictRequest behind;
  behind.set_key(keys[1]);
  v1::EvictResponse response;
  ASSERT_TRUE(daemon_->Evict(behind, &response).ok());
  EXPECT_EQ(response.evicted(), 4u);
  daemon_->VerifyOnce(0);
  EXPECT_EQ(left(), 1u);
}

TEST_F(GiveBackTest, AHeldBlockKeepsItsSlabAndItsHolderIsNamed) {
  const auto a = Full(3);
  const v1::MatchResult held = a->Match({NameOfId(40)});
  ASSERT_EQ(held.tokens(), 16);
  std::unique_ptr<Engine> b;
  const absl::Status refused = OpenB(10, &b);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("guaranteed_blocks is 10"),
                    HasSubstr(NameOfSession(*a, "a") + " holds 1 blocks in 1 of the 2 slabs that could go")));
  EXPECT_TRUE(a->peer->leaves().empty());
  // What was vacated is the space's again.
  clock_.Advance(100);
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(Space(0).blocks[static_cast<int>(BlockState::kWithheld)], 0);
  a->Release({held.groups(0).blocks(0)});
  EXPECT_TRUE(OpenB(10, &b).ok());
}

// What keeps a slab keeps those in front of it, whoever else holds some of them.
TEST_F(GiveBackTest, HoldersOfAllSlabsAreNamed) {
  const auto a = Full(6);
  const auto second = OpenEngine(OpenRequest("a"), "second"), idle = OpenEngine(OpenRequest("a"), "idle");
  for (const uint32_t id : {20u, 52u, 60u}) ASSERT_EQ(a->Match({NameOfId(id)}).tokens(), 16);
  std::vector<uint64_t> by_second;
  for (const uint32_t id : {36u, 68u, 84u})
    by_second.push_back(second->Match({NameOfId(id)}).groups(0).blocks(0));
  const std::string refusal = Refusal(30);
  EXPECT_THAT(
      refusal,
      AllOf(HasSubstr(NameOfSession(*a, "a") + " holds 3 blocks in 2 of the 5 slabs that could go"),
            HasSubstr(NameOfSession(*second, "second") + " holds 3 blocks in 3 of the 5 slabs that could go"),
            Not(HasSubstr("idle"))));
  second->Release(by_second);
  EXPECT_THAT(Refusal(48), AllOf(HasSubstr(NameOfSession(*a, "a")), Not(HasSubstr("second"))));
}

// A block stays charged to the session that took it, also when only another holds it still.
TEST_F(GiveBackTest, WhoLetGoIsNotNamed) {
  const auto a = Full(3);
  const auto second = OpenEngine(OpenRequest("a"), "second");
  const uint64_t block = a->Match({NameOfId(40)}).groups(0).blocks(0);
  ASSERT_EQ(second->Match({NameOfId(40)}).groups(0).blocks(0), block);
  a->Release({block});
  EXPECT_THAT(Refusal(10), AllOf(HasSubstr(NameOfSession(*second, "second") + " holds 1 blocks in 1 of the"),
                                 Not(HasSubstr(NameOfSession(*a, "a")))));
}

TEST_F(GiveBackTest, OfManyHoldersThoseWithMostAreNamed) {
  const auto a = Full(3);
  std::vector<std::unique_ptr<Engine>> engines;
  for (uint32_t i = 0; i < 7; ++i) {
    engines.push_back(OpenEngine(OpenRequest("a"), "many"));
    for (uint32_t id = 40; id <= 40 + i % 4; ++id) engines[i]->Match({NameOfId(id)});
  }
  const std::string refusal = Refusal(10);
  for (uint32_t i = 0; i < 7; ++i) {
    const std::string name = NameOfSession(*engines[i], "many");
    // They hold 1, 2, 3, 4, 1, 2 and 3.
    const bool named = i == 2 || i == 3 || i == 6 || i == 1;
    EXPECT_EQ(refusal.find(name) != std::string::npos, named) << name << " in " << refusal;
  }
  EXPECT_THAT(refusal, HasSubstr("3 more sessions hold 4 blocks"));
}

TEST_F(GiveBackTest, WhatIsPinnedOrPromisedIsNamed) {
  const auto a = Full(3);
  const uint64_t block = a->Match({NameOfId(40)}).groups(0).blocks(0);
  ASSERT_EQ(a->Do(PinOp({block}, 60000)).code(), 0);
  a->Release({block});
  EXPECT_THAT(Refusal(10), AllOf(HasSubstr("1 blocks are pinned"), Not(HasSubstr("holds"))));
  ASSERT_EQ(a->Do(UnpinOp({block})).code(), 0);
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(40);
  const auto second = OpenEngine(request, "second");
  EXPECT_THAT(Refusal(10), AllOf(HasSubstr("all of it is held, promised or kept for it"),
                                 HasSubstr(NameOfSession(*second, "second") + " is promised 40 blocks")));
}

// A chain's tail is held in the first slab, and its head, which nobody holds any more, lies in the last one.
TEST_F(GiveBackTest, WhatIsInFrontOfHeldBlocksIsSaid) {
  StartDaemon(2);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  const std::vector<uint64_t> all = LeaseAll(a.get(), 2 * kSlabBlocks - 2);
  const uint64_t tail =
      *std::find_if(all.begin(), all.end(), [](uint64_t block) { return IdOf(block) == 5; });
  const uint64_t head =
      *std::find_if(all.begin(), all.end(), [](uint64_t block) { return IdOf(block) == 20; });
  const std::vector<std::string> keys = Keys("chain", 2);
  a->Seal({head, tail}, keys);
  std::vector<uint64_t> others = all;
  std::erase(others, tail);
  a->Release(others);
  EXPECT_THAT(Refusal(10), HasSubstr("1 blocks are in front of such as are in use"));
}

// ---- Openings that wait

TEST_F(GiveBackTest, TheTimeOfAnOpeningThatWaitedIsObserved) {
  options_.give_back_ms = 60000;
  const auto a = Full(6);
  const auto waits = [&] { return daemon_->Snapshot().guarantee_wait; };
  const auto count = [&] {
    const HistogramSnapshot snapshot = waits();
    return std::accumulate(snapshot.counts.begin(), snapshot.counts.end(), uint64_t{0});
  };
  EXPECT_EQ(count(), 0) << "who finds what it needs does not wait";
  a->peer->on_leave = [&](const v1::SlabLeave& leave) {
    clock_.Advance(300);
    v1::SlabLeft left;
    left.set_slab(leave.slab());
    daemon_->OnSlabLeft(a->id, left);
  };
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(30, &b).ok());
  ASSERT_EQ(a->peer->leaves().size(), 2);
  EXPECT_EQ(count(), 1) << "one opening, for both slabs";
  EXPECT_DOUBLE_EQ(waits().sum, 0.6);
  const HistogramSnapshot snapshot = waits();
  const auto bucket = std::lower_bound(snapshot.bounds.begin(), snapshot.bounds.end(), 0.6);
  EXPECT_EQ(snapshot.counts[bucket - snapshot.bounds.begin()], 1);
  // One that is refused has waited, too.
  a->peer->on_leave = nullptr;
  EXPECT_THAT(Refusal(200), HasSubstr("guaranteed_blocks is 200"));
  EXPECT_EQ(count(), 1) << "more than the device has: nobody was asked";
  EXPECT_THAT(Refusal(90), HasSubstr("guaranteed_blocks is 90"));
  EXPECT_EQ(count(), 2);
  EXPECT_DOUBLE_EQ(waits().sum, 0.6) << "it could not be had, which was known at once";
}

TEST_F(GiveBackTest, AnOpeningThatWaitsSaysSoOnce) {
  options_.give_back_ms = 300;
  const auto a = Full(3);
  a->peer->on_leave = nullptr;
  testing::internal::CaptureStderr();
  std::unique_ptr<Engine> b;
  const absl::Status refused = OpenB(10, &b);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_FALSE(refused.ok());
  const size_t line = log.find("opening waits for memory");
  ASSERT_NE(line, std::string::npos) << log;
  EXPECT_EQ(log.find("opening waits for memory", line + 1), std::string::npos) << log;
  EXPECT_THAT(log.substr(line, log.find('\n', line) - line),
              AllOf(HasSubstr("client=b guaranteed_blocks=10 missing_bytes="), HasSubstr("left_out=0"),
                    HasSubstr("others=\"space " + std::to_string(Space(0).space) + " (tenant "),
                    HasSubstr("session " + std::to_string(a->opened.session()) + " (a, pid "),
                    HasSubstr("has yet to unmap a slab")));
}

TEST_F(GiveBackTest, OfManyOpeningsThatWaitNotEachSaysSo) {
  options_.give_back_ms = 200;
  const auto a = Full(3);
  const v1::MatchResult held = a->Match({NameOfId(40)});
  ASSERT_EQ(held.tokens(), 16);
  const auto lines = [&](int openings) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < openings; ++i) Refusal(10);
    const std::string log = testing::internal::GetCapturedStderr();
    std::vector<std::string> lines;
    for (size_t at = 0; (at = log.find("opening waits for memory", at)) != std::string::npos; ++at)
      lines.push_back(log.substr(at, log.find('\n', at) - at));
    return lines;
  };
  const std::vector<std::string> first = lines(7);
  ASSERT_EQ(first.size(), 5);
  EXPECT_THAT(first[0],
              AllOf(HasSubstr("left_out=0"), HasSubstr(NameOfSession(*a, "a") + " holds 1 blocks")));
  clock_.Advance(10'000);
  const std::vector<std::string> later = lines(1);
  ASSERT_EQ(later.size(), 1);
  EXPECT_THAT(later[0], HasSubstr("left_out=2"));
}

TEST_F(GiveBackTest, AnEngineThatLetsNothingBeUnmappedIsNamed) {
  engines_give_back_ = false;
  const auto a = Full(3);
  std::unique_ptr<Engine> b;
  const absl::Status refused = OpenB(10, &b);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("lets no slab be unmapped"));
  EXPECT_EQ(Space(0).blocks[static_cast<int>(BlockState::kCached)], 3 * kSlabBlocks - 2)
      << "nothing was evicted for it";
}

TEST_F(GiveBackTest, MemoryIsFreeWhenAllHaveUnmappedIt) {
  const auto a = Full(3);
  a->peer->on_leave = nullptr;  // It takes its time.
  std::unique_ptr<Engine> b;
  const absl::Status refused = OpenB(10, &b);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has yet to unmap a slab"));
  EXPECT_EQ(Used(), 3 * kSlabBlocks * kBlockBytes);
  EXPECT_EQ(scripts_[0]->alive, 3);
  EXPECT_EQ(Space(0).capacity, 2 * kSlabBlocks - 1);
  EXPECT_EQ(a->Match({NameOfId(45)}).groups(0).blocks_size(), 1) << "it goes on beside that";
  v1::SlabLeft left;
  left.set_slab(2);
  daemon_->OnSlabLeft(a->id, left);
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 2);
  EXPECT_EQ(scripts_[0]->discarded, 1);
  EXPECT_TRUE(OpenB(10, &b).ok());
  daemon_.reset();
  EXPECT_EQ(scripts_[0]->alive, 0);
  EXPECT_EQ(scripts_[0]->discarded, 1) << "engines may map the others still";
}

TEST_F(GiveBackTest, ASlabThatAMemberDoesNotUnmapInTimeIsTheSpacesAgain) {
  options_.give_back_ms = 2 * GiveBack::kLeastAnswerMs;
  const auto a = Full(3);
  a->peer->on_leave = nullptr;
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  EXPECT_EQ(Space(0).capacity, 2 * kSlabBlocks - 1);
  clock_.Advance(options_.give_back_ms);
  Settle({a.get()});
  EXPECT_EQ(a->peer->slabs().back().slab(), 2) << "it comes again";
  EXPECT_EQ(a->peer->slabs().back().id(), a->peer->slabs()[2].id());
  EXPECT_EQ(Space(0).capacity, 3 * kSlabBlocks - 1);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  EXPECT_THAT(Refusal(40),
              HasSubstr(NameOfSession(*a, "a") + " did not answer in time when memory was last asked for"));
  // It had unmapped the slab before it heard: what it says of that comes late, or not at all.
  EXPECT_EQ(a->Match({NameOfId(20)}).groups(0).blocks_size(), 1);
  a->peer->on_leave = [&](const v1::SlabLeave& leave) {
    v1::SlabLeft left;
    left.set_slab(leave.slab());
    daemon_->OnSlabLeft(a->id, left);
  };
  clock_.Advance(2000);
  EXPECT_TRUE(OpenB(10, &b).ok());
  EXPECT_FALSE(a->peer->closed().has_value()) << *a->peer->closed();
}

TEST_F(GiveBackTest, ASlabLeftThatCrossesTheSlabIsTaken) {
  const auto a = Full(3);
  a->peer->on_leave = nullptr;
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  clock_.Advance(100);
  daemon_->HousekeepOnce();  // The slab is sent again.
  v1::SlabLeft left;
  left.set_slab(2);
  daemon_->OnSlabLeft(a->id, left);
  Settle({a.get()});
  EXPECT_FALSE(a->peer->closed().has_value());
  EXPECT_EQ(Space(0).capacity, 3 * kSlabBlocks - 1);
  daemon_->OnSlabLeft(a->id, left);
  EXPECT_TRUE(a->peer->closed().has_value()) << "once is enough";
}

TEST_F(GiveBackTest, WhereAHeldBlockIsInTheWayAnotherSpaceIsAsked) {
  options_.give_back_ms = 60000;
  StartDaemon(9);
  const auto small = OpenEngine(OpenRequest("small"), "small");
  small->Release(LeaseAll(small.get(), 30));
  const uint32_t before = Space(0).slabs;
  ASSERT_GE(before, 2);
  const auto large = OpenEngine(OpenRequest("large"), "large");
  std::vector<uint64_t> blocks = LeaseAll(large.get(), (9 - before) * kSlabBlocks - 2);
  std::sort(blocks.begin(), blocks.end(), [](uint64_t x, uint64_t y) { return IdOf(x) < IdOf(y); });
  blocks.pop_back();  // The last one stays held.
  large->Release(blocks);
  ASSERT_GT(Space(1).slabs, before);
  std::unique_ptr<Engine> b;
  absl::Status opened;
  WhileTimePasses([&] { opened = OpenB(10, &b); });
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(0).slabs, before - 1);
  EXPECT_EQ(Space(1).slabs, 9 - before);
}

TEST_F(GiveBackTest, ASpaceThatNeedsItsMemoryTakesBackWhatIsWithheld) {
  const auto a = Full(3);
  const v1::MatchResult held = a->Match({NameOfId(40)});
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  EXPECT_GT(Space(0).blocks[static_cast<int>(BlockState::kWithheld)], 0);
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(40);
  const auto second = Attach("a2");
  EXPECT_TRUE(second->Open(request).ok());
  EXPECT_EQ(Space(0).blocks[static_cast<int>(BlockState::kWithheld)], 0);
}

TEST_F(GiveBackTest, WhatIsWithheldIsTakenBackInParts) {
  // So many parts that what else an opening does is little beside them.
  constexpr uint32_t kSlice = 1024, kSlab = 32 * kSlice;
  options_.slab_bytes = kSlab * kBlockBytes;
  options_.give_back_ms = 400;
  StartDaemon(2 * kSlab / kSlabBlocks);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  std::vector<uint64_t> blocks = LeaseAll(a.get(), kSlab + 10);
  const auto highest = std::max_element(blocks.begin(), blocks.end(),
                                        [](uint64_t x, uint64_t y) { return IdOf(x) < IdOf(y); });
  ASSERT_GT(IdOf(*highest), kSlab);
  blocks.erase(highest);
  a->Release(blocks);
  // Another model asks for the slab, in which a block is held.
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  const auto withheld = [&] { return Space(0).blocks[static_cast<int>(BlockState::kWithheld)]; };
  const auto holds = [&] {
    const std::vector<uint64_t> counts = Space(0).hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  };
  ASSERT_GT(withheld(), 24 * kSlice);
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(2 * kSlab - 100);
  const uint64_t parts = withheld() / kSlice, before = holds();
  const auto second = Attach("a2");
  EXPECT_TRUE(second->Open(request).ok());
  EXPECT_EQ(withheld(), 0u);
  EXPECT_GE(holds() - before, parts);
}

TEST_F(GiveBackTest, WhatAnOperatorKeepsForASpaceStays) {
  const auto a = Full(3);
  v1::SetShareRequest request;
  request.set_space(Space(0).space);
  request.set_guaranteed_blocks(3 * kSlabBlocks - 1);
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_EQ(response.previous_blocks(), 0);
  EXPECT_EQ(response.capacity_blocks(), 3 * kSlabBlocks - 1);
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  request.set_guaranteed_blocks(2 * kSlabBlocks - 1);
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Space(0).slabs, 2);
  std::unique_ptr<Engine> c;
  EXPECT_FALSE(OpenB(30, &c).ok());
  request.set_guaranteed_blocks(1 << 30);
  EXPECT_EQ(daemon_->SetShare(request, &response).code(), absl::StatusCode::kInvalidArgument);
  request.set_space(99);
  EXPECT_EQ(daemon_->SetShare(request, &response).code(), absl::StatusCode::kNotFound);
}

// It was asked for a slab, and then an operator keeps that for it: an opening does not wait for the slab, nor drains others.
TEST_F(GiveBackTest, WhatASpaceWasAskedForAndNeedsItselfIsNotWaitedFor) {
  const auto a = Full(4);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  ASSERT_EQ(Space(0).slabs, 3);
  const v1::MatchResult held = a->Match({NameOfId(45)});
  ASSERT_EQ(held.tokens(), 16);
  ASSERT_EQ(IdOf(held.groups(0).blocks(0)), 45) << "in the last slab";
  clock_.Advance(60000);
  for (int round = 0; round < 20 && Space(0).give_back.asked == 1; ++round) {
    Churn(b.get(), "b" + std::to_string(round));
    Settle({a.get(), b.get()});
  }
  ASSERT_EQ(Space(0).give_back.asked, 2) << "for the cache of b";
  ASSERT_EQ(Space(0).slabs, 3);
  v1::SetShareRequest request;
  request.set_space(Space(0).space);
  request.set_guaranteed_blocks(3 * kSlabBlocks - 1);
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  testing::internal::CaptureStderr();
  v1::OpenSession open = OpenRequest("c");
  open.set_guaranteed_blocks(10);
  const absl::Status refused = Attach("c")->Open(open);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("47 blocks are kept for it by an operator"),
                                                    Not(HasSubstr("in front of such as are in use"))));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), Not(HasSubstr("opening waits for memory")));
}

// ---- Limits and weights

TEST_F(GiveBackTest, ASpaceStaysWithinTheLimitOfItsRule) {
  Rules("space-blocks = 40");
  StartDaemon(6);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  std::vector<uint64_t> blocks;
  for (int round = 0; round < 10; ++round) {
    const v1::LeaseResult lease = a->LeaseAsked(20, 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
    Settle({a.get()});
    if (blocks.size() >= 30) break;
  }
  // Whole slabs, the null block and the sink among them.
  EXPECT_EQ(Space(0).slabs, 2);
  EXPECT_EQ(blocks.size(), 30);
  EXPECT_EQ(a->LeaseAsked(8, 0).blocks_size(), 0) << "and the rest of the device is others'";
  EXPECT_EQ(Used(), 2 * kSlabBlocks * kBlockBytes);

  const auto wish = Attach("wish");
  v1::OpenSession request = OpenRequest("b");
  request.set_guaranteed_blocks(40);
  const absl::Status refused = wish->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("guaranteed_blocks is 40"), HasSubstr("its limit is 40")));
  request.set_guaranteed_blocks(30);
  EXPECT_TRUE(wish->Open(request).ok());
}

TEST_F(GiveBackTest, ALimitThatIsReadAgainCountsAtOnce) {
  Rules("space-blocks = 63\nweight = 3");
  StartDaemon(4);
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(20);
  const auto a = OpenEngine(request, "a");
  const std::vector<uint64_t> held = LeaseAll(a.get(), 4 * kSlabBlocks - 2);
  ASSERT_EQ(Space(0).slabs, 4);
  testing::internal::CaptureStderr();
  Rules("space-blocks = 15\nweight = 2");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("terms of a space changed"), HasSubstr("rule=rule"),
                    HasSubstr("old_limit_blocks=63 limit_blocks=15"), HasSubstr("old_weight=3 weight=2")));
  EXPECT_EQ(Space(0).limit_blocks, kSlabBlocks - 1);
  EXPECT_EQ(Space(0).weight, 2);
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 4) << "all of it is held";
  a->Release({held.begin() + 1, held.end()});
  GoOn({a.get()});
  // Two slabs have room for what is held and promised, one has not.
  EXPECT_EQ(Space(0).slabs, 2);
  const std::vector<uint64_t> promised = a->Lease(19);
  EXPECT_EQ(promised.size(), 19) << "a limit takes no guarantee back";
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 2);
  Rules("space-blocks = 63\nweight = 2");
  EXPECT_EQ(LeaseAll(a.get(), 30).size(), 30);
  EXPECT_GT(Space(0).slabs, 2);
  testing::internal::CaptureStderr();
  daemon_->ApplyRules();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "nothing changed";
}

// What runs goes on, and who comes next is asked for his rule.
TEST_F(GiveBackTest, WhatARuleSaidStaysWhereItIsGone) {
  const std::string own = "\nrole = engine\ntenant = team\nspace-blocks = 31\nweight = 7\n";
  const std::string rule = "[rule]\nuid = 1000" + own, other = "[other]\nuid = 1000" + own;
  RulesAre(rule);
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  const auto waiting = Attach("a2");
  // The uid that a rule matches does not tell whose the space is: its tenant does.
  for (const std::string& gone :
       {other, std::string("[rule]\nuid = 1000\nrole = engine\ntenant = another\nweight = 9\n"),
        std::string("[rule]\nuid = 1000\nrole = observer\n"),
        std::string("[rule]\nuid = 1000\nrole = engine\ntenant = *\nweight = 9\n")}) {
    testing::internal::CaptureStderr();
    RulesAre(gone);
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("rule of a space is gone"), HasSubstr("rule=rule"), HasSubstr("weight=7")))
        << gone;
    EXPECT_EQ(Space(0).weight, 7) << gone;
    EXPECT_EQ(Space(0).limit_blocks, 31) << gone;
    EXPECT_EQ(LeaseUpTo(4, a.get(), {a.get()}).size(), 4);
  }
  RulesAre("[rule]\nuid = 1001\nrole = engine\ntenant = team\nweight = 8\n");
  EXPECT_EQ(Space(0).weight, 8) << "it is there again, and for the tenant";
  EXPECT_EQ(waiting->Open(OpenRequest("a")).code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(GiveBackTest, ATenantOfOneUidHasNoRuleOfOthers) {
  const std::string line = "\nrole = engine\ntenant = *\nweight = ";
  RulesAre("[rule]\nuid = 1000" + line + "5\n");
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  RulesAre("[rule]\nuid = 1001" + line + "6\n");
  EXPECT_EQ(Space(0).weight, 5);
  RulesAre("[rule]\nuid = 1001, 1000" + line + "6\n");
  EXPECT_EQ(Space(0).weight, 6);
  RulesAre("[rule]\nuid = *" + line + "7\n");
  EXPECT_EQ(Space(0).weight, 7);
}

// An opening that began by the rule as it was keeps what the rule says when it ends.
TEST_F(GiveBackTest, ARuleThatIsReadAgainWhileASessionOpensCounts) {
  Rules("space-blocks = 63\nweight = 5");
  options_.give_back_ms = 10'000;
  const auto a = Full(3);
  const uint64_t held = a->Match({NameOfId(40)}).groups(0).blocks(0);
  std::unique_ptr<Engine> b;
  absl::Status opened;
  std::thread opening([&] { opened = OpenB(20, &b); });
  while (daemon_->Snapshot().spaces.size() < 2 || Space(0).give_back.asked == 0) std::this_thread::yield();
  Rules("space-blocks = 47\nweight = 6");
  a->Release({held});
  opening.join();
  ASSERT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(1).weight, 6);
  EXPECT_EQ(Space(1).limit_blocks, 47);
}

TEST_F(GiveBackTest, AnOperatorComesBeforeARuleThatIsReadAgain) {
  Rules("weight = 5");
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  SetWeight(0, 9);
  Rules("weight = 6");
  EXPECT_EQ(Space(0).weight, 9);
  SetWeight(0, 0);
  EXPECT_EQ(Space(0).weight, 6);
}

TEST_F(GiveBackTest, AnOpeningThatIsRefusedLeavesTheLimitAsItWas) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  a->Release(LeaseAll(a.get(), 4 * kSlabBlocks - 2));
  RulesAre("[small]\nuid = *\nrole = engine\ntenant = *\nspace-blocks = 31\n");
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(40);
  EXPECT_EQ(Attach("a2")->Open(request).code(), absl::StatusCode::kResourceExhausted);
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 4);
}

TEST_F(GiveBackTest, WhatIsBeyondAnOperatorsLimitGoesAsFarAsNobodyHoldsIt) {
  const auto a = Full(4);
  const v1::MatchResult held = a->Match({NameOfId(40)});
  ASSERT_EQ(held.tokens(), 16);
  v1::SetShareRequest request;
  request.set_space(Space(0).space);
  request.set_keep_guaranteed(true);
  request.set_limit_blocks(20);
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_EQ(response.limit_blocks(), kSlabBlocks - 1) << "whole slabs";
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 3) << "a block of the third is held";
  a->Release({held.groups(0).blocks(0)});
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 1);
  EXPECT_EQ(a->LeaseAsked(2 * kSlabBlocks, 1).blocks_size(), static_cast<int>(kSlabBlocks) - 2);
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 1) << "it does not grow again";
  // What it is to keep must fit.
  request.set_keep_guaranteed(false);
  request.set_guaranteed_blocks(20);
  EXPECT_EQ(daemon_->SetShare(request, &response).code(), absl::StatusCode::kInvalidArgument);
  request.set_guaranteed_blocks(0);
  request.set_limit_blocks(0);
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_EQ(response.limit_blocks(), 4 * kSlabBlocks - 1);
  a->LeaseAsked(kSlabBlocks, 1);
  GoOn({a.get()});
  EXPECT_GT(Space(0).slabs, 1) << "no limit any more";
  request.set_weight(1001);
  EXPECT_EQ(daemon_->SetShare(request, &response).code(), absl::StatusCode::kInvalidArgument);
}

// Two models evict all the time. What each has in the end is by their weights, whichever was there first, and however old
// what it has is.
TEST_F(GiveBackTest, ASpaceAboveItsWeightedShareGivesFirst) {
  for (const auto& [weight_a, weight_b, slabs_a] : {std::tuple{1u, 3u, 2u}, {3u, 1u, 6u}, {1u, 1u, 4u}}) {
    daemon_.reset();
    scripts_.clear();
    const auto a = Full(8);
    std::unique_ptr<Engine> b;
    ASSERT_TRUE(OpenB(4, &b).ok());
    SetWeight(0, weight_a);
    SetWeight(1, weight_b);
    for (int round = 0; round < 60; ++round) {
      Churn(a.get(), "a" + std::to_string(round));
      Churn(b.get(), "b" + std::to_string(round));
      Settle({a.get(), b.get()});
    }
    EXPECT_EQ(Space(0).slabs, slabs_a) << weight_a << " to " << weight_b;
    EXPECT_EQ(Space(1).slabs, 8 - slabs_a) << weight_a << " to " << weight_b;
  }
}

// More models do not bring a tenant more: its two have half of its half each. What counts of a tenant is its greatest weight.
TEST_F(GiveBackTest, ATenantsWeightIsDividedAmongItsSpaces) {
  Rules("");
  const auto a = Full(16);
  std::vector<std::unique_ptr<Engine>> others;
  for (const std::string name : {"b", "c"}) {
    others.push_back(Attach(name));
    v1::OpenSession request = OpenRequest(name);
    request.set_tenant("two");
    request.set_guaranteed_blocks(1);
    ASSERT_TRUE(others.back()->Open(request).ok());
    others.back()->MapSlabs();
  }
  for (size_t space = 0; space < 3; ++space) SetWeight(space, 1);
  for (const auto& slabs : {std::tuple{8u, 4u, 4u}, {4u, 9u, 3u}}) {
    for (int round = 0; round < 120; ++round) {
      Churn(a.get(), "a" + std::to_string(round));
      for (const auto& other : others) Churn(other.get(), "other" + std::to_string(round));
      Settle({a.get(), others[0].get(), others[1].get()});
    }
    EXPECT_EQ(std::tuple(Space(0).slabs, Space(1).slabs, Space(2).slabs), slabs);
    SetWeight(1, 3);
  }
}

// One slab at a time, it would evict for long what fits into its own.
TEST_F(GiveBackTest, WhatIsASpacesOwnComesTogether) {
  const auto a = Full(20);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  ASSERT_EQ(Space(0).give_back.asked, 1) << "by the opening";
  SetWeight(0, 1);
  SetWeight(1, 1);
  for (int round = 0; round < 60; ++round) {
    Churn(b.get(), "b" + std::to_string(round));
    Settle({a.get(), b.get()});
  }
  EXPECT_EQ(Space(0).slabs, 10);
  EXPECT_EQ(Space(1).slabs, 10);
  EXPECT_LE(Space(0).give_back.asked, 3) << "nine slabs";
}

// While its own memory is with another, leases wait for it and evict nothing.
TEST_F(GiveBackTest, WhatIsASpacesOwnComesBeforeEviction) {
  const auto a = Full(8);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  SetWeight(0, 1);
  SetWeight(1, 1);
  Settle({a.get(), b.get()});
  // The null block and the sink are no part of it.
  std::vector<uint64_t> blocks;
  while (blocks.size() < 4 * kSlabBlocks - 2) {
    const auto count = std::min<uint32_t>(3, 4 * kSlabBlocks - 2 - static_cast<uint32_t>(blocks.size()));
    const v1::LeaseResult lease = b->LeaseAsked(count, 1);
    for (const uint64_t block : lease.blocks()) {
      b->Seal({block}, {Key("b" + std::to_string(blocks.size()))});
      b->Release({block});
      blocks.push_back(block);
    }
    if (lease.blocks_size() < static_cast<int>(count)) {
      EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING) << blocks.size();
      Settle({a.get(), b.get()});
      clock_.Advance(10);
    }
    ASSERT_EQ(Evicted(1), 0) << blocks.size();
  }
  EXPECT_EQ(Space(1).slabs, 4);
  EXPECT_EQ(b->LeaseAsked(3, 3).blocks_size(), 3);
  EXPECT_EQ(Evicted(1), 3) << "it has what is its own";
}

// Who has more than its own leaves room for one that has less: that one neither waits nor evicts for its next request.
TEST_F(GiveBackTest, ThoseBeyondTheirOwnLeaveAReserve) {
  const auto a = Full(32);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  const auto settle = [&] {
    for (int i = 0; i < 5; ++i) {
      Settle({a.get(), b.get()});
      clock_.Advance(10);
    }
    return Space(0).slabs + Space(1).slabs;
  };
  ASSERT_EQ(settle(), 32) << "nothing is anybody's own";
  SetWeight(0, 1);
  SetWeight(1, 1);
  EXPECT_LE(settle(), 31);
  // That room is not for the one that left it.
  const uint64_t slabs_of_a = Space(0).slabs;
  for (int i = 0; i < 4; ++i) Churn(a.get(), "a" + std::to_string(i));
  EXPECT_LE(settle(), 31);
  EXPECT_LE(Space(0).slabs, slabs_of_a);
  const std::vector<uint64_t> blocks = LeaseAll(b.get(), 2 * kSlabBlocks - 2);
  EXPECT_EQ(Evicted(1), 0);
  EXPECT_LE(settle(), 31) << "it is left again";
  b->Release(blocks);
}

// Who holds what is another's own is waited for, but not long, and not at each lease.
TEST_F(GiveBackTest, WhatOthersHoldIsWaitedForOnceInAWhile) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  const std::vector<uint64_t> held = LeaseAll(a.get(), 3 * kSlabBlocks - 2);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  ASSERT_EQ(Space(1).slabs, 1);
  SetWeight(0, 1);
  SetWeight(1, 1);
  const auto lease_all = [&] { return b->LeaseAsked(kSlabBlocks - 2, 1); };
  const auto let_go = [&](const v1::LeaseResult& lease, const std::string& name) {
    for (int i = 0; i < lease.blocks_size(); ++i) {
      b->Seal({lease.blocks(i)}, {Key(name + std::to_string(i))});
      b->Release({lease.blocks(i)});
    }
  };
  Settle({a.get(), b.get()});
  let_go(lease_all(), "first");
  ASSERT_EQ(Evicted(1), 0);
  for (uint64_t waited = 0; waited < kOwnWaitMs; waited += 50) {
    EXPECT_EQ(lease_all().shortfall(), v1::SHORTFALL_GROWING) << waited;
    Settle({a.get(), b.get()});
    EXPECT_EQ(Evicted(1), 0) << waited;
    clock_.Advance(50);
  }
  const v1::LeaseResult evicting = lease_all();
  EXPECT_EQ(evicting.shortfall(), v1::SHORTFALL_NONE);
  let_go(evicting, "second");
  clock_.Advance(kOwnPauseMs - 1);
  Settle({a.get(), b.get()});
  const v1::LeaseResult again = lease_all();
  EXPECT_EQ(again.shortfall(), v1::SHORTFALL_NONE) << "nothing came the last time";
  let_go(again, "third");
  // What was held is given back, and so there is something to wait for.
  a->Release(held);
  clock_.Advance(1);
  EXPECT_EQ(lease_all().shortfall(), v1::SHORTFALL_GROWING);
  for (int i = 0; i < 5; ++i) {
    Settle({a.get(), b.get()});
    clock_.Advance(10);
  }
  EXPECT_EQ(Space(1).slabs, 2);
}

TEST_F(GiveBackTest, ForAnOpeningTheOneWithMostForItsWeightGives) {
  Rules("space-blocks = 63");
  StartDaemon(6);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  a->Release(LeaseAll(a.get(), 4 * kSlabBlocks - 2));
  const auto c = OpenEngine(OpenRequest("c"), "c");
  c->Release(LeaseAll(c.get(), 2 * kSlabBlocks - 2));
  ASSERT_EQ(Space(0).slabs, 4);
  ASSERT_EQ(Space(1).slabs, 2);
  SetWeight(0, 5);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Space(0).slabs, 4) << "four slabs of weight 5 are less than two of weight 1";
  EXPECT_EQ(Space(1).slabs, 1);
}

TEST_F(GiveBackTest, WeightsOfRulesCount) {
  Rules("weight = 7");
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  v1::SetShareRequest request;
  request.set_space(Space(0).space);
  request.set_keep_guaranteed(true);
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_EQ(response.weight(), 7);
  request.set_weight(9);
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_EQ(response.weight(), 9) << "an operator comes first";
  request.set_weight(0);
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  EXPECT_EQ(response.weight(), 7);
}

// ---- Deadlines

// What is said is what is left, and who has not answered by then is late, once for each time that it was asked.
TEST_F(GiveBackTest, AMemberIsToldHowLongItsAnswerCounts) {
  const auto a = Full(3);
  std::vector<uint64_t> told;
  const auto answer = std::exchange(a->peer->on_leave,
                                    [&](const v1::SlabLeave& leave) { told.push_back(leave.deadline_ms()); });
  SetShare(0, [](v1::SetShareRequest* request) { request->set_limit_blocks(kSlabBlocks); });
  daemon_->HousekeepOnce();
  ASSERT_EQ(told.size(), 1);
  EXPECT_EQ(told[0], 1000);
  EXPECT_EQ(Space(0).give_back.late, 0);
  clock_.Advance(999);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Space(0).give_back.late, 0);
  testing::internal::CaptureStderr();
  clock_.Advance(1);
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string line = "memory was not given back in time";
  EXPECT_THAT(
      log, AllOf(HasSubstr(line), HasSubstr("session " + std::to_string(a->opened.session()) + " (a, pid "),
                 HasSubstr("has yet to unmap a slab")));
  EXPECT_EQ(log.find(line, log.find(line) + 1), std::string::npos) << "once: " << log;
  EXPECT_EQ(Space(0).give_back.late, 1);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  // It is asked anew, and answers in time.
  a->peer->on_leave = answer;
  GoOn({a.get()});
  EXPECT_EQ(Space(0).slabs, 1);
  EXPECT_EQ(Space(0).give_back.late, 1);
}

// What is leased in a slab is asked for with the time that is left, whenever the notice is taken.
TEST_F(GiveBackTest, ASessionIsToldHowLongItsLeasesAreWaitedFor) {
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a"), second = OpenEngine(OpenRequest("a"), "a2");
  std::vector<uint64_t> all = LeaseUpTo(3 * kSlabBlocks - 3, a.get(), {a.get(), second.get()});
  std::sort(all.begin(), all.end(), [](uint64_t one, uint64_t other) { return IdOf(one) < IdOf(other); });
  const uint64_t last = all.back();
  all.pop_back();
  a->Release(all);
  a->Pending();
  SetShare(0, [](v1::SetShareRequest* request) { request->set_limit_blocks(kSlabBlocks); });
  const auto deadline = [&](Engine* engine) {
    std::optional<uint64_t> told;
    const v1::StepResponse pending = engine->Pending();
    for (const v1::Notice& notice : pending.notices()) {
      if (notice.kind() == v1::NOTICE_KIND_REVOKE) told = notice.deadline_ms();
    }
    return told;
  };
  for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
  clock_.Advance(300);
  EXPECT_EQ(deadline(a.get()), 700);
  EXPECT_FALSE(deadline(second.get()).has_value()) << "it has leased nothing there";
  for (int i = 0; i < 6; ++i) {
    clock_.Advance(100);
    daemon_->HousekeepOnce();
  }
  EXPECT_GT(deadline(a.get()).value_or(0), 0) << "it is asked again";
  EXPECT_EQ(Space(0).give_back.late, 0);
  testing::internal::CaptureStderr();
  clock_.Advance(100);
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("has leased 1 blocks there"));
  EXPECT_EQ(Space(0).give_back.late, 1);
  a->Release({last});
  GoOn({a.get(), second.get()});
  EXPECT_EQ(Space(0).slabs, 1);
  EXPECT_EQ(Space(0).give_back.late, 1);
}

// The opening is refused then, and who kept it from memory is counted.
TEST_F(GiveBackTest, WhoKeepsAnOpeningWaitingIsLate) {
  options_.give_back_ms = 2 * GiveBack::kLeastAnswerMs;
  StartDaemon(3);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  std::vector<uint64_t> all = LeaseAll(a.get(), 3 * kSlabBlocks - 2);
  const auto last = std::max_element(all.begin(), all.end(),
                                     [](uint64_t one, uint64_t other) { return IdOf(one) < IdOf(other); });
  const uint64_t held = *last;
  all.erase(last);
  a->Release(all);
  Refusal(10);
  EXPECT_EQ(Space(0).give_back.late, 1);
  EXPECT_EQ(Space(0).give_back.missed, 1);
  Refusal(10);
  EXPECT_EQ(Space(0).give_back.late, 2);
  a->Release({held});
  std::unique_ptr<Engine> b;
  EXPECT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Space(0).give_back.late, 2);
}

// ---- Priority classes

TEST_F(GiveBackTest, SinksLieInTheFirstSlab) {
  const auto a = Full(3);
  const auto second = OpenEngine(OpenRequest("a"), "a2");
  const v1::LeaseResult lease = second->LeaseAsked(1, 1);
  ASSERT_NE(lease.sink_block(), 0);
  EXPECT_LT(IdOf(lease.sink_block()), kSlabBlocks);
}

TEST_F(GiveBackTest, RanksAllUnmap) {
  StartDaemon(3, /*devices=*/2);
  const auto rank0 = Attach("a"), rank1 = Attach("a");
  ASSERT_NO_FATAL_FAILURE(UseAll(rank0.get(), rank1.get()));
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(rank0->peer->leaves().size(), 1);
  EXPECT_EQ(rank1->peer->leaves().size(), 1);
  EXPECT_EQ(Used(0), 3 * kSlabBlocks * kBlockBytes);
  EXPECT_EQ(Used(1), 2 * kSlabBlocks * kBlockBytes);
}

TEST_F(GiveBackTest, ARankOfASessionThatClosesMeanwhileMayMapItStill) {
  StartDaemon(3, /*devices=*/2);
  const auto rank0 = Attach("a"), rank1 = Attach("a");
  ASSERT_NO_FATAL_FAILURE(UseAll(rank0.get(), rank1.get()));
  rank1->peer->on_leave = nullptr;
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  rank0->Do(CloseOp());
  daemon_->HousekeepOnce();
  EXPECT_EQ(Used(1), 3 * kSlabBlocks * kBlockBytes) << "memory that a process maps was given on";
  rank1->Die();
  EXPECT_TRUE(OpenB(10, &b).ok());
}

// Another holds all of the second device, without which the first is of no use.
TEST_F(GiveBackTest, NothingIsAskedOnOneDeviceWhileAnotherStaysFull) {
  StartDaemon(3, /*devices=*/2);
  const auto cache = Attach("a"), other = Attach("c");
  v1::OpenSession of_cache = OpenRequest("a"), of_other = OpenRequest("c");
  of_cache.add_device_uuids("mem0");
  of_other.add_device_uuids("mem1");
  ASSERT_TRUE(cache->Open(of_cache).ok());
  ASSERT_TRUE(other->Open(of_other).ok());
  const std::vector<Engine*> both = {cache.get(), other.get()};
  const std::vector<uint64_t> blocks = LeaseUpTo(46, cache.get(), both);
  for (const uint64_t block : blocks) cache->Seal({block}, {Key(NameOfId(IdOf(block)))});
  cache->Release(blocks);
  const std::vector<uint64_t> held = LeaseUpTo(46, other.get(), both);
  const uint64_t before = Evicted(0);
  const auto wide = Attach("b");
  v1::OpenSession request = OpenRequest("b");
  request.set_ranks(2);
  request.set_guaranteed_blocks(10);
  EXPECT_EQ(wide->Open(request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache->peer->leaves().size(), 0);
  EXPECT_EQ(Evicted(0), before);
  EXPECT_EQ(Space(0).slabs, 3);
}

// Likewise of a space that is short, and would get nothing: the slab would come back, and go again.
TEST_F(GiveBackTest, ASpaceOnTwoDevicesTakesNothingFromOneThatIsOnOneOfThem) {
  StartDaemon(3, /*devices=*/2);
  v1::OpenSession of_wide = OpenRequest("b"), of_cache = OpenRequest("a"), of_other = OpenRequest("c");
  of_wide.set_ranks(2);
  of_cache.add_device_uuids("mem0");
  of_other.add_device_uuids("mem1");
  const auto wide = Attach("b"), rank1 = Attach("b"), cache = Attach("a"), other = Attach("c");
  ASSERT_TRUE(wide->Open(of_wide).ok());
  ASSERT_TRUE(rank1->Join(*wide, JoinRequest(*wide, 1, "b")).ok());
  const std::vector<Engine*> all = {wide.get(), rank1.get(), cache.get(), other.get()};
  Settle({wide.get(), rank1.get()});
  ASSERT_TRUE(cache->Open(of_cache).ok());
  ASSERT_TRUE(other->Open(of_other).ok());
  for (Engine* const engine : {cache.get(), other.get()}) {
    std::vector<uint64_t> blocks;
    for (int i = 0; i < 20; ++i) {
      const v1::LeaseResult lease = engine->LeaseAsked(8, 1);
      blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
      Settle(all);
    }
    for (const uint64_t block : blocks) engine->Seal({block}, {Key(NameOfId(IdOf(block)))});
    if (engine == cache.get()) engine->Release(blocks);  // The other one uses all it has.
  }
  ASSERT_EQ(Used(0), 3 * kSlabBlocks * kBlockBytes);
  ASSERT_EQ(Used(1), 3 * kSlabBlocks * kBlockBytes);
  clock_.Advance(60'000);
  for (int i = 0; i < 20; ++i) {
    Churn(wide.get(), "x" + std::to_string(i));
    Settle(all);
    clock_.Advance(100);
  }
  EXPECT_EQ(cache->peer->leaves().size(), 0);
}

TEST_F(GiveBackTest, TheDeathOfAMemberIsAsGood) {
  const auto a = Full(3);
  a->peer->on_leave = nullptr;
  std::unique_ptr<Engine> b;
  EXPECT_FALSE(OpenB(10, &b).ok());
  a->Die();
  EXPECT_TRUE(OpenB(10, &b).ok());
}

TEST_F(GiveBackTest, ASlabLeftThatNobodyAskedForEndsTheSession) {
  const auto a = Full(3);
  v1::SlabLeft left;
  left.set_slab(2);
  daemon_->OnSlabLeft(a->id, left);
  ASSERT_TRUE(a->peer->closed().has_value());
  EXPECT_THAT(*a->peer->closed(), HasSubstr("has unmapped slab 2"));
}

TEST_F(GiveBackTest, ItGrowsAgainAndOldRefsStayOld) {
  const auto a = Full(3);
  const v1::MatchResult before = a->Match({NameOfId(45)});
  const uint64_t old = before.groups(0).blocks(0);
  a->Release({old});
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  b->Die();
  daemon_->HousekeepOnce();
  clock_.Advance(options_.idle_space_ms + 1000);
  for (int i = 0; i < 4; ++i) Settle({a.get()});
  const std::vector<uint64_t> held = a->Lease(20);
  Settle({a.get()});
  EXPECT_EQ(Space(0).slabs, 3);
  const std::vector<uint64_t> more = a->Lease(16);
  for (const uint64_t block : more) {
    if (IdOf(block) == IdOf(old)) EXPECT_NE(block, old) << "its generation goes on";
  }
  EXPECT_EQ(a->Release({old}).refused_size(), 1);
}

TEST_F(GiveBackTest, WhatIsGuaranteedStays) {
  StartDaemon(3);
  v1::OpenSession request = OpenRequest("a");
  request.set_guaranteed_blocks(44);
  const auto a = OpenEngine(request, "a");
  Settle({a.get()});
  std::unique_ptr<Engine> b;
  const absl::Status refused = OpenB(2, &b);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("all of it is held, promised or kept for it"));
  EXPECT_EQ(a->Lease(44).size(), 44);
}

TEST_F(GiveBackTest, ASpaceUnderPressureGetsTheMemoryOfOneThatIsIdle) {
  const auto a = Full(4);
  clock_.Advance(60000);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  EXPECT_EQ(Space(0).slabs, 3);
  for (int round = 0; round < 20; ++round) {
    const v1::LeaseResult lease = b->LeaseAsked(8, 1);
    const std::vector<uint64_t> blocks(lease.blocks().begin(), lease.blocks().end());
    for (size_t i = 0; i < blocks.size(); ++i) {
      b->Seal({blocks[i]}, {Key("b" + std::to_string(round) + "." + std::to_string(i))});
    }
    b->Release(blocks);
    clock_.Advance(100);
    Settle({a.get(), b.get()});
  }
  EXPECT_EQ(Space(0).slabs, 1) << "the first stays";
  EXPECT_EQ(Space(1).slabs, 3);
}

// It would have it by age alone: what it has cached is never older than a fraction of a second.
TEST_F(GiveBackTest, WhoAsksForNothingTwiceGetsNothingOfWhoDoes) {
  const auto a = Full(4);
  const uint32_t end = Space(0).capacity + 1;
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  ASSERT_EQ(Space(0).slabs, 3);
  const auto rounds = [&](int count, int between_uses) {
    for (int round = 0; round < count; ++round) {
      if (round % between_uses == 1) EXPECT_GT(Found(a.get(), 1, end), 0);
      Churn(b.get(), "b" + std::to_string(round % 64));
      Settle({a.get(), b.get()});
    }
  };
  // Until it is known of both.
  rounds(800, 3);
  const uint64_t evicted = Evicted(1);
  rounds(200, 40);
  EXPECT_EQ(Space(0).slabs, 3);
  EXPECT_GT(Evicted(1), evicted + 1000) << "it had a use for more";
  EXPECT_EQ(Found(a.get(), 1, end), Found(a.get(), 1, end));
  // Who asks for nothing any more gives, even so.
  clock_.Advance(3'600'000);
  rounds(40, 1);
  EXPECT_LT(Space(0).slabs, 3);
}

// With what it has it finds nothing, and nor would it with a slab more, or with two.
TEST_F(GiveBackTest, WhoGoesRoundThroughMoreThanItHasGetsTheMemoryOfWhoIsIdle) {
  const auto a = Full(4);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(4, &b).ok());
  EXPECT_GT(Found(a.get(), 1, Space(0).capacity + 1), 0);
  const auto serve = [&](const std::string& prompt) {
    clock_.Advance(200);
    Settle({a.get(), b.get()});
    std::vector<std::string> keys;
    for (int i = 0; i < 8; ++i) keys.push_back(Key(prompt + "." + std::to_string(i)));
    const v1::MatchResult match = b->Match(keys);
    std::vector<uint64_t> blocks(match.groups(0).blocks().begin(), match.groups(0).blocks().end());
    const size_t hits = blocks.size();
    if (hits < keys.size()) {
      const v1::LeaseResult lease = b->LeaseAsked(static_cast<uint32_t>(keys.size() - hits), 1);
      for (const uint64_t block : lease.blocks()) {
        b->Seal({block}, {keys[blocks.size()]}, blocks.empty() ? "" : keys[blocks.size() - 1]);
        blocks.push_back(block);
      }
    }
    b->Release(blocks);
    return hits == keys.size() ? 1 : 0;
  };
  std::vector<int> found(30);
  for (int& in_round : found) {
    for (int i = 0; i < 4; ++i) in_round += serve("b" + std::to_string(i));
  }
  EXPECT_EQ(found.front(), 0);
  EXPECT_EQ(found.back(), 4);
  EXPECT_EQ(Space(0).slabs, 1) << "the first stays";
}

TEST_F(GiveBackTest, TenRoundsOfTwoModelsInTurn) {
  StartDaemon(6);
  for (int round = 0; round < 10; ++round) {
    std::unique_ptr<Engine> a = Attach("a"), b;
    v1::OpenSession request = OpenRequest("a");
    request.set_guaranteed_blocks(60);
    ASSERT_TRUE(a->Open(request).ok()) << round;
    Settle({a.get()});
    const std::vector<uint64_t> blocks = LeaseAll(a.get(), 60);
    for (const uint64_t block : blocks) a->Seal({block}, {NameOf(block)});
    a->Release(blocks);
    EXPECT_EQ(a->Do(CloseOp()).code(), 0);
    const auto idle = OpenEngine(OpenRequest("a"), "idle");
    ASSERT_TRUE(OpenB(60, &b).ok()) << round;
    Settle({b.get(), idle.get()});
    EXPECT_EQ(LeaseAll(b.get(), 60).size(), 60);
    EXPECT_EQ(b->Do(CloseOp()).code(), 0);
    b->Die();
    a->Die();
    idle->Die();
    daemon_->HousekeepOnce();
  }
}

// ---- Holes

TEST_F(HolesTest, WhereABlockOfTheLastSlabIsHeldAnotherGoesAtOnce) {
  options_.give_back_ms = 60000;
  const auto a = Full(6);
  const uint64_t held = Hold(a.get(), 5);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(30, &b).ok());
  EXPECT_EQ(b->Lease(30).size(), 30);
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(Space(0).capacity, 4 * kSlabBlocks - 1);
  const std::vector<uint32_t> left = Left(*a);
  EXPECT_EQ(left, (std::vector<uint32_t>{1, 2})) << "the coldest blocks were in these";
  EXPECT_EQ(a->peer->leaves()[0].capacity_blocks(), 5 * kSlabBlocks);
  EXPECT_EQ(a->peer->leaves()[1].capacity_blocks(), 4 * kSlabBlocks);
  EXPECT_EQ(Used(), 6 * kSlabBlocks * kBlockBytes);
  // What is held is where it was, and what else is there is found there.
  EXPECT_EQ(a->Match({NameOfId(IdOf(held))}).groups(0).blocks(0), held);
  EXPECT_EQ(Found(a.get(), 64, 80), 16);
  a->Release({held, held});
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(Space(0).blocks[static_cast<int>(BlockState::kWithheld)], 0);
}

TEST_F(HolesTest, TheSameSlabComesBackAndOldRefsStayOld) {
  const auto a = Full(4);
  const uint64_t held = Hold(a.get(), 3), old = a->Match({NameOfId(20)}).groups(0).blocks(0);
  a->Release({old});
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  ASSERT_EQ(Left(*a), std::vector<uint32_t>{1});
  const v1::ReleaseResult stale = a->Release({old});
  ASSERT_EQ(stale.refused_size(), 1);
  EXPECT_EQ(stale.refused(0).code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(stale.refused(0).message(), HasSubstr("its memory was given back"));
  b->Die();
  b.reset();
  clock_.Advance(60000);
  daemon_->HousekeepOnce();
  // It comes back where it was, since that is the lowest hole.
  const std::vector<uint64_t> all = LeaseAll(a.get(), 4 * kSlabBlocks - 3);
  ASSERT_EQ(a->peer->slabs().size(), 5);
  const v1::Slab again = a->peer->slabs().back();
  EXPECT_EQ(again.slab(), 1);
  EXPECT_EQ(again.first_block(), kSlabBlocks);
  EXPECT_NE(again.id(), a->peer->slabs()[1].id());
  EXPECT_EQ(Space(0).capacity, 4 * kSlabBlocks - 1);
  uint64_t now = 0;
  for (const uint64_t block : all) {
    EXPECT_NE(block, held);
    if (IdOf(block) == 20) now = block;
  }
  ASSERT_NE(now, 0) << "the block is there again";
  EXPECT_GT(now, old);
  const v1::ReleaseResult again_stale = a->Release({old});
  ASSERT_EQ(again_stale.refused_size(), 1) << "it names another life of the block";
  EXPECT_EQ(a->Release({now}).refused_size(), 0);
  EXPECT_FALSE(a->peer->closed().has_value()) << *a->peer->closed();
}

TEST_F(HolesTest, AnEngineThatComesIntoASpaceWithAHoleMapsWhatIsThere) {
  const auto a = Full(5);
  Hold(a.get(), 4);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  ASSERT_EQ(Left(*a), std::vector<uint32_t>{1});
  const auto late = OpenEngine(OpenRequest("a"), "late");
  std::vector<uint32_t> slabs;
  for (const v1::Slab& slab : late->peer->slabs()) {
    EXPECT_EQ(slab.first_block(), slab.slab() * kSlabBlocks);
    slabs.push_back(slab.slab());
  }
  EXPECT_EQ(slabs, (std::vector<uint32_t>{0, 2, 3, 4}));
  EXPECT_EQ(late->peer->ready().back().capacity_blocks(), 4 * kSlabBlocks);
  EXPECT_GT(late->LeaseAsked(3, 3).blocks_size(), 0);
  // The next hole is beside the first one, where this engine has a slab that the other one has too.
  Hold(late.get(), 2);
  std::unique_ptr<Engine> c = Attach("c");
  v1::OpenSession request = OpenRequest("c");
  request.set_guaranteed_blocks(10);
  ASSERT_TRUE(c->Open(request).ok());
  EXPECT_EQ(Left(*late), std::vector<uint32_t>{3});
  EXPECT_EQ(Left(*a), (std::vector<uint32_t>{1, 3}));
}

TEST_F(HolesTest, EachSlabThatIsHeldStaysAndIsNamed) {
  const auto a = Full(4);
  std::vector<uint64_t> held;
  for (const uint32_t slab : {1, 2, 3}) held.push_back(Hold(a.get(), slab));
  EXPECT_THAT(Refusal(10),
              HasSubstr(NameOfSession(*a, "a") + " holds 3 blocks in 3 of the 3 slabs that could go"));
  clock_.Advance(100);
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(Space(0).blocks[static_cast<int>(BlockState::kWithheld)], 0);
  a->Release({held[1]});
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Left(*a), std::vector<uint32_t>{2});
}

TEST_F(HolesTest, TheSlabThatIsLetGoOfMeanwhileGoesInPlaceOfTheOneThatWasChosen) {
  options_.give_back_ms = 60000;
  const auto a = Full(4);
  std::vector<uint64_t> held;
  for (const uint32_t slab : {1, 2, 3}) held.push_back(Hold(a.get(), slab));
  std::unique_ptr<Engine> b;
  std::thread opening([&] { ASSERT_TRUE(OpenB(10, &b).ok()); });
  const auto withheld = [this] { return Space(0).blocks[static_cast<int>(BlockState::kWithheld)]; };
  while (withheld() == 0) std::this_thread::yield();
  // Slab 1 was chosen, in which fewest are cached, and is held on.
  a->Release({held[2]});
  // Far from the time that the chosen one has.
  for (int tick = 0; a->peer->leaves().empty() && tick < 1'000'000; ++tick) {
    if (tick < 1000) clock_.Advance(10);
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  }
  opening.join();
  EXPECT_THAT(Left(*a), testing::ElementsAre(3));
  for (const uint64_t block : {held[0], held[1]})
    EXPECT_EQ(a->Match({NameOfId(IdOf(block))}).groups(0).blocks(0), block);
}

TEST_F(HolesTest, ForAnEngineThatTakesNoHolesOnlyTheLastSlabGoes) {
  options_.give_back_ms = 500;
  engines_take_holes_ = false;
  const auto a = Full(4);
  const uint64_t held = Hold(a.get(), 3);
  EXPECT_THAT(Refusal(10), AllOf(HasSubstr("for session"), HasSubstr("only the last slab may go")));
  EXPECT_TRUE(a->peer->leaves().empty());
  a->Release({held});
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Left(*a), std::vector<uint32_t>{3});
}

TEST_F(HolesTest, AHoleIsFilledForAnEngineThatTakesNone) {
  options_.give_back_ms = 5000;
  const auto a = Full(4);
  const uint64_t held = Hold(a.get(), 3);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  ASSERT_EQ(Left(*a), std::vector<uint32_t>{1});
  engines_take_holes_ = false;
  const auto refused = Attach("old");
  const absl::Status status = refused->Open(OpenRequest("a"));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("takes no holes"), HasSubstr(NameOfSession(*b, "b"))));
  EXPECT_TRUE(refused->peer->slabs().empty());
  b->Die();
  b.reset();
  clock_.Advance(60000);
  daemon_->HousekeepOnce();
  // Slabs go out in their order only once the one in the hole was mapped by whoever is there.
  auto old = Attach("old");
  absl::Status open;
  WhileEnginesGoOn({a.get()}, [&] { open = old->Open(OpenRequest("a")); });
  ASSERT_TRUE(open.ok()) << open;
  Settle({a.get(), old.get()});
  std::vector<uint32_t> slabs;
  for (const v1::Slab& slab : old->peer->slabs()) {
    EXPECT_EQ(slab.first_block(), slab.slab() * kSlabBlocks);
    slabs.push_back(slab.slab());
  }
  EXPECT_EQ(slabs, (std::vector<uint32_t>{0, 1, 2, 3}));
  EXPECT_EQ(old->Lease(3).size(), 3);
  EXPECT_EQ(a->Match({NameOfId(IdOf(held))}).groups(0).blocks(0), held);
  EXPECT_FALSE(a->peer->closed().has_value()) << *a->peer->closed();
}

TEST_F(HolesTest, AMemberThatTakesNoHolesDoesNotJoinASessionThatHasSome) {
  const auto a = Full(4);
  Hold(a.get(), 3);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  ASSERT_EQ(Left(*a), std::vector<uint32_t>{1});
  const auto scheduler = Attach("scheduler");
  v1::OpenSession request = OpenRequest("a");
  request.mutable_role()->set_scheduler(true);
  ASSERT_TRUE(scheduler->Open(request).ok());
  engines_take_holes_ = false;
  const auto rigid = Attach("rigid");
  const absl::Status refused = rigid->Join(*scheduler, JoinRequest(*scheduler, 0, "a"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the member takes no holes"));
  EXPECT_TRUE(rigid->peer->slabs().empty());
  engines_take_holes_ = true;
  const auto worker = Attach("worker");
  ASSERT_TRUE(worker->Join(*scheduler, JoinRequest(*scheduler, 0, "a")).ok());
  Settle({a.get(), worker.get()});
  EXPECT_EQ(worker->peer->slabs().size(), 3);
  EXPECT_EQ(scheduler->Lease(2).size(), 2);
}

TEST_F(HolesTest, ASlabInTheMiddleThatIsNotUnmappedInTimeIsTheSpacesAgain) {
  const auto a = Full(4);
  const uint64_t held = Hold(a.get(), 3);
  const auto unmap = std::exchange(a->peer->on_leave, nullptr);
  EXPECT_THAT(Refusal(10), HasSubstr("has yet to unmap a slab"));
  EXPECT_EQ(Space(0).capacity, 3 * kSlabBlocks - 1);
  clock_.Advance(100);
  Settle({a.get()});
  EXPECT_EQ(a->peer->slabs().back().slab(), 1) << "it comes again";
  EXPECT_EQ(a->peer->slabs().back().first_block(), kSlabBlocks);
  EXPECT_EQ(a->peer->slabs().back().id(), a->peer->slabs()[1].id());
  EXPECT_EQ(Space(0).capacity, 4 * kSlabBlocks - 1);
  a->peer->on_leave = unmap;
  clock_.Advance(2000);
  std::unique_ptr<Engine> b;
  EXPECT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(a->Match({NameOfId(IdOf(held))}).groups(0).blocks(0), held);
  EXPECT_FALSE(a->peer->closed().has_value()) << *a->peer->closed();
}

TEST_F(HolesTest, TenRoundsOfTwoModelsInTurnWithABlockOfTheLastSlabHeld) {
  options_.give_back_ms = 60000;
  const auto a = Full(6);
  const uint64_t held = Hold(a.get(), 5);
  for (int round = 0; round < 10; ++round) {
    std::unique_ptr<Engine> b;
    ASSERT_TRUE(OpenB(40, &b).ok()) << round;
    ASSERT_EQ(b->Lease(40).size(), 40) << round;
    EXPECT_LE(Space(0).slabs, 3) << round;
    ASSERT_EQ(a->Match({NameOfId(IdOf(held))}).groups(0).blocks(0), held) << round;
    a->Release({held});
    b->Die();
    b.reset();
    clock_.Advance(60000);
    daemon_->HousekeepOnce();
    const std::vector<uint64_t> blocks = LeaseAll(a.get(), 6 * kSlabBlocks - 3);
    for (const uint64_t block : blocks) a->Seal({block}, {NameOf(block)});
    a->Release(blocks);
    Settle({a.get()});
    ASSERT_EQ(Space(0).slabs, 6) << round;
  }
  EXPECT_FALSE(a->peer->closed().has_value()) << *a->peer->closed();
}

}  // namespace
}  // namespace kvpool
