// Where slabs lie is kept for the next daemon before the first hole comes about, or none does.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "server/base/shared_memory.h"
#include "tests/service/recovery_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

// Its keeper has room for so many things.
class SlabPlacesTest : public RecoveryTest {
 protected:
  static constexpr size_t kMostThings = 30;
  SlabPlacesTest() {
    keeper_ = &small_;
    gives_back_ = takes_holes_ = true;
  }
  void TearDown() override { End(); }
  // The keeper has no room for anything more, as long as these are there.
  std::vector<Kept> FillKeeper() {
    const auto memory = SharedMemory::Make("kvpool-test", 4096);
    EXPECT_TRUE(memory.ok()) << memory.status();
    std::vector<Kept> things;
    while (things.size() <= kMostThings) {
      auto kept = link_->Keep(KeptKind::kLog, "", memory->fd());
      if (!kept.ok()) {
        EXPECT_THAT(std::string(kept.status().message()), HasSubstr("its limit: raise RLIMIT_NOFILE"));
        return things;
      }
      things.push_back(*std::move(kept));
    }
    ADD_FAILURE() << "the keeper has room without end";
    return things;
  }
  void GoOn(Engine* engine, uint64_t ms) {
    for (const uint64_t until = clock_.NowMs() + ms; clock_.NowMs() < until;) {
      clock_.Advance(100);
      engine->MapSlabs();
      daemon_->HousekeepOnce();
    }
  }

 private:
  ServedKeeper small_{kMostThings};
};

TEST_F(SlabPlacesTest, AKeeperThatHadNoRoomIsAskedAgain) {
  ASSERT_TRUE(Start().ok());
  Sleeper one;
  const auto engine = Open(one.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 40; ++i) {
    const v1::LeaseResult lease = engine->LeaseAsked(1000, 1);
    blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
    engine->MapSlabs();
    daemon_->HousekeepOnce();
  }
  const std::vector<v1::Slab> slabs = engine->peer->slabs();
  ASSERT_GT(slabs.size(), 4u);
  // The last slab stays while a block of it is held.
  std::sort(blocks.begin(), blocks.end(), [](uint64_t a, uint64_t b) { return IdOf(a) < IdOf(b); });
  engine->Release({blocks.begin(), blocks.end() - 1});
  std::vector<Kept> others = FillKeeper();
  ASSERT_FALSE(others.empty());

  // Two slabs are too many now.
  v1::SetShareRequest request;
  request.set_space(1);
  request.set_limit_blocks(slabs[slabs.size() - 2].first_block());
  v1::SetShareResponse response;
  ASSERT_TRUE(daemon_->SetShare(request, &response).ok());
  testing::internal::CaptureStderr();
  GoOn(engine.get(), 5000);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("space gives its last slab alone"));
  EXPECT_EQ(log.find("space gives its last slab alone"), log.rfind("space gives its last slab alone"))
      << "once";
  EXPECT_TRUE(engine->peer->leaves().empty());

  others.clear();
  link_->AwaitDropped();
  GoOn(engine.get(), 20'000);
  EXPECT_EQ(engine->peer->leaves().size(), 2u);
  for (const v1::SlabLeave& leave : engine->peer->leaves()) EXPECT_LT(leave.slab() + 1, slabs.size());

  // They are where they were for the next daemon.
  Kill();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Recovery().lost_spaces_size(), 0);
  const auto again = ComeBack(*engine, one.credentials());
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->peer->slabs().size(), slabs.size() - 2);
  for (const v1::Slab& slab : again->peer->slabs())
    EXPECT_EQ(slab.first_block(), slabs[slab.slab()].first_block());
  EXPECT_EQ(again->Release({blocks.back()}).refused_size(), 0);
}

}  // namespace
}  // namespace kvpool
