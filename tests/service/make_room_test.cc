// Who pays when the device is full: idle spaces, and tenants above their share.
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/growth_fixture.h"

namespace kvpool {
namespace {

class MakeRoomTest : public GrowthTest {
 protected:
  void SetPriority(size_t space, v1::PriorityClass priority) {
    v1::SetShareRequest request;
    request.set_space(Space(space).space);
    request.set_keep_guaranteed(true);
    request.set_priority_class(priority);
    v1::SetShareResponse response;
    const absl::Status set = daemon_->SetShare(request, &response);
    EXPECT_TRUE(set.ok()) << set;
  }
};

TEST_F(MakeRoomTest, IdleSpacesMakeRoomOldestFirst) {
  StartDaemon(2);
  const auto a = OpenEngine(OpenRequest("a"));
  a->Seal(a->Lease(1), Keys("x", 1));
  a->Do(CloseOp());
  absl::Status refused = Attach()->Open([this] {
    v1::OpenSession request = OpenRequest("big");
    request.set_guaranteed_blocks(20);
    return request;
  }());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted)
      << "the process that mapped it lives: its memory is not free";
  EXPECT_NE(std::string(refused.message())
                .find("device mem0: 16384 bytes asked for each rank, 0 of 32768 bytes left"),
            std::string::npos)
      << refused;
  a->Die();
  clock_.Advance(10);
  const auto b = OpenEngine(OpenRequest("b"));
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 2) << "there was room for both";
  const auto c = OpenEngine(OpenRequest("c"));
  const DaemonSnapshot snapshot = daemon_->Snapshot();
  ASSERT_EQ(snapshot.spaces.size(), 2);
  EXPECT_EQ(snapshot.totals.pool.sealed, 1) << "counters of closed spaces stay";
  EXPECT_EQ(snapshot.spaces[0].space, b->opened.space());
  EXPECT_EQ(Attach()->Open(OpenRequest("d")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(scripts_[0]->alive, 2);
}

TEST_F(MakeRoomTest, ASpaceAtItsLargestTakesNoMemoryOfOthers) {
  StartDaemon(4);
  const auto idle = OpenEngine(OpenRequest("idle"));
  idle->Seal(idle->Lease(1), Keys("kept", 1));
  idle->Die();
  v1::OpenSession request = OpenRequest("small");
  request.set_max_space_bytes(kSlabBlocks * kBlockBytes);
  request.set_guaranteed_blocks(10);
  const auto engine = OpenEngine(request);
  EXPECT_EQ(Attach()->Open(request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(OpenEngine(OpenRequest("idle"))->Match(Keys("kept", 1)).tokens(), 16);
}

TEST_F(MakeRoomTest, ATenantAboveItsShareMakesRoomFirst) {
  StartDaemon(4);
  const auto request = [this](const std::string& tenant, const std::string& model) {
    v1::OpenSession open = OpenRequest(model);
    open.set_tenant(tenant);
    return open;
  };
  // Four spaces of a slab each; the modest tenant's was not used for the longest time.
  std::vector<uint64_t> spaces;
  for (const auto& [tenant, model] : std::vector<std::pair<std::string, std::string>>{
           {"modest", "m"}, {"greedy", "a"}, {"greedy", "b"}, {"greedy", "c"}}) {
    const auto engine = OpenEngine(request(tenant, model));
    engine->Seal(engine->Lease(1), Keys("x", 1));
    spaces.push_back(engine->opened.space());
    engine->Die();
    clock_.Advance(10);
  }
  const auto left = [this] {
    std::set<uint64_t> ids;
    for (const SpaceSnapshot& space : daemon_->Snapshot().spaces) ids.insert(space.space);
    return ids;
  };
  const auto first = OpenEngine(request("new", "n"));
  EXPECT_EQ(left(), (std::set<uint64_t>{spaces[0], spaces[2], spaces[3], first->opened.space()}));
  const auto second = OpenEngine(request("new", "o"));
  EXPECT_EQ(left(),
            (std::set<uint64_t>{spaces[0], spaces[3], first->opened.space(), second->opened.space()}));
  const auto third = OpenEngine(request("new", "p"));
  EXPECT_EQ(left(), (std::set<uint64_t>{spaces[3], first->opened.space(), second->opened.space(),
                                        third->opened.space()}))
      << "all that are idle are within their share: the longest unused";
}

TEST_F(MakeRoomTest, TheLastSlabIsNotForATenantAboveItsShare) {
  StartDaemon(5);
  const auto request = [this](const std::string& tenant, uint32_t guaranteed) {
    v1::OpenSession open = OpenRequest();
    open.set_tenant(tenant);
    open.set_guaranteed_blocks(guaranteed);
    return open;
  };
  const auto greedy =
      OpenEngine(request("a_greedy", 40), "greedy");  // Three slabs, and first in every round.
  const auto modest = OpenEngine(request("modest", 0), "modest");
  greedy->Lease(45);
  modest->Lease(13);  // Both are short of free blocks, and there is a slab left.
  daemon_->HousekeepOnce();
  Settle({greedy.get(), modest.get()});
  EXPECT_EQ(Space(0).slabs, 3);
  EXPECT_EQ(Space(1).slabs, 2);
  EXPECT_EQ(greedy->LeaseAsked(5, 0).shortfall(), v1::SHORTFALL_PRESSURE) << "at once, not growing";
}

TEST_F(MakeRoomTest, ATenantAboveItsShareGrowsWhereNobodyElseWants) {
  StartDaemon(5);
  v1::OpenSession open = OpenRequest();
  open.set_tenant("modest");
  const auto modest = OpenEngine(open, "modest");
  open.set_tenant("greedy");
  open.set_guaranteed_blocks(40);
  const auto greedy = OpenEngine(open, "greedy");
  greedy->Lease(45);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Space(1).slabs, 4);
}

// What spaces of other classes have is not shared with it: here most of the device.
TEST_F(MakeRoomTest, TheLastSlabIsNotForATenantAboveItsShareOfTheClass) {
  StartDaemon(11);
  const auto request = [this](const std::string& tenant, uint32_t guaranteed) {
    v1::OpenSession open = OpenRequest();
    open.set_tenant(tenant);
    open.set_guaranteed_blocks(guaranteed);
    return open;
  };
  const auto batch = OpenEngine(request("a_batch", 90), "batch");  // Six slabs.
  SetPriority(0, v1::PRIORITY_CLASS_BATCH);
  const auto greedy = OpenEngine(request("b_greedy", 40), "greedy");  // Three.
  const auto modest = OpenEngine(request("modest", 0), "modest");
  greedy->Lease(45);
  modest->Lease(13);
  daemon_->HousekeepOnce();
  Settle({batch.get(), greedy.get(), modest.get()});
  EXPECT_EQ(Space(1).slabs, 3);
  EXPECT_EQ(Space(2).slabs, 2);
}

TEST_F(MakeRoomTest, AnIdleSpaceMakesNoRoomOnAnotherDevice) {
  StartDaemon(1, /*devices=*/2);
  const auto request = [this](const std::string& model, const std::string& device) {
    v1::OpenSession open = OpenRequest(model);
    open.add_device_uuids(device);
    return open;
  };
  const auto idle = OpenEngine(request("idle", "mem0"));
  idle->Seal(idle->Lease(1), Keys("kept", 1));
  idle->Die();
  const auto busy = OpenEngine(request("busy", "mem1"));
  EXPECT_EQ(Attach()->Open(request("new", "mem1")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(OpenEngine(request("idle", "mem0"))->Match(Keys("kept", 1)).tokens(), 16);
}

TEST_F(MakeRoomTest, AnIdleSpaceMakesRoomForALowerClassThatIsPromisedSome) {
  StartDaemon(1);
  const auto idle = OpenEngine(OpenRequest("idle"));
  idle->Seal(idle->Lease(1), Keys("kept", 1));
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  idle->Die();
  v1::OpenSession request = OpenRequest("new");
  EXPECT_EQ(Attach()->Open(request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Space().pool.sealed, 1);
  request.set_guaranteed_blocks(10);
  const absl::Status promised = Attach()->Open(request);
  EXPECT_TRUE(promised.ok()) << promised;
  EXPECT_EQ(Space().pool.sealed, 0) << "of another space";
}

// Engines of a tenant that keep its space open can't take what others open theirs with.
TEST_F(MakeRoomTest, ATenantAtItsSharePaysWithItsOwnCache) {
  options_.tenant_share = 0.5;
  StartDaemon(4);
  const auto request = [this](const std::string& tenant, const std::string& model, uint32_t guaranteed) {
    v1::OpenSession open = OpenRequest(model);
    open.set_tenant(tenant);
    open.set_guaranteed_blocks(guaranteed);
    return open;
  };
  const auto slabs_of = [this](const Engine& engine) {
    for (const SpaceSnapshot& space : daemon_->Snapshot().spaces) {
      if (space.space == engine.opened.space()) return space.slabs;
    }
    return 0u;
  };
  const auto greedy = OpenEngine(request("greedy", "m", 0), "greedy");
  for (int i = 0; i < 60; ++i) {
    daemon_->HousekeepOnce();
    Settle({greedy.get()});
    const std::vector<uint64_t> block = greedy->Lease(1);
    ASSERT_EQ(block.size(), 1u) << i;
    greedy->Seal(block, {Key("g" + std::to_string(i))});
    greedy->Release(block);
  }
  EXPECT_EQ(slabs_of(*greedy), 2) << "although the device has room";
  EXPECT_GE(Blocks().cached(), 28);

  // The idle space of another is not closed for a tenant that may have no more.
  const auto idle = OpenEngine(request("modest", "m", 0), "modest");
  idle->Seal(idle->Lease(1), Keys("m", 1));
  idle->Die();
  while (greedy->LeaseAsked(1, 1).blocks_size() > 0) {
  }
  daemon_->HousekeepOnce();
  daemon_->HousekeepOnce();
  EXPECT_EQ(slabs_of(*greedy), 2);
  EXPECT_EQ(slabs_of(*idle), 1);

  // Its own is: to open another model it gives up the first.
  greedy->Die();
  const auto second = OpenEngine(request("greedy", "n", 20), "greedy");
  EXPECT_EQ(slabs_of(*greedy), 0);
  EXPECT_EQ(slabs_of(*second), 2);
  EXPECT_EQ(slabs_of(*idle), 1);
  const absl::Status refused = Attach()->Open(request("greedy", "o", 1));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("16384 bytes asked for each rank, 0 left of the 32768 that tenant greedy"));
  EXPECT_EQ(slabs_of(*OpenEngine(request("new", "m", 0), "new")), 1);
}

TEST_F(MakeRoomTest, IdleSpacesCloseInTheEnd) {
  options_.idle_space_ms = 1000;
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  clock_.Advance(5000);
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 1);
  engine->Die();
  clock_.Advance(999);
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 1);
  clock_.Advance(1);
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 0);
  EXPECT_EQ(Used(), 0);
  EXPECT_NE(OpenEngine(OpenRequest())->opened.space(), engine->opened.space());
}

TEST_F(MakeRoomTest, ASpaceUnderPressureTakesTheMemoryOfAnIdleOne) {
  StartDaemon(2);
  const auto a = OpenEngine(OpenRequest("a"));
  a->Die();
  const auto b = OpenEngine(OpenRequest("b"));
  const std::vector<uint64_t> blocks = b->Lease(10);
  for (int i = 0; i < 10; ++i) b->Seal({blocks[i]}, {Key("i" + std::to_string(i))});
  b->Release(blocks);
  b->Lease(4);
  Settle({b.get()});
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 2) << "what it has cached can go first";
  b->Lease(10);
  Settle({b.get()});
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1);
  EXPECT_EQ(Space().capacity, 31);
}

}  // namespace
}  // namespace kvpool
