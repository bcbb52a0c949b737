// Slabs: who makes them, who must map them before they count, and what happens when one can't be had.
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "server/space/space_geometry.h"
#include "tests/service/growth_fixture.h"

namespace kvpool {
namespace {

TEST_F(GrowthTest, ASessionLeasesOnlyWhatItsMembersMapped) {
  StartDaemon(4);
  const auto engine = Attach();
  ASSERT_TRUE(engine->Open(OpenRequest()).ok());
  ASSERT_EQ(engine->peer->slabs().size(), 1);
  EXPECT_EQ(engine->peer->fds(), 1);
  const v1::Slab slab = engine->peer->slabs()[0];
  EXPECT_EQ(slab.block_count(), kSlabBlocks);
  EXPECT_EQ(slab.bytes(), kSlabBlocks * kBlockBytes);
  v1::LeaseResult lease = engine->LeaseAsked(1, 1);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
  EXPECT_EQ(lease.sink_block(), 0);
  EXPECT_EQ(engine->Match(Keys("a", 1)).miss(), v1::MISS_REASON_GROWING);
  engine->MapSlabs();
  ASSERT_EQ(engine->peer->ready().size(), 1);
  EXPECT_EQ(engine->peer->ready()[0].capacity_blocks(), kSlabBlocks);
  EXPECT_EQ(engine->LeaseAsked(1, 1).blocks_size(), 1);
}

TEST_F(GrowthTest, GrowsAheadOfDemandUpToTheBudget) {
  StartDaemon(3);
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(Space().slabs, 1);
  engine->Lease(11);  // 3 of 15 are free: fewer than a quarter of a slab.
  daemon_->HousekeepOnce();
  EXPECT_EQ(Space().slabs, 2);
  EXPECT_EQ(Space().capacity, 15) << "not mapped yet";
  engine->MapSlabs();
  EXPECT_EQ(Space().capacity, 31);
  const v1::StepResponse told = engine->Pending();
  ASSERT_EQ(told.notices_size(), 1);
  EXPECT_EQ(told.notices(0).kind(), v1::NOTICE_KIND_CAPACITY);
  EXPECT_EQ(told.notices(0).value(), 31);
  engine->Lease(16);
  Settle({engine.get()});
  EXPECT_EQ(Space().capacity, 47);
  EXPECT_EQ(Used(), 3 * kSlabBlocks * kBlockBytes);
  EXPECT_EQ(engine->LeaseAsked(30, 1).blocks_size(), 19);
}

TEST_F(GrowthTest, AtMostEightFramesAreUnacknowledged) {
  StartDaemon(32);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(300);
  const auto engine = Attach();
  ASSERT_TRUE(engine->Open(request).ok());
  EXPECT_EQ(Space().slabs, 19);
  EXPECT_EQ(engine->peer->slabs().size(), 8);
  Ack(engine.get(), 0);
  EXPECT_EQ(engine->peer->slabs().size(), 9);
  Ack(engine.get(), 3);
  Ack(engine.get(), 2);
  EXPECT_EQ(engine->peer->slabs().size(), 11);
  EXPECT_EQ(engine->peer->ready().size(), 1) << "slab 1 is not mapped";
  Ack(engine.get(), 1);
  EXPECT_EQ(engine->peer->ready().size(), 4);
  EXPECT_EQ(engine->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING);
  engine->mapped = 4;
  engine->MapSlabs();
  EXPECT_EQ(engine->peer->slabs().size(), 19);
  EXPECT_EQ(engine->LeaseAsked(300, 300).blocks_size(), 300);
}

TEST_F(GrowthTest, TheWindowIsOfTheSessionNotOfEachRank) {
  StartDaemon(16, /*devices=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  request.set_guaranteed_blocks(150);
  const auto rank0 = Attach(), rank1 = Attach();
  ASSERT_TRUE(rank0->Open(request).ok());
  EXPECT_EQ(rank0->peer->slabs().size(), 8);
  ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1)).ok());
  EXPECT_EQ(rank1->peer->slabs().size(), 0);
  Ack(rank0.get(), 0);
  Ack(rank0.get(), 1);
  EXPECT_EQ(rank1->peer->slabs().size(), 2) << "the rank that is behind comes first";
  EXPECT_EQ(rank0->peer->slabs().size(), 8);
  rank0->mapped = 2;
  Settle({rank0.get(), rank1.get()});
  EXPECT_EQ(rank0->LeaseAsked(150, 150).blocks_size(), 150);
}

TEST_F(GrowthTest, AllRanksOrNone) {
  StartDaemon(4, /*devices=*/2);
  scripts_[1]->fail_after = 0;
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const absl::Status refused = Attach()->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.message()).find("rank 1: out of memory: 16384 bytes asked for, 0 free"),
            std::string::npos)
      << refused;
  EXPECT_EQ(scripts_[0]->alive, 0);
  EXPECT_EQ(Used(0) + Used(1), 0);
  scripts_[1]->fail_after = 1;
  const auto rank0 = OpenEngine(request), rank1 = Attach();
  ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1)).ok());
  Settle({rank0.get(), rank1.get()});
  rank0->Lease(14);
  Settle({rank0.get(), rank1.get()});
  EXPECT_EQ(Space().slabs, 1) << "rank 1 has no second slab";
  EXPECT_EQ(scripts_[0]->alive, 1);
  EXPECT_EQ(Used(0), Used(1));
  EXPECT_EQ(Space().counters.growth_failures, 1);
  EXPECT_EQ(rank0->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_PRESSURE)
      << "it goes on at its present capacity";
  scripts_[1]->fail_after = -1;
  clock_.Advance(10000);
  Settle({rank0.get(), rank1.get()});
  EXPECT_EQ(Space().slabs, 2) << "asked again later";
}

TEST_F(GrowthTest, JoiningASpaceNeedsAllOfItsSlabs) {
  StartDaemon(4);
  const auto old = OpenEngine(OpenRequest(), "old");
  old->Lease(14);
  Settle({old.get()});
  old->Seal(old->Lease(1), Keys("a", 1));
  const auto young = Attach("young");
  ASSERT_TRUE(young->Open(OpenRequest()).ok());
  EXPECT_EQ(young->peer->slabs().size(), 2);
  Ack(young.get(), 0);
  EXPECT_EQ(young->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING);
  EXPECT_EQ(young->Match(Keys("a", 1)).tokens(), 0);
  EXPECT_EQ(old->LeaseAsked(1, 1).blocks_size(), 1) << "others don't notice";
  Ack(young.get(), 1);
  EXPECT_EQ(young->Match(Keys("a", 1)).tokens(), 16);
}

TEST_F(GrowthTest, ANewSlabWaitsForEveryReadySession) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a"), b = OpenEngine(OpenRequest(), "b");
  a->Lease(12);
  daemon_->HousekeepOnce();
  a->MapSlabs();
  EXPECT_EQ(Space().capacity, 15) << "b has not mapped it";
  EXPECT_EQ(a->peer->ready().size(), 1);
  b->MapSlabs();
  EXPECT_EQ(Space().capacity, 31);
  EXPECT_EQ(a->peer->ready().size(), 2);
  EXPECT_EQ(b->peer->ready().size(), 2);
}

TEST_F(GrowthTest, AStoppedProcessHoldsUpNobodyForLong) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a"), stopped = OpenEngine(OpenRequest(), "stopped");
  a->Lease(12);
  daemon_->HousekeepOnce();
  a->MapSlabs();
  clock_.Advance(500);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Space().capacity, 15);
  EXPECT_EQ(a->LeaseAsked(8, 0).blocks_size(), 1) << "what there is, without waiting";
  clock_.Advance(500);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Space().capacity, 31);
  EXPECT_EQ(a->Lease(8).size(), 8);
  // It wakes up: answers to it name the new slab only once it is mapped.
  EXPECT_EQ(stopped->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING);
  stopped->MapSlabs();
  EXPECT_EQ(stopped->LeaseAsked(1, 1).blocks_size(), 1);
}

// Seals go on, but answer no block that the session could not read.
TEST_F(GrowthTest, ASessionThatIsBehindIsAnsweredNoBlockItHasNotMapped) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a"), behind = OpenEngine(OpenRequest(), "behind");
  const std::vector<uint64_t> own = behind->Lease(4);
  const std::vector<uint64_t> near = a->Lease(1);
  a->Lease(8);
  daemon_->HousekeepOnce();
  a->MapSlabs();
  clock_.Advance(1000);
  daemon_->HousekeepOnce();
  ASSERT_EQ(Space().capacity, 31);
  ASSERT_EQ(behind->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING);
  uint64_t far = 0;
  while (uint32_t(far) < kSlabBlocks) far = a->Lease(1)[0];
  a->Seal({far}, {Key("far")});
  a->Seal(near, {Key("near")});

  v1::SealResult sealed =
      behind->Seal({own[0], own[1], own[2], own[3]}, {Key("x"), Key("far"), Key("near"), Key("y")});
  ASSERT_EQ(sealed.canonical_size(), 4);
  EXPECT_EQ(sealed.canonical(0), own[0]);
  EXPECT_EQ(sealed.canonical(1), 0);
  EXPECT_EQ(sealed.canonical(2), near[0]) << "in the slab that it has mapped";
  EXPECT_EQ(sealed.canonical(3), own[3]);
  ASSERT_EQ(sealed.refused_size(), 1);
  EXPECT_EQ(sealed.refused(0).index(), 1);
  EXPECT_EQ(sealed.refused(0).code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(sealed.refused(0).message(),
            "the key is that of block " + std::to_string(uint32_t(far)) +
                ", in a slab that a member of the session has not mapped yet: seal again when it has");
  EXPECT_EQ(behind->Release({far}).refused_size(), 1) << "it was given no hold on it";
  EXPECT_EQ(behind->Seal({own[1]}, {Key("far")}, Key("x")).canonical(0), 0);
  v1::Operation left = SealOp({own[1]}, {Key("far")}, Key("x"));
  left.mutable_seal()->set_leave_duplicates(true);
  EXPECT_EQ(behind->Do(left).seal().refused_size(), 0) << "of a duplicate that is left it needs no mapping";
  behind->MapSlabs();
  sealed = behind->Seal({own[1]}, {Key("far")}, Key("x"));
  EXPECT_EQ(sealed.canonical(0), far);
  EXPECT_EQ(behind->Release({far, own[1]}).refused_size(), 0);
}

TEST_F(GrowthTest, AGuaranteeMayRestOnASlabThatOthersHaveYetToMap) {
  const auto [a, b] = OpenPending();
  EXPECT_EQ(Space().slabs, 2);
  EXPECT_EQ(b->LeaseAsked(10, 10).shortfall(), v1::SHORTFALL_GROWING) << "a has not mapped it";
  EXPECT_EQ(b->Release({uint64_t{1} << 32 | 1}).refused_size(), 1)
      << "it holds nothing, and can say nothing wrong";
  a->MapSlabs();
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 7) << "31 - 13 held - 11 promised";
  EXPECT_EQ(b->LeaseAsked(10, 10).blocks_size(), 10);
}

// Its first slab is leased by nobody else while the second is on its way.
TEST_F(GrowthTest, AGuaranteeMayRestOnSeveralSlabs) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a");
  a->Lease(12);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(30);
  const auto b = OpenEngine(request, "b");
  ASSERT_EQ(Space().slabs, 3) << "2 are free, 32 to come, and 31 promised with its sink";
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 0);
  Ack(a.get(), 1);
  ASSERT_EQ(Space().capacity, 31);
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 0);
  EXPECT_EQ(b->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING) << "its guarantee is not whole";
  Ack(a.get(), 2);
  ASSERT_EQ(Space().capacity, 47);
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 3);
  EXPECT_EQ(b->LeaseAsked(30, 30).blocks_size(), 30);
}

// For each sink the first slab is looked through.
TEST_F(GrowthTest, SessionsThatBecomeReadyAtOnceGetTheirSinksAFewAtATime) {
  constexpr uint32_t kSlab = 64;
  constexpr size_t kSessions = 20, kTogether = 8;
  options_.slab_bytes = kSlab * kBlockBytes;
  StartDaemon(3 * kSlab / kSlabBlocks);
  const auto a = OpenEngine(OpenRequest(), "a");
  std::vector<uint64_t> blocks;
  while (blocks.size() < 2 * kSlab - 2) {
    const v1::LeaseResult lease = a->LeaseAsked(static_cast<uint32_t>(2 * kSlab - 2 - blocks.size()), 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
    daemon_->HousekeepOnce();
    if (a->peer->slabs().size() > 1 && Space().capacity < kSlab) Ack(a.get(), 1);
  }
  for (const uint64_t block : blocks) a->Seal({block}, {Key(std::to_string(block))});
  a->Release(blocks);
  // What there is is promised to one, and the others wait for the third slab, which a has yet to map.
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(2 * kSlab - 3);
  const auto first = OpenEngine(request, "first");
  std::vector<std::unique_ptr<Engine>> others;
  while (others.size() < kSessions) others.push_back(OpenEngine(OpenRequest(), "other"));
  const auto ready = [&] {
    return std::count_if(others.begin(), others.end(),
                         [](const auto& other) { return other->member->session->ready; });
  };
  ASSERT_EQ(ready(), 0);
  Ack(a.get(), 2);
  EXPECT_EQ(ready(), kTogether);
  for (size_t i = 0; i < kSessions / kTogether; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(ready(), kSessions);
  for (const auto& other : others) EXPECT_LT(Index(other->member->session->sink.id), kSlab);
}

TEST_F(GrowthTest, SeveralGuaranteesRestOnDifferentSlabs) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a");
  a->Lease(12);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(19);
  const auto b = OpenEngine(request, "b"), c = OpenEngine(request, "c");
  ASSERT_EQ(Space().slabs, 4) << "2 are free, and 20 promised to each";
  request.set_guaranteed_blocks(10);
  EXPECT_EQ(Attach()->Open(request).code(), absl::StatusCode::kResourceExhausted)
      << "50 - 40 are left, not 11";
  Ack(a.get(), 1);
  EXPECT_EQ(b->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING);
  b->Die();
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 0) << "what b was promised is c's, which waits as well";
  Ack(a.get(), 2);
  EXPECT_EQ(c->LeaseAsked(19, 19).blocks_size(), 19);
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 14);
}

TEST_F(GrowthTest, ASlabWaitsNoLongerForASessionThatEnds) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a"), b = OpenEngine(OpenRequest(), "b");
  a->Lease(12);
  daemon_->HousekeepOnce();
  a->MapSlabs();
  EXPECT_EQ(Space().capacity, 15);
  b->Die();
  EXPECT_EQ(Space().capacity, 31);
}

// More than one turn gives back.
TEST_F(GrowthTest, WhatALargeSessionHeldComesBackInSlices) {
  StartDaemon(256);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(4000);
  const auto first = OpenEngine(request, "first");
  Settle({first.get()});
  ASSERT_EQ(first->Lease(4000).size(), 4000);
  EXPECT_EQ(first->Do(CloseOp()).close_session().released_blocks(), 4000);
  EXPECT_GT(Blocks().free(), 1000);
  EXPECT_LT(Blocks().free(), 3000);
  // An engine that starts again has its guarantee at once.
  const auto second = OpenEngine(request, "second");
  Settle({second.get()});
  EXPECT_EQ(second->Lease(4000).size(), 4000);
  daemon_->OnHangup(second->id);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().quarantined(), 4001);
  daemon_->OnProcessDead(second->id);
  EXPECT_EQ(Space().sessions, 0);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
}

TEST_F(GrowthTest, APendingSessionMayEnd) {
  const auto [a, b] = OpenPending();
  b->Die();
  a->MapSlabs();
  EXPECT_EQ(Space().capacity, 31);
  EXPECT_EQ(a->LeaseAsked(31, 0).blocks_size(), 18);
  EXPECT_EQ(Space().sessions, 1);
}

TEST_F(GrowthTest, AnOpeningThatFailsLeavesNothingBehind) {
  StartDaemon(4);
  scripts_[0]->fail_after = 1;
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(40);
  EXPECT_EQ(Attach()->Open(request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(scripts_[0]->alive, 0) << "the one slab that was had went back";
  EXPECT_EQ(Used(), 0);
  scripts_[0]->fail_after = -1;
  request.mutable_layout()->set_block_bytes(2048);
  EXPECT_TRUE(Attach()->Open(request).code() == absl::StatusCode::kResourceExhausted) << "40 of 31 blocks";
  request.set_guaranteed_blocks(20);
  EXPECT_TRUE(Attach()->Open(request).ok()) << "nobody used the first layout under this fingerprint";
}

TEST_F(GrowthTest, ACorruptedPoolIsNeverServed) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto newcomer = Attach();
  daemon_->HousekeepOnce();
  scripts_[0]->lost = true;
  EXPECT_DEATH(newcomer->Open(OpenRequest()).IgnoreError(),
               "space 1: sending slab 0: DATA_LOSS: CUDA_ERROR_ECC_UNCORRECTABLE");
  const std::vector<uint64_t> blocks = engine->Lease(14);
  EXPECT_DEATH(daemon_->HousekeepOnce(), "space 1: rank 0: DATA_LOSS: CUDA_ERROR_ECC_UNCORRECTABLE");
  engine->Release(blocks);
  daemon_->HousekeepOnce();  // Nobody wants anything of the device …
  clock_.Advance(1000);      // … and it is looked after all the same.
  EXPECT_DEATH(daemon_->HousekeepOnce(), "device mem0: DATA_LOSS: CUDA_ERROR_ECC_UNCORRECTABLE");
}

TEST_F(GrowthTest, ASlabThatCanNotBeSentEndsTheSession) {
  StartDaemon(4);
  scripts_[0]->fail_export = true;
  const auto engine = Attach();
  ASSERT_TRUE(engine->Open(OpenRequest()).ok());
  EXPECT_EQ(engine->peer->closed(), "session 1 ended: slab 0 could not be sent: dup: Too many open files");
  EXPECT_EQ(daemon_->Snapshot().sessions_ended.at("unsent_slab"), 1);
  scripts_[0]->fail_export = false;
  EXPECT_EQ(OpenEngine(OpenRequest())->LeaseAsked(1, 1).blocks_size(), 1);
}

TEST_F(GrowthTest, TheLastSlabIsWhatIsLeft) {
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  request.set_max_space_bytes(3 * kSlabBlocks * kBlockBytes / 2);
  const auto engine = OpenEngine(request);
  EXPECT_EQ(engine->opened.max_blocks(), 16) << "a slab can't be smaller than a granule";
  request = OpenRequest("larger");
  request.set_max_space_bytes(kBlockBytes);
  EXPECT_EQ(Attach()->Open(request).message(),
            "layout.block_bytes is 1024: with the null block a space needs at least 16384 bytes on each "
            "rank, 1024 may "
            "be used");
}

TEST_F(GrowthTest, IpcSpacesAreOneAllocation) {
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  request.set_kind(v1::SPACE_KIND_IPC);
  const auto engine = OpenEngine(request);
  EXPECT_EQ(engine->opened.kind(), v1::SPACE_KIND_IPC);
  ASSERT_EQ(engine->peer->slabs().size(), 1);
  EXPECT_EQ(engine->peer->fds(), 0);
  EXPECT_EQ(engine->peer->slabs()[0].ipc_handle().size(), 64);
  EXPECT_EQ(engine->peer->slabs()[0].block_count(), 64);
  engine->Lease(62);
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 1);
}

TEST_F(GrowthTest, AnIpcSpaceTakesWhatIsLeftAndNoMoreLater) {
  StartDaemon(4);
  const auto other = OpenEngine(OpenRequest("other"));
  v1::OpenSession request = OpenRequest();
  request.set_kind(v1::SPACE_KIND_IPC);
  const auto engine = OpenEngine(request);
  EXPECT_EQ(engine->peer->slabs()[0].block_count(), 48);
  other->Die();
  engine->Lease(46);
  clock_.Advance(4000 * 1000);
  Settle({engine.get()});
  EXPECT_EQ(engine->peer->slabs().size(), 1);
}

TEST_F(GrowthTest, BackgroundReclaimKeepsTheWatermarks) {
  options_.low_watermark = 0.2;
  options_.high_watermark = 0.4;
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(14);
  for (int i = 0; i < 14; ++i) engine->Seal({blocks[i]}, {Key("r" + std::to_string(i))});
  engine->Release(blocks);
  EXPECT_EQ(Blocks().free(), 0);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().free(), 6);
  EXPECT_EQ(Space().pool.evicted[static_cast<int>(EvictReason::kBackground)], 6);
}

TEST_F(GrowthTest, WithoutALowWatermarkOnlyLeasesEvict) {
  options_.low_watermark = options_.high_watermark = 0;
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(14);
  for (int i = 0; i < 14; ++i) engine->Seal({blocks[i]}, {Key("r" + std::to_string(i))});
  engine->Release(blocks);
  EXPECT_EQ(Blocks().free(), 0);
  daemon_->FollowUp(engine->member);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().cached(), 14);
  engine->Lease(1);
  daemon_->FollowUp(engine->member);
  EXPECT_EQ(Space().pool.evicted[static_cast<int>(EvictReason::kDirect)], 1);
  EXPECT_EQ(Space().pool.evicted[static_cast<int>(EvictReason::kBackground)], 0);
}

// What few blocks are short is not worth the waking of a thread.
TEST_F(GrowthTest, ABatchTidiesUpAfterItself) {
  options_.low_watermark = 0.2;
  options_.high_watermark = 0.4;
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(11);
  for (int i = 0; i < 11; ++i) engine->Seal({blocks[i]}, {Key("r" + std::to_string(i))});
  engine->Release(blocks);
  v1::StepRequest request;
  request.set_sequence(++engine->sequence);
  v1::StepResponse response;
  EXPECT_FALSE(daemon_->Apply(engine->member, request, &response)) << "3 of 15 are free, the low watermark";
  request.set_sequence(++engine->sequence);
  *request.add_operations() = LeaseOp(1);
  EXPECT_TRUE(daemon_->Apply(engine->member, request, &response));
  EXPECT_EQ(Blocks().free(), 2) << "not before the answer is on its way";
  daemon_->FollowUp(engine->member);
  EXPECT_EQ(Blocks().free(), 6);
  EXPECT_EQ(Space().pool.evicted[static_cast<int>(EvictReason::kBackground)], 4);
}

TEST_F(GrowthTest, OnHostMemory) {
  options_.housekeeping_thread = false;
  options_.slab_bytes = 2 << 20;
  options_.device_capacity_bytes = {4 << 20};
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(MakeHostDevice({.capacity_bytes = 4 << 20, .try_huge_pages = false}));
  daemon_ = Daemon::Start(options_, std::move(devices), &clock_).value();
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(engine->peer->fds(), 1);
  EXPECT_EQ(engine->LeaseAsked(100, 100).blocks_size(), 100);
}

TEST(GeometryTest, StrideIsPaddedByTheLeastThatFits) {
  const auto compute = [](uint64_t block, uint64_t limit) {
    return ComputeGeometry({.block_bytes = block,
                            .granularity_bytes = 2 << 20,
                            .slab_limit_bytes = limit,
                            .max_bytes = uint64_t{1} << 40});
  };
  // A power of two needs no padding.
  absl::StatusOr<SpaceGeometry> geometry = compute(1 << 20, 64 << 20);
  EXPECT_EQ(geometry->block_stride_bytes, 1 << 20);
  EXPECT_EQ(geometry->unit_bytes, 2 << 20);
  EXPECT_EQ(geometry->slab_bytes, 64 << 20);
  // 61 layers of a 576-wide latent, 64 tokens, bf16: 4,497,408 bytes = 2^12 * 1098, whose lcm with 2 MiB is
  // 2.3 GB.
  geometry = compute(4497408, 256 << 20);
  EXPECT_EQ(geometry->block_stride_bytes % (64 << 10), 0);
  EXPECT_LE(geometry->unit_bytes, 256 << 20);
  EXPECT_LT(geometry->block_stride_bytes - 4497408, 64 << 10);
  EXPECT_EQ(geometry->unit_bytes % geometry->block_stride_bytes, 0);
  EXPECT_EQ(geometry->unit_bytes % (2 << 20), 0);
  // A block larger than the limit is a slab by itself.
  geometry = compute((100 << 20) + 1, 64 << 20);
  EXPECT_EQ(geometry->block_stride_bytes, 102 << 20);
  EXPECT_EQ(geometry->slab_bytes, 102 << 20);
  // Ids have 32 bits.
  geometry = ComputeGeometry({.block_bytes = 64,
                              .granularity_bytes = 2 << 20,
                              .slab_limit_bytes = 64 << 20,
                              .max_bytes = uint64_t{1} << 60});
  EXPECT_LE(geometry->max_blocks, UINT32_MAX - 1);
  EXPECT_GT(geometry->max_blocks, 4000000000u);
}

// The process has 256 MiB of addresses more than it uses while this lives.
class FewAddresses {
 public:
  FewAddresses() {
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit few = before_;
    few.rlim_cur = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + (256 << 20);
    EXPECT_EQ(setrlimit(RLIMIT_AS, &few), 0);
  }
  ~FewAddresses() { EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0); }
  FewAddresses(const FewAddresses&) = delete;
  FewAddresses& operator=(const FewAddresses&) = delete;

 private:
  rlimit before_{};
};

// Blocks of 64 bytes in 4 GiB: 64 Mi of them, of which each has a record.
class SmallBlocksTest : public GrowthTest {
 protected:
  void SetUp() override {
    options_.policy = "lru";
    StartDaemon(1 << 18);
    small_.mutable_layout()->set_block_bytes(64);
  }
  v1::OpenSession small_ = OpenRequest();
};

TEST_F(SmallBlocksTest, TablesThatTheSystemHasNoAddressesForRefuseTheOpening) {
  {
    const FewAddresses few;
    const absl::Status status = Attach()->Open(small_);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(
        std::string(status.message()),
        testing::ContainsRegex("a space of 67108864 blocks, .*: cannot reserve [0-9]+ bytes of addresses: "
                               "Cannot allocate memory"));
    EXPECT_TRUE(daemon_->Snapshot().spaces.empty());
  }
  EXPECT_EQ(OpenEngine(small_)->Lease(1).size(), 1);
}

TEST_F(SmallBlocksTest, TablesThatTheSystemHasNoAddressesForKeepThePolicy) {
  const auto engine = OpenEngine(small_);
  v1::SetPolicyRequest request;
  request.set_policy("s3_fifo");
  v1::SetPolicyResponse response;
  {
    const FewAddresses few;
    const absl::Status status = daemon_->SetPolicy(request, &response);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(Space().policy, "lru");
  }
  EXPECT_TRUE(daemon_->SetPolicy(request, &response).ok());
  EXPECT_EQ(Space().policy, "s3_fifo");
}

}  // namespace
}  // namespace kvpool
