// Growth before eviction: whoever is short of blocks gets those of a new slab while the space can have one, and nothing
// that is cached leaves before.
#include <numeric>
#include <string>
#include <vector>

#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class GrowFirstTest : public ServiceTest {
 protected:
  SpaceSnapshot Space() { return daemon_->Snapshot().spaces.at(0); }
  uint64_t Evicted() {
    const EvictedBlocks evicted = Space().pool.evicted;
    return std::accumulate(evicted.begin(), evicted.end(), uint64_t{0});
  }
  // So many blocks more, each of a prefix of its own.
  void Cache(Engine* engine, int count) {
    const std::vector<uint64_t> blocks = engine->Lease(count);
    for (const uint64_t block : blocks) engine->Seal({block}, {Key("cached " + std::to_string(++cached_))});
    engine->Release(blocks);
  }

  int cached_ = 0;
};

// While a slab is on its way nothing is evicted for a lease.
TEST_F(GrowFirstTest, GrowthAgainstMatch) {
  StartDaemon(3);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), 14);
  v1::LeaseResult lease = engine->LeaseAsked(2, 1);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
  EXPECT_EQ(lease.blocks_size(), 0);
  EXPECT_EQ(Blocks().cached(), 14);
  daemon_->HousekeepOnce();
  EXPECT_EQ(engine->Match({Key("cached 1")}).tokens(), 16) << "a match needs no slab";
  clock_.Advance(999);
  EXPECT_EQ(engine->LeaseAsked(2, 1).shortfall(), v1::SHORTFALL_GROWING);
  clock_.Advance(1);
  daemon_->HousekeepOnce();
  ASSERT_EQ(Space().capacity, 31) << "it waits for no one any more";
  EXPECT_EQ(engine->LeaseAsked(2, 1).shortfall(), v1::SHORTFALL_GROWING) << "but this session does";
  engine->MapSlabs();
  EXPECT_EQ(engine->LeaseAsked(2, 1).shortfall(), v1::SHORTFALL_NONE);
  EXPECT_EQ(Evicted(), 0);
}

// The housekeeper's thread is in a call of the driver that does not come back.
TEST_F(GrowFirstTest, AGrowthThatMakesNoStepIsWaitedForNoLonger) {
  StartDaemon(3);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), 14);
  EXPECT_EQ(engine->LeaseAsked(2, 1).shortfall(), v1::SHORTFALL_GROWING);
  clock_.Advance(1999);
  EXPECT_EQ(engine->LeaseAsked(2, 1).shortfall(), v1::SHORTFALL_GROWING);
  EXPECT_EQ(Evicted(), 0);
  clock_.Advance(1);
  EXPECT_EQ(engine->LeaseAsked(2, 1).blocks_size(), 2);
  EXPECT_EQ(Evicted(), 2);
  Settle({engine.get()});
  EXPECT_EQ(engine->LeaseAsked(2, 1).shortfall(), v1::SHORTFALL_NONE);
  EXPECT_EQ(Evicted(), 2);
}

// More than is free is asked for while plenty is: growth, which nobody wanted so far, comes before eviction.
TEST_F(GrowFirstTest, ALeaseOfMoreThanIsFreeGrowsTheSpaceAndEvictsNothing) {
  StartDaemon(4);
  const auto first = OpenEngine(OpenRequest(), "first"), second = OpenEngine(OpenRequest(), "second");
  Cache(first.get(), 7);
  ASSERT_EQ(Blocks().free(), 6) << "more than a quarter of a slab";
  v1::LeaseResult lease = second->LeaseAsked(8, 1);
  EXPECT_EQ(lease.blocks_size(), 6);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
  EXPECT_EQ(second->LeaseAsked(8, 8).shortfall(), v1::SHORTFALL_GROWING);
  Settle({first.get(), second.get()});
  lease = second->LeaseAsked(8, 8);
  EXPECT_EQ(lease.blocks_size(), 8);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_NONE);
  EXPECT_EQ(Blocks().cached(), 7);
  EXPECT_EQ(Evicted(), 0);
}

// What is wanted needs more slabs than one, and gets no more than it needs.
TEST_F(GrowFirstTest, ALeaseOfManySlabs) {
  StartDaemon(16);
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(engine->LeaseAsked(60, 60).shortfall(), v1::SHORTFALL_GROWING);
  for (int round = 0; round < 8; ++round) daemon_->HousekeepOnce();
  EXPECT_EQ(engine->peer->slabs().size(), 4) << "14 free, and 3 * 16 to come";
  Settle({engine.get()});
  EXPECT_EQ(engine->LeaseAsked(60, 60).blocks_size(), 60);
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 5) << "2 free: a quarter of a slab is too few";
}

TEST_F(GrowFirstTest, WantedIsNoMoreThanTheSpaceOrTheSessionCanHave) {
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  const auto other = OpenEngine(request);
  EXPECT_EQ(other->LeaseAsked(63, 63).shortfall(), v1::SHORTFALL_PRESSURE) << "at most 63, a sink among them";
  Settle({other.get()});
  EXPECT_EQ(Space().slabs, 1);
  other->Do(CloseOp());
  request.set_max_blocks(20);
  const auto engine = OpenEngine(request);
  v1::LeaseResult lease = engine->LeaseAsked(60, 1);
  EXPECT_EQ(lease.blocks_size(), 14);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 2);
  lease = engine->LeaseAsked(60, 1);
  EXPECT_EQ(lease.blocks_size(), 6);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_CAP);
  EXPECT_EQ(engine->LeaseAsked(60, 60).shortfall(), v1::SHORTFALL_CAP);
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 2);
}

// What came free in time needs no slab.
TEST_F(GrowFirstTest, WhatIsWantedNoMoreIsNotGrownFor) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(9);
  EXPECT_EQ(engine->LeaseAsked(8, 8).shortfall(), v1::SHORTFALL_GROWING);
  engine->Release(blocks);
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 1);
  EXPECT_EQ(engine->LeaseAsked(10, 10).blocks_size(), 10);
  EXPECT_EQ(Space().slabs, 1);
}

TEST_F(GrowFirstTest, ALargeSpaceGrowsEarlierUpToFourSlabs) {
  StartDaemon(256);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(620);
  const auto engine = OpenEngine(request);
  Settle({engine.get()});
  ASSERT_EQ(Space().capacity, 623);
  engine->Lease(603);  // 1/32 of 623 is 19: so many are left.
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 39);
  engine->Lease(1);
  Settle({engine.get()});
  EXPECT_EQ(Space().slabs, 40);

  request.set_guaranteed_blocks(3000);
  const auto larger = OpenEngine(request);
  Settle({engine.get(), larger.get()});
  const int slabs = Space().slabs;
  ASSERT_GT(Space().capacity, 3500);
  engine->Release(engine->Lease(1));
  while (Blocks().free() > 64) larger->Lease(1);
  Settle({engine.get(), larger.get()});
  EXPECT_EQ(Space().slabs, slabs);
  larger->Lease(1);
  Settle({engine.get(), larger.get()});
  EXPECT_EQ(Space().slabs, slabs + 1);
}

// An engine that takes two blocks a turn, where a slab is made and mapped in four turns: half a slab's worth of them.
TEST_F(GrowFirstTest, LearnsHowFarAheadOfAnEngineToGrow) {
  StartDaemon(128);
  const auto engine = OpenEngine(OpenRequest());
  uint32_t taken = 0;
  // Turns in which it came short, of so many in each of which it takes `blocks`.
  const auto run = [&](int turns, uint32_t blocks) {
    int short_turns = 0;
    for (int turn = 0; turn < turns; ++turn) {
      const v1::LeaseResult lease = engine->LeaseAsked(blocks, 1);
      taken += lease.blocks_size();
      short_turns += lease.shortfall() == v1::SHORTFALL_GROWING;
      if (turn % 4 != 3) continue;
      engine->MapSlabs();
      daemon_->HousekeepOnce();
    }
    return short_turns;
  };
  EXPECT_GT(run(100, 2), 0);
  EXPECT_EQ(run(200, 2), 0);
  EXPECT_EQ(Space().capacity + 1, Space().slabs * kSlabBlocks);
  EXPECT_LE(Space().slabs * kSlabBlocks, taken + 3 * kSlabBlocks) << "no further than it needs";
  // It slows down: the space is back at 1/32 of what it has. The null block and the sink are not of those taken.
  run(400, 1);
  EXPECT_LE(Space().slabs * kSlabBlocks, 2 + taken + Space().capacity / 32 + kSlabBlocks);
  EXPECT_EQ(Evicted(), 0);
}

// A sink stays for as long as its session, and would keep any other slab from being given back.
TEST_F(GrowFirstTest, TheSinkOfANewSessionIsInTheFirstSlab) {
  StartDaemon(2);
  const auto first = OpenEngine(OpenRequest(), "first");
  Cache(first.get(), 14);
  const auto second = OpenEngine(OpenRequest(), "second");
  EXPECT_EQ(second->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_GROWING);
  Settle({first.get(), second.get()});
  EXPECT_EQ(second->LeaseAsked(1, 1).blocks_size(), 1);
  EXPECT_EQ(Evicted(), 1) << "it could not grow further: the coldest of the first slab made room";

  Cache(first.get(), Blocks().free());
  const auto third = OpenEngine(OpenRequest(), "third");
  EXPECT_EQ(third->LeaseAsked(1, 1).blocks_size(), 1) << "there is no third slab";
  EXPECT_EQ(Evicted(), 3);
}

// A guarantee may rest on what is cached; leasing it should cost none of that.
TEST_F(GrowFirstTest, AGuaranteeIsGrownFor) {
  StartDaemon(2);
  const auto first = OpenEngine(OpenRequest(), "first");
  Cache(first.get(), 8);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(10);
  const auto second = OpenEngine(request, "second");
  EXPECT_EQ(Space().slabs, 1) << "12 are unpromised";
  Settle({first.get(), second.get()});
  EXPECT_EQ(Space().slabs, 2);
  EXPECT_EQ(second->Lease(10).size(), 10);
  EXPECT_EQ(Evicted(), 0);
}

TEST_F(GrowFirstTest, WhatOthersArePromisedIsGrownFor) {
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(10);
  const auto promised = OpenEngine(request, "promised"), busy = OpenEngine(OpenRequest(), "busy");
  ASSERT_EQ(Blocks().free(), 13);
  v1::LeaseResult lease = busy->LeaseAsked(5, 1);
  EXPECT_EQ(lease.blocks_size(), 3);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_GROWING);
  Settle({promised.get(), busy.get()});
  EXPECT_EQ(Space().slabs, 2);
  EXPECT_EQ(busy->LeaseAsked(13, 13).blocks_size(), 13);
  Settle({promised.get(), busy.get()});
  EXPECT_EQ(Space().slabs, 3) << "3 of 13 are spare: it has learned to ask in time";
  EXPECT_EQ(busy->LeaseAsked(30, 1).blocks_size(), 19);
  Settle({promised.get(), busy.get()});
  EXPECT_EQ(Space().slabs, 4);
  EXPECT_EQ(busy->LeaseAsked(30, 1).blocks_size(), 16);
  EXPECT_EQ(busy->LeaseAsked(30, 1).shortfall(), v1::SHORTFALL_CREDIT) << "all there can be";
  EXPECT_EQ(promised->Lease(10).size(), 10);
}

TEST_F(GrowFirstTest, AMatchThatCreditDoesNotCoverGrowsTheSpace) {
  StartDaemon(2);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(10);
  const auto promised = OpenEngine(request, "promised"), other = OpenEngine(OpenRequest(), "other");
  Cache(other.get(), 3);
  other->Lease(3);
  EXPECT_EQ(other->Match({Key("cached 1")}).miss(), v1::MISS_REASON_CREDIT);
  Settle({promised.get(), other.get()});
  EXPECT_EQ(other->Match({Key("cached 1")}).tokens(), 16);
}

// The daemon looks for room even where nothing is wanted yet: the first verb that comes short finds it.
TEST_F(GrowFirstTest, RoomThatOthersGaveBackComesBeforeEviction) {
  options_.idle_space_ms = 1000;
  StartDaemon(2);
  const auto other = OpenEngine(OpenRequest("other"));
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), 8);
  daemon_->HousekeepOnce();
  EXPECT_EQ(engine->LeaseAsked(7, 7).blocks_size(), 7);
  EXPECT_EQ(daemon_->Snapshot().spaces.at(1).pool.evicted[static_cast<int>(EvictReason::kDirect)], 1);
  engine->Release(engine->Lease(1));
  other->Die();
  clock_.Advance(1000);
  daemon_->HousekeepOnce();  // Closes the other space …
  daemon_->HousekeepOnce();  // … and sees that there is room.
  EXPECT_EQ(engine->LeaseAsked(7, 7).shortfall(), v1::SHORTFALL_GROWING);
  Settle({engine.get()});
  EXPECT_EQ(engine->LeaseAsked(7, 7).blocks_size(), 7);
  EXPECT_EQ(Space().pool.evicted[static_cast<int>(EvictReason::kDirect)], 2);
}

}  // namespace
}  // namespace kvpool
