// What a GPU's slab was made of is given on once it is free: here some other process still has it.
#include "server/space/freed_memory.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSlab = kSlabBlocks * kBlockBytes;

class FreedMemoryTest : public GiveBackTest {
 protected:
  // Of a device whose memory is freed by the last who lets go of it.
  std::unique_ptr<Engine> FullGpu(uint32_t slabs) {
    auto engine = Full(slabs);
    Gpu().like_gpu = true;
    return engine;
  }
  MemoryDevice::Script& Gpu() { return *scripts_[0]; }
  uint64_t Unfreed() { return daemon_->Snapshot().devices.at(0).unfreed_bytes(); }
  // What slabs and others' hold on former ones take is never more than the daemon may have.
  void ExpectWithin(uint32_t slabs) { EXPECT_LE(Gpu().used_bytes, slabs * kSlab); }
};

TEST_F(FreedMemoryTest, WhatIsFreeIsGivenOnAtOnce) {
  const auto a = FullGpu(4);
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Space(0).slabs, 3);
  EXPECT_EQ(Unfreed(), 0);
  ExpectWithin(4);
}

TEST_F(FreedMemoryTest, WhatOthersStillHaveIsNot) {
  const auto a = FullGpu(4);
  Gpu().keep_used = 1;
  testing::internal::CaptureStderr();
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("memory of a slab is not free yet space=1"));
  EXPECT_EQ(Space(0).slabs, 2) << "another one came in its place";
  EXPECT_EQ(Unfreed(), kSlab);
  EXPECT_EQ(Used(), 4 * kSlab);
  ExpectWithin(4);
  for (int i = 0; i < 5; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(Unfreed(), kSlab);
  Gpu().used_bytes -= kSlab;
  daemon_->HousekeepOnce();
  EXPECT_EQ(Unfreed(), 0);
  EXPECT_EQ(Used(), 3 * kSlab);
}

TEST_F(FreedMemoryTest, AnOpeningIsRefusedInTimeWhereNoneComesFree) {
  const auto a = FullGpu(4);
  Gpu().keep_used = 100;
  EXPECT_THAT(Refusal(10), HasSubstr("0 of 65536 bytes left"));
  EXPECT_EQ(Space(0).slabs, 1);
  EXPECT_EQ(Unfreed(), 3 * kSlab);
  ExpectWithin(4);
  // Others' use of the device may hide that it is free, for good: the driver has the last word.
  testing::internal::CaptureStderr();
  clock_.Advance(FreedMemory::kUnseenMs);
  daemon_->HousekeepOnce();
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("memory of a slab is given on, though"));
  EXPECT_EQ(Unfreed(), 0);
  std::unique_ptr<Engine> b;
  EXPECT_TRUE(OpenB(10, &b).ok());
}

TEST_F(FreedMemoryTest, AnOpeningWaitsForIt) {
  options_.give_back_ms = 60'000;
  const auto a = FullGpu(2);
  Gpu().keep_used = 1;
  std::atomic<bool> opened{false};
  std::unique_ptr<Engine> b;
  absl::Status status;
  std::thread opening([&] {
    status = OpenB(10, &b);
    opened = true;
  });
  while (Unfreed() == 0) std::this_thread::yield();
  EXPECT_FALSE(opened);
  Gpu().used_bytes -= kSlab;
  opening.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Unfreed(), 0);
  ExpectWithin(2);
}

// The memory of one that comes free is no sign that another one's is.
TEST_F(FreedMemoryTest, EachRiseIsOfOneSlab) {
  options_.idle_space_ms = FreedMemory::kUnseenMs / 2;
  const auto a = FullGpu(4);
  Gpu().keep_used = 2;
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  ASSERT_EQ(Unfreed(), 2 * kSlab);
  Gpu().used_bytes -= kSlab;
  for (int i = 0; i < 3; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(Unfreed(), kSlab);
  ExpectWithin(3);
  // Nor are slabs that this daemon makes and destroys a fall or a rise.
  b->Die();
  b.reset();
  clock_.Advance(options_.idle_space_ms);
  Gpu().keep_used = 0;
  daemon_->HousekeepOnce();
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1);
  EXPECT_EQ(Unfreed(), kSlab);
}

// Other processes take and give back memory of the device meanwhile.
TEST_F(FreedMemoryTest, LittleThatOthersTakeHidesNothing) {
  const auto a = FullGpu(4);
  Gpu().on_destroy = [this] { Gpu().used_bytes += kSlab / 2 - 1; };
  std::unique_ptr<Engine> b;
  ASSERT_TRUE(OpenB(10, &b).ok());
  EXPECT_EQ(Unfreed(), 0);
  uint64_t given = kSlab / 2 - 1;
  Gpu().on_destroy = [&] { Gpu().used_bytes -= std::exchange(given, 0); };
  Gpu().keep_used = 1;
  const auto c = Attach("c");
  v1::OpenSession request = OpenRequest("c");
  request.set_guaranteed_blocks(5);
  ASSERT_TRUE(c->Open(request).ok());
  EXPECT_EQ(Unfreed(), kSlab) << "what they gave back is no slab";
  Gpu().on_destroy = nullptr;
}

TEST_F(FreedMemoryTest, AllDevicesOfASpaceHaveToShowIt) {
  options_.give_back_ms = 60'000;
  StartDaemon(3, /*devices=*/2);
  const auto rank0 = Attach("a"), rank1 = Attach("a");
  ASSERT_NO_FATAL_FAILURE(UseAll(rank0.get(), rank1.get()));
  for (const auto& script : scripts_) script->like_gpu = true;
  scripts_[1]->keep_used = 1;
  const auto only0 = Attach("b");
  v1::OpenSession request = OpenRequest("b");
  request.add_device_uuids("mem0");
  request.set_guaranteed_blocks(5);
  absl::Status status;
  WhileEnginesGoOn({rank0.get(), rank1.get()}, [&] { status = only0->Open(request); });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Space(0).slabs, 1)
      << "a second one went, since the first was not seen to be free on both devices";
  EXPECT_EQ(daemon_->Snapshot().devices.at(1).unfreed_bytes(), kSlab);
  EXPECT_EQ(daemon_->Snapshot().devices.at(0).unfreed_bytes(), kSlab);
  scripts_[1]->used_bytes -= kSlab;
  daemon_->HousekeepOnce();
  EXPECT_EQ(daemon_->Snapshot().devices.at(0).unfreed_bytes(), 0);
}

// One space's slabs on one device, without a daemon.
class SlabsEndTest : public ::testing::Test {
 protected:
  SlabsEndTest() {
    script_.like_gpu = true;
    facts_.tenant = "tenant";
    facts_.rank_devices = {0};
  }
  std::vector<std::unique_ptr<Device>> OneDevice() {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<MemoryDevice>("mem", kGranuleBytes, &script_));
    return devices;
  }
  std::shared_ptr<Slab> Make(uint64_t bytes) {
    EXPECT_TRUE(budget_.Take(facts_.rank_devices, {.tenant = "tenant", .bytes = bytes, .unit = bytes}).ok());
    freed_.OnMade(facts_.rank_devices, bytes);
    return *devices_[0]->MakeSlab(bytes);
  }
  void Destroy(std::shared_ptr<Slab> slab, bool of_all = true) {
    const uint64_t bytes = slab->bytes();
    std::vector<std::shared_ptr<Slab>> by_rank;
    by_rank.push_back(std::move(slab));
    freed_.Destroy(facts_, bytes, std::move(by_rank), of_all);
  }

  MemoryDevice::Script script_;
  const std::vector<std::unique_ptr<Device>> devices_ = OneDevice();
  DeviceBudget budget_{{{"mem", 100 * kSlab}}, [](std::string_view) { return 1.0; }};
  FakeClock clock_;
  FreedMemory freed_{&devices_, &budget_, &clock_};
  SpaceFacts facts_;
};

// A rise by a large slab would do for a small one, too.
TEST_F(SlabsEndTest, EachRiseIsOfOneSlabWhateverItsSize) {
  std::shared_ptr<Slab> large = Make(10 * kSlab), small = Make(kSlab);
  script_.keep_used = 2;
  Destroy(std::move(large));
  Destroy(std::move(small));
  EXPECT_EQ(freed_.unfreed_bytes(0), 11 * kSlab);
  script_.used_bytes -= 10 * kSlab;
  freed_.Collect();
  EXPECT_EQ(freed_.unfreed_bytes(0), kSlab);
  EXPECT_EQ(budget_.used(0), kSlab);
  script_.used_bytes -= kSlab;
  freed_.Collect();
  EXPECT_EQ(budget_.used(0), 0);
}

TEST_F(SlabsEndTest, WhatStaysWithOthersIsNotAwaited) {
  std::shared_ptr<Slab> slab = Make(kSlab);
  script_.keep_used = 1;
  Destroy(std::move(slab), /*of_all=*/false);
  EXPECT_EQ(script_.discarded, 0);
  EXPECT_EQ(freed_.unfreed_bytes(0), 0);
  EXPECT_EQ(budget_.used(0), 0);
}

// What reads a slab, as a copy to a tier does, has it for as long.
TEST_F(SlabsEndTest, WhatIsBeingReadIsAwaited) {
  std::shared_ptr<Slab> slab = Make(kSlab), read = slab;
  Destroy(std::move(slab));
  freed_.Collect();
  EXPECT_EQ(budget_.used(0), kSlab);
  read.reset();
  freed_.Collect();
  EXPECT_EQ(budget_.used(0), 0);
}

TEST_F(SlabsEndTest, ADeviceThatIsLostIsNotAwaited) {
  std::shared_ptr<Slab> slab = Make(kSlab);
  script_.lost = true;
  Destroy(std::move(slab));
  EXPECT_EQ(budget_.used(0), 0);
}

}  // namespace
}  // namespace kvpool
