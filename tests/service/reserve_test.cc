// What spaces leave to others of memory that is free, and what they do not.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

class ReserveTest : public GiveBackTest {
 protected:
  // Slabs that a space has given since, while its engine goes through `rounds` of what nobody has.
  uint64_t Gives(size_t space, Engine* engine, const std::vector<Engine*>& all, int rounds) {
    const uint64_t before = Space(space).give_back.slabs;
    for (int round = 0; round < rounds; ++round) {
      Churn(engine, std::to_string(before) + "." + std::to_string(round));
      Settle(all);
    }
    return Space(space).give_back.slabs - before;
  }
  std::unique_ptr<Engine> OpenOf(const std::string& tenant, const std::string& name,
                                 uint32_t guaranteed = 1) {
    auto engine = Attach(name);
    v1::OpenSession request = OpenRequest(name);
    request.set_tenant(tenant);
    request.set_guaranteed_blocks(guaranteed);
    const absl::Status opened = engine->Open(request);
    EXPECT_TRUE(opened.ok()) << opened;
    engine->MapSlabs();
    return engine;
  }
};

// It has weights, too, and the device has room for what is its own of what higher classes do not have: that is theirs first.
TEST_F(ReserveTest, ALowerClassDoesNotTakeBackWhatItLeavesToAHigherOne) {
  const auto low = Full(64);
  const auto high = OpenSmall("b");
  SetWeight(0, 1);
  SetWeight(1, 1);
  SetPriority(0, v1::PRIORITY_CLASS_BATCH);
  SetPriority(1, v1::PRIORITY_CLASS_INTERACTIVE);
  const std::vector<Engine*> all = {low.get(), high.get()};
  Gives(0, low.get(), all, 60);
  EXPECT_EQ(Space(0).slabs + Space(1).slabs, 62) << "two are left";
  EXPECT_EQ(Gives(0, low.get(), all, 100), 0);
  EXPECT_EQ(Space(0).slabs + Space(1).slabs, 62);
}

// More room on the device is of no use to one whose tenant has nearly all it may have.
TEST_F(ReserveTest, NoRoomIsMadeForATenantAtItsShare) {
  Rules("");
  options_.tenant_share = .5;
  StartDaemon(64);
  const auto high = OpenOf("one", "a"), low = OpenOf("two", "b");
  const std::vector<Engine*> all = {high.get(), low.get()};
  high->Release(LeaseUpTo(30 * kSlabBlocks - 2, high.get(), all));  // And a slab ahead.
  low->Release(LeaseUpTo(32 * kSlabBlocks - 2, low.get(), all));
  ASSERT_EQ(Space(0).slabs, 31);
  ASSERT_EQ(Space(1).slabs, 32);
  SetWeight(0, 1);
  SetPriority(0, v1::PRIORITY_CLASS_INTERACTIVE);
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  EXPECT_EQ(Gives(1, low.get(), all, 60), 0);
  EXPECT_EQ(Space(1).slabs, 32);
}

// Nor to one that has all it may have by its limit, whatever would be its own by its weight.
TEST_F(ReserveTest, NoRoomIsLeftForASpaceAtItsLimit) {
  const auto low = Full(64);
  const auto high = OpenSmall("b");
  SetShare(1, [](v1::SetShareRequest* request) { request->set_limit_blocks(kSlabBlocks); });
  SetWeight(1, 1);
  SetPriority(1, v1::PRIORITY_CLASS_INTERACTIVE);
  const std::vector<Engine*> all = {low.get(), high.get()};
  EXPECT_EQ(Gives(0, low.get(), all, 60), 0);
  EXPECT_EQ(Space(0).slabs + Space(1).slabs, 64);
  SetShare(1, [](v1::SetShareRequest* request) { request->set_limit_blocks(0); });
  EXPECT_GT(Gives(0, low.get(), all, 60), 0) << "now there is";
}

// An opening waits for what its tenant has elsewhere. What is free beyond what it asks for is for whoever can use it.
TEST_F(ReserveTest, AnOpeningThatWaitsKeepsNoMoreThanItAsksFor) {
  Rules("");
  options_.tenant_share = .5;
  options_.give_back_ms = 600'000;
  StartDaemon(16);
  const auto waiting = OpenOf("one", "a"), other = OpenOf("two", "b"), gives = OpenOf("three", "c");
  const std::vector<Engine*> all = {waiting.get(), other.get(), gives.get()};
  Fill(waiting.get(), 8);
  Fill(gives.get(), 4);
  // It holds what it has, and caches nothing, so that nobody gives it more.
  const auto lease_more = [&] {
    for (int i = 0; i < 20; ++i) {
      other->LeaseAsked(8, 1);
      Settle(all);
    }
  };
  lease_more();
  ASSERT_EQ(Used(), 16 * kSlabBlocks * kBlockBytes);
  const uint64_t slabs = Space(1).slabs;
  // It unmaps nothing.
  waiting->peer->on_leave = [](const v1::SlabLeave&) {};
  std::atomic<bool> given_up{false}, over{false};
  absl::Status opened;
  const auto second = Attach("d");
  std::thread opening([&] {
    v1::OpenSession request = OpenRequest("d");
    request.set_attach_token(second->attach_token);
    request.set_tenant("one");
    request.set_guaranteed_blocks(10);
    v1::OpenSessionResult result;
    opened = daemon_->OpenSession(request, &result, &given_up);
    over = true;
  });
  while (Space(0).give_back.asked == 0 && !over) std::this_thread::yield();
  SetShare(2, [](v1::SetShareRequest* request) { request->set_limit_blocks(kSlabBlocks); });
  GoOn(all);
  lease_more();
  EXPECT_GT(Space(1).slabs, slabs);
  given_up = true;
  opening.join();
  EXPECT_FALSE(opened.ok()) << "nobody gave what it asked for";
}

// A space gives nothing while a slab is on its way to its members. That is over in a moment, or the slab is not waited for any more.
TEST_F(ReserveTest, AnOpeningWaitsForASlabThatIsOnItsWayToOthers) {
  options_.give_back_ms = 60'000;
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"), "a");
  a->Release(LeaseUpTo(2 * kSlabBlocks, a.get(), {a.get()}));
  const v1::LeaseResult rest = a->LeaseAsked(4 * kSlabBlocks - 2, 1);
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  a->Release({rest.blocks().begin(), rest.blocks().end()});
  ASSERT_EQ(Used(), 4 * kSlabBlocks * kBlockBytes);
  ASSERT_LT(a->peer->ready().back().capacity_blocks(), 4 * kSlabBlocks);
  absl::Status status;
  std::unique_ptr<Engine> b;
  const std::future<void> opening = std::async(std::launch::async, [&] { status = OpenB(10, &b); });
  EXPECT_EQ(opening.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  WhileEnginesGoOn({a.get()}, [&] { opening.wait(); });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace kvpool
