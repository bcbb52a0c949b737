// What a session of an earlier daemon was promised, and does not have at once in the next one.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/service/recovery_fixture.h"

namespace kvpool {
namespace {

class PromiseRecoveryTest : public RecoveryTest {
 protected:
  static constexpr uint32_t kSlabBlocks = 1024;  // Blocks of 4 KiB; a device has eight slabs.
  // Leases so many, while the engine maps what is made for it.
  std::vector<uint64_t> LeaseAll(Engine* engine, uint32_t count) {
    std::vector<uint64_t> blocks;
    for (int attempt = 0; attempt < 40 && blocks.size() < count; ++attempt) {
      const v1::LeaseResult lease = engine->LeaseAsked(count - static_cast<uint32_t>(blocks.size()), 1);
      blocks.insert(blocks.end(), lease.blocks().begin(), lease.blocks().end());
      daemon_->HousekeepOnce();
      engine->MapSlabs();
    }
    EXPECT_EQ(blocks.size(), count);
    return blocks;
  }
  void SetShare(size_t space, uint32_t limit, v1::PriorityClass priority) {
    v1::SetShareRequest request;
    request.set_space(Space(space).space);
    request.set_keep_guaranteed(true);
    request.set_limit_blocks(limit);
    request.set_priority_class(priority);
    v1::SetShareResponse response;
    const absl::Status set = daemon_->SetShare(request, &response);
    EXPECT_TRUE(set.ok()) << set;
  }
  SpaceSnapshot Space(size_t space) { return daemon_->Snapshot().spaces.at(space); }
};

// It comes before the cache of whichever class.
TEST_F(PromiseRecoveryTest, NoPromiseWaitsForTheCacheOfAHigherClass) {
  ASSERT_TRUE(Start().ok());
  digest_ = "low";
  Sleeper processes[3];
  const auto reads = Open(processes[0].credentials());
  ASSERT_NE(reads, nullptr) << opened_;
  guaranteed_ = 900;
  const auto promised = Open(processes[1].credentials());
  ASSERT_NE(promised, nullptr) << opened_;
  // What both hold is the first one's in the next daemon.
  const std::vector<std::string> keys = Keys("k", 600);
  promised->Seal(LeaseAll(promised.get(), 600), keys);
  ASSERT_EQ(reads->Match(keys).groups(0).blocks_size(), 600);
  ASSERT_EQ(Space(0).slabs, 1);
  digest_ = "high";
  guaranteed_ = 0;
  const auto high = Open(processes[2].credentials());
  ASSERT_NE(high, nullptr) << opened_;
  SetShare(1, 6 * kSlabBlocks - 1, v1::PRIORITY_CLASS_INTERACTIVE);
  SetShare(0, 0, v1::PRIORITY_CLASS_BATCH);
  const std::vector<uint64_t> all = LeaseAll(high.get(), 6 * kSlabBlocks - 2);
  ASSERT_EQ(Space(1).slabs, 6) << "one is free";
  Kill();
  ASSERT_TRUE(Start().ok());
  const auto back = ComeBack(*promised, processes[1].credentials());
  ASSERT_NE(back, nullptr);
  ASSERT_NE(ComeBack(*reads, processes[0].credentials()), nullptr);
  ASSERT_NE(ComeBack(*high, processes[2].credentials()), nullptr);
  SetShare(1, 0, v1::PRIORITY_CLASS_INTERACTIVE);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Space(0).slabs, 2);
  EXPECT_EQ(Space(1).slabs, 6);
}

}  // namespace
}  // namespace kvpool
