// Which part of each device all spaces of a tenant may have together, by rules of access.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

class TenantShareTest : public GiveBackTest {
 protected:
  // Of eight slabs. The tenant of whoever names none is "one".
  void SharesAre(const std::string& of_one) {
    RulesAre("[one]\nuid = 1000\nrole = engine\ntenant = one, two\ntenant-share = " + of_one +
             "\n[behind]\nuid = 1001\nrole = engine\ntenant = one, three\ntenant-share = .9\n");
  }
  v1::OpenSession RequestOf(const std::string& tenant, const std::string& model) const {
    v1::OpenSession request = OpenRequest(model);
    request.set_tenant(tenant);
    return request;
  }
  // A space that has so many slabs, in which nothing is held.
  std::unique_ptr<Engine> OpenWith(uint32_t slabs, const std::string& tenant, const std::string& model) {
    auto engine = Attach(model, tenant == "three" ? 1001 : 1000);
    const absl::Status opened = engine->Open(RequestOf(tenant, model));
    EXPECT_TRUE(opened.ok()) << opened;
    engine->MapSlabs();
    engine->Release(LeaseAll(engine.get(), slabs * kSlabBlocks - 2));
    return engine;
  }
};

TEST_F(TenantShareTest, ATenantHasItsPartOfEachDeviceAndNoMore) {
  SharesAre("0.5");
  StartDaemon(8);
  const auto a = OpenWith(3, "one", "a"), b = OpenWith(1, "one", "b");
  const auto c = Attach("c");
  v1::OpenSession request = RequestOf("one", "c");
  request.set_guaranteed_blocks(kSlabBlocks);
  // What others of the tenant may spare is its own, and goes to it.
  ASSERT_TRUE(c->Open(request).ok());
  EXPECT_EQ(Space(0).slabs + Space(1).slabs + Space(2).slabs, 4u);
  const std::vector<uint64_t> held = a->Lease(10);
  request = RequestOf("one", "d");
  request.set_guaranteed_blocks(4 * kSlabBlocks);
  const absl::Status refused = Attach("d")->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("0 left of the 65536 that tenant one may have"));
  const auto other = OpenWith(4, "two", "a");
  EXPECT_EQ(Used(), 8 * kSlabBlocks * kBlockBytes);
}

TEST_F(TenantShareTest, WhatIsBeyondAShareThatBecameLessGoesAsFarAsNobodyHoldsIt) {
  SharesAre("1");
  StartDaemon(8);
  const auto a = OpenWith(5, "one", "a"), b = OpenWith(2, "one", "b");
  ASSERT_EQ(Used(), 8 * kSlabBlocks * kBlockBytes);
  const std::vector<uint64_t> held = LeaseAll(a.get(), 2 * kSlabBlocks);
  SharesAre("0.5");
  GoOn({a.get(), b.get()});
  EXPECT_EQ(Space(0).slabs, 3u) << "of the one with most goes what is not held, of the other one the rest";
  EXPECT_EQ(Space(1).slabs, 1u);
  SharesAre("0.25");
  GoOn({a.get(), b.get()});
  EXPECT_EQ(Space(0).slabs, 3u);
  EXPECT_EQ(Space(1).slabs, 1u) << "a first slab stays";
  a->Release(held);
  GoOn({a.get(), b.get()});
  EXPECT_EQ(Space(0).slabs + Space(1).slabs, 2u);
  // Below it nobody is asked, and nothing grows beyond it.
  for (int round = 0; round < 20; ++round) {
    Churn(a.get(), "a" + std::to_string(round));
    Settle({a.get(), b.get()});
  }
  EXPECT_EQ(Space(0).slabs + Space(1).slabs, 2u);
  SharesAre("0.75");
  for (int round = 0; round < 20; ++round) {
    a->Release(a->Lease(8));
    Churn(a.get(), "b" + std::to_string(round));
    Settle({a.get(), b.get()});
  }
  EXPECT_EQ(Space(0).slabs, 5u);
}

// Where one has a held block in each slab another one gives.
TEST_F(TenantShareTest, WhatIsHeldKeepsNoOtherSpaceFromGiving) {
  SharesAre("1");
  StartDaemon(8);
  const auto a = OpenWith(5, "one", "a"), b = OpenWith(2, "one", "b");
  ASSERT_EQ(Space(0).slabs, 6u);
  std::vector<uint64_t> others;
  for (const uint64_t block : LeaseAll(a.get(), 6 * kSlabBlocks - 2)) {
    if (IdOf(block) % kSlabBlocks != 5) others.push_back(block);
  }
  a->Release(others);
  SharesAre("0.5");
  GoOn({a.get(), b.get()});
  EXPECT_EQ(Space(0).slabs, 6u);
  EXPECT_EQ(Space(1).slabs, 1u);
}

// Another tenant's is not taken for it, however much of the device it leaves free.
TEST_F(TenantShareTest, OthersGiveNothingToATenantAtItsShare) {
  SharesAre("0.25");
  StartDaemon(8);
  const auto a = OpenWith(2, "one", "a"), three = OpenWith(6, "three", "a");
  v1::OpenSession request = RequestOf("one", "b");
  request.set_guaranteed_blocks(2 * kSlabBlocks);
  EXPECT_EQ(Attach("b")->Open(request).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Space(1).slabs, 6u);
  EXPECT_TRUE(three->peer->leaves().empty());
}

// Though by its weight more would be its own.
TEST_F(TenantShareTest, NoRoomIsLeftForATenantAtItsShare) {
  SharesAre("0.25");
  StartDaemon(64);
  const auto a = OpenWith(15, "one", "a"), three = OpenWith(4, "three", "a");
  ASSERT_EQ(Space(0).slabs, 16u);
  Fill(a.get(), 15);
  SetWeight(0, 1);
  for (int round = 0; round < 100; ++round) {
    Churn(three.get(), std::to_string(round));
    Settle({a.get(), three.get()});
  }
  const std::vector<uint64_t> all = LeaseAll(three.get(), 47 * kSlabBlocks);
  EXPECT_EQ(Space(1).slabs, 48u);
  EXPECT_EQ(Space(0).slabs, 16u);
}

TEST_F(TenantShareTest, TheFirstRuleForATenantCountsAndTheOptionWhereItSaysNone) {
  options_.tenant_share = 0.5;
  RulesAre(
      "[plain]\nuid = *\nrole = engine\ntenant = one\n[more]\nuid = *\nrole = engine\ntenant = "
      "*\ntenant-share = 1\n");
  StartDaemon(8);
  const auto a = OpenWith(4, "one", "a");
  const auto more = Attach("more");
  v1::OpenSession request = RequestOf("one", "b");
  request.set_guaranteed_blocks(4 * kSlabBlocks);
  EXPECT_THAT(std::string(more->Open(request).message()), HasSubstr("65536 that tenant one may have"));
}

}  // namespace
}  // namespace kvpool
