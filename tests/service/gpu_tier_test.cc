// The way of a block from a GPU down to a tier and back, on one rank and on two: over the fake driver, whose copies fail and take
// long on command, and on GPUs where there are any.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/block_copier.h"
#include "server/tiers/file_tier.h"
#include "tests/device/driver_function.h"
#include "tests/device/gate.h"
#include "tests/service/service_fixture.h"
#include "tests/support/fake_cuda/controls.h"
#include "tests/support/held_device.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

constexpr uint64_t kGpuBlockBytes = 64 << 10, kGpuSlabBytes = 2 << 20;
// What a session can lease of one slab: not the null block, and not its sink.
constexpr uint32_t kLeasable = kGpuSlabBytes / kGpuBlockBytes - 2;

// Copies that wait until they are let go.
class HeldCopies {
 public:
  explicit HeldCopies(decltype(&cuFakeBeforeCopy) before_copy) : before_copy_(before_copy) {
    before_copy_(&HeldCopies::Hold, this);
  }
  ~HeldCopies() {
    LetGo();
    before_copy_(nullptr, nullptr);
  }
  // One has begun.
  void Await() { begun_.get_future().wait(); }
  void LetGo() { gate_.Open(); }

 private:
  static void Hold(void* held) {
    auto* const self = static_cast<HeldCopies*>(held);
    std::call_once(self->once_, [&] { self->begun_.set_value(); });
    Gate::Wait(&self->gate_);
  }

  const decltype(&cuFakeBeforeCopy) before_copy_;
  Gate gate_;
  std::once_flag once_;
  std::promise<void> begun_;
};

// The parameter: ranks.
class GpuTierTest : public ServiceTest, public testing::WithParamInterface<uint32_t> {
 protected:
  static constexpr uint64_t kWaitMs = 60000;  // The tier counts by the real clock.

  void SetUp() override {
    const absl::StatusOr<int> count = CudaDeviceCount();
    if (!count.ok()) GTEST_SKIP() << "no such device here: " << count.status();
    gpus_ = static_cast<uint32_t>(*count);
    fail_ = reinterpret_cast<decltype(&cuFakeFail)>(FindDriverFunction("cuFakeFail"));
    before_copy_ = reinterpret_cast<decltype(&cuFakeBeforeCopy)>(FindDriverFunction("cuFakeBeforeCopy"));
  }
  void TearDown() override {
    if (fail_ != nullptr) fail_("");
    engine_.reset();
    others_.clear();
    daemon_.reset();
  }

  // A daemon on the folder, with one slab on each rank.
  void Begin(TierWrite write = TierWrite::kEvict) {
    const uint32_t ranks = GetParam();
    auto file = FileTier::Open({.path = folder_.path(), .capacity_bytes = 16 << 20});
    ASSERT_TRUE(file.ok()) << file.status();
    auto faulty = std::make_shared<FaultyTier>(*std::move(file));
    tier_ = faulty.get();
    options_.tiers = {{std::move(faulty), {.when = write}}};
    options_.tier_secret = std::string(32, 's');
    options_.tier_buffer_bytes = 8 << 20;
    options_.low_watermark = options_.high_watermark = 0;
    options_.version = "test";
    options_.housekeeping_thread = false;
    options_.slab_bytes = kGpuSlabBytes;
    options_.device_capacity_bytes.assign(ranks, kGpuSlabBytes);
    std::vector<std::unique_ptr<Device>> devices;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      absl::StatusOr<std::unique_ptr<Device>> gpu = OpenCudaDevice(std::to_string(rank % gpus_));
      ASSERT_TRUE(gpu.ok()) << gpu.status();
      absl::StatusOr<std::unique_ptr<BlockCopier>> copier = OpenCudaBlockCopier((*gpu)->id());
      ASSERT_TRUE(copier.ok()) << copier.status();
      copiers_.push_back(*std::move(copier));
      devices.push_back(MakeHeldDevice(*std::move(gpu), &holds_[rank]));
    }
    gpu_ = devices[0].get();
    absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options_, std::move(devices), &clock_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    v1::OpenSession request = OpenRequest();
    request.mutable_layout()->set_block_bytes(kGpuBlockBytes);
    request.set_ranks(ranks);
    engine_ = OpenEngine(request);
    std::vector<Engine*> members = {engine_.get()};
    for (uint32_t rank = 1; rank < ranks; ++rank) {
      v1::AddMember join = JoinRequest(*engine_, rank);
      *join.mutable_layout() = request.layout();
      others_.push_back(Attach("rank " + std::to_string(rank)));
      ASSERT_TRUE(others_.back()->Join(*engine_, join).ok());
      members.push_back(others_.back().get());
    }
    Settle(members);
  }

  // ---- What blocks hold: on each rank something else
  static std::string ContentOf(const std::string& key, uint32_t rank) {
    const std::string word = key + std::to_string(rank);
    std::string content;
    while (content.size() < kGpuBlockBytes) content += word;
    content.resize(kGpuBlockBytes);
    return content;
  }
  void Copy(CopyDirection direction, uint64_t ref, uint32_t rank, char* host) {
    const CopyRange range = {
        .device_address = holds_[rank].slab_addresses().at(0) + IdOf(ref) * kGpuBlockBytes,
        .host_address = reinterpret_cast<uint64_t>(host),
        .bytes = kGpuBlockBytes};
    const auto ticket = copiers_[rank]->Submit(direction, {&range, 1}, nullptr);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    ASSERT_TRUE((*ticket)->Wait().ok());
  }
  void Fill(uint64_t ref, const std::string& key) {
    for (uint32_t rank = 0; rank < GetParam(); ++rank) {
      std::string content = ContentOf(key, rank);
      Copy(CopyDirection::kToDevice, ref, rank, content.data());
    }
  }
  bool Has(uint64_t ref, const std::string& key) {
    for (uint32_t rank = 0; rank < GetParam(); ++rank) {
      std::string found(kGpuBlockBytes, '\0');
      Copy(CopyDirection::kToHost, ref, rank, found.data());
      if (found != ContentOf(key, rank)) return false;
    }
    return true;
  }

  // ---- As tier_test.cc has it of host memory
  void Compute(const std::vector<std::string>& keys) {
    const std::vector<uint64_t> blocks = engine_->Lease(static_cast<uint32_t>(keys.size()));
    ASSERT_EQ(blocks.size(), keys.size());
    for (size_t i = 0; i < blocks.size(); ++i) Fill(blocks[i], keys[i]);
    engine_->Seal(blocks, keys);
    engine_->Release(blocks);
  }
  void Move() {
    do {
      tier_->Drain();
    } while (daemon_->MoveTierOnce());
  }
  void PushOut() {
    const std::vector<uint64_t> blocks = engine_->Lease(kLeasable);
    ASSERT_EQ(blocks.size(), kLeasable);
    for (const uint64_t block : blocks) Fill(block, "other");
    engine_->Release(blocks);
  }
  // Matches, waits as long as there is something to wait for, and checks the bytes. Answers how many blocks came.
  size_t Await(const std::vector<std::string>& keys) {
    v1::Operation operation = MatchOp(keys);
    operation.mutable_match()->set_wait_ms(kWaitMs);
    std::optional<v1::OperationResult> answer;
    engine_->Send(operation, &answer);
    Move();
    EXPECT_TRUE(answer.has_value());
    if (!answer.has_value()) return 0;
    EXPECT_EQ(answer->code(), 0) << answer->message();
    const auto& blocks = answer->match().groups(0).blocks();
    for (int i = 0; i < blocks.size(); ++i) EXPECT_TRUE(Has(blocks[i], keys[static_cast<size_t>(i)])) << i;
    if (!blocks.empty()) engine_->Release({blocks.begin(), blocks.end()});
    return static_cast<size_t>(blocks.size());
  }
  BelowCounters counters() { return daemon_->Snapshot().spaces.at(0).below; }
  // All that the tier was given, and has.
  uint64_t Values() {
    tier_->Drain();
    return tier_->usage().values;
  }

  // ---- What a real GPU does not do on command
  bool fake() const { return fail_ != nullptr && before_copy_ != nullptr; }
  // Copies in one direction fail, from the nth call on, however this driver is told of them.
  void FailCopies(CopyDirection direction, int from) {
    const std::string at = "#" + std::to_string(from) + "+=CUDA_ERROR_INVALID_VALUE";
    const std::string each = direction == CopyDirection::kToHost ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync";
    fail_(("cuMemcpyBatchAsync" + at + "," + each + at).c_str());
  }

  TierFolder folder_;
  FaultyTier* tier_ = nullptr;
  uint32_t gpus_ = 0;
  const Device* gpu_ = nullptr;  // The daemon's first.
  DeviceHold holds_[2];          // They know where slabs are.
  std::vector<std::unique_ptr<BlockCopier>> copiers_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::unique_ptr<Engine>> others_;
  decltype(&cuFakeFail) fail_ = nullptr;
  decltype(&cuFakeBeforeCopy) before_copy_ = nullptr;
  const std::vector<std::string> keys_ = Keys("k", 10);
};

INSTANTIATE_TEST_SUITE_P(Ranks, GpuTierTest, testing::Values(1u, 2u));

constexpr char kNoCommands[] = "a real GPU fails and waits on nobody's command";

TEST_P(GpuTierTest, WhatLeavesComesBack) {
  Begin();
  Compute(keys_);
  Move();
  EXPECT_EQ(counters().demoted, 10);
  EXPECT_EQ(Values(), 10);
  PushOut();
  EXPECT_EQ(engine_->Match(keys_).below_tokens(), 160);
  EXPECT_EQ(Await(keys_), 10);
  EXPECT_EQ(counters().promoted, 10);
  EXPECT_EQ(counters().lost, 0);
  // The daemon holds nothing of it any more.
  EXPECT_EQ(Blocks().cached(), 10);
}

TEST_P(GpuTierTest, TheEndOfADaemonWritesWhatItsGpusHave) {
  Begin();
  Compute(keys_);
  EXPECT_EQ(daemon_->FlushTier(std::chrono::minutes(1)).written, 10);
  engine_.reset();
  others_.clear();
  daemon_.reset();
  options_.tiers.clear();
  for (DeviceHold& hold : holds_) hold.Forget();
  copiers_.clear();
  Begin();
  EXPECT_EQ(Await(keys_), 10);
}

TEST_P(GpuTierTest, ACopyThatFailsIsDroppedAndFoundByNobody) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  Begin();
  Compute(keys_);
  // Of two ranks the first one's copies are done.
  FailCopies(CopyDirection::kToHost, static_cast<int>(GetParam()));
  Move();
  EXPECT_EQ(counters().dropped, 10);
  EXPECT_EQ(counters().demoted, 0);
  EXPECT_EQ(Values(), 0);
  // It is left alone for a second.
  fail_("");
  Move();
  EXPECT_EQ(counters().demoted, 0);
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(counters().demoted, 10);
  PushOut();
  EXPECT_EQ(Await(keys_), 10);
}

TEST_P(GpuTierTest, WhatNoSessionUsesIsCopiedThoughItFailedOnce) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  Begin();
  Compute(keys_);
  FailCopies(CopyDirection::kToHost, 1);
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(Values(), 0);
  fail_("");
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(counters().demoted, 10);
}

TEST_P(GpuTierTest, ABlockThatIsLeasedMeanwhileIsThrownAway) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  Begin();
  Compute(keys_);
  HeldCopies held(before_copy_);
  std::future<bool> round = std::async(std::launch::async, [&] { return daemon_->MoveTierOnce(); });
  held.Await();
  // No verb waits for the copies.
  const std::vector<uint64_t> blocks = engine_->Lease(kLeasable);
  EXPECT_EQ(blocks.size(), kLeasable);
  held.LetGo();
  round.get();
  EXPECT_EQ(counters().moved, 10);
  EXPECT_EQ(Values(), 0);
  engine_->Release(blocks);
  EXPECT_EQ(engine_->Match(keys_).below_tokens(), 0);
}

TEST_P(GpuTierTest, MemoryThatIsReadStaysMapped) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  options_.idle_space_ms = 1000;
  Begin();
  Compute(keys_);
  const size_t free_bytes = gpu_->free_bytes().value();
  {
    HeldCopies held(before_copy_);
    std::future<bool> round = std::async(std::launch::async, [&] { return daemon_->MoveTierOnce(); });
    held.Await();
    engine_->Do(CloseOp());
    engine_->Die();
    for (const auto& other : others_) other->Die();
    clock_.Advance(1001);
    daemon_->HousekeepOnce();
    EXPECT_TRUE(daemon_->Snapshot().spaces.empty());
    EXPECT_EQ(gpu_->free_bytes().value(), free_bytes);
    held.LetGo();
    round.get();
  }
  const uint32_t slabs = gpus_ == 1 ? GetParam() : 1;
  EXPECT_EQ(gpu_->free_bytes().value(), free_bytes + slabs * kGpuSlabBytes);
}

TEST_P(GpuTierTest, EachGpuIsToldOfASliceInOneCall) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  if (FindDriverFunction("cuMemcpyBatchAsync_v2") == nullptr) GTEST_SKIP() << "this driver has no batches";
  Begin();
  Compute(keys_);
  const std::string one_more = std::to_string(GetParam() + 1);
  fail_(("cuMemcpyDtoHAsync#1+=CUDA_ERROR_INVALID_VALUE,cuMemcpyBatchAsync#" + one_more +
         "+=CUDA_ERROR_INVALID_VALUE")
            .c_str());
  Move();
  EXPECT_EQ(counters().demoted, 10);
}

// The buffers and blocks of such a copy go to others.
TEST_P(GpuTierTest, WhatCannotBeWaitedForIsOverAllTheSame) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  Begin();
  Compute(keys_);
  fail_("cuEventSynchronize#1=CUDA_ERROR_UNKNOWN");
  {
    HeldCopies held(before_copy_);
    std::future<bool> round = std::async(std::launch::async, [&] { return daemon_->MoveTierOnce(); });
    held.Await();
    EXPECT_EQ(round.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
    held.LetGo();
    round.get();
  }
  EXPECT_EQ(counters().dropped, 10);
  EXPECT_EQ(Values(), 0);
}

TEST_P(GpuTierTest, WhatCannotBeCopiedUpIsNotSealed) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  const v1::StateCounts before = Blocks();
  FailCopies(CopyDirection::kToDevice, static_cast<int>(GetParam()));
  EXPECT_EQ(Await(keys_), 0);
  EXPECT_EQ(counters().promoted, 0);
  EXPECT_EQ(counters().lost, 1);
  EXPECT_EQ(engine_->Match(keys_).tokens(), 0);
  EXPECT_EQ(Blocks().free(), before.free());
  EXPECT_EQ(Blocks().leased(), before.leased());
  fail_("");
  EXPECT_EQ(Await(keys_), 10);
}

TEST_P(GpuTierTest, AMatchFindsNothingOfABlockWhoseBytesAreUnderWay) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  v1::Operation operation = MatchOp(keys_);
  operation.mutable_match()->set_prefetch(true);
  engine_->Do(operation);
  {
    // A tier may answer within the round that asks it.
    HeldCopies held(before_copy_);
    std::future<bool> round = std::async(std::launch::async, [&] {
      daemon_->MoveTierOnce();
      tier_->Drain();
      return daemon_->MoveTierOnce();
    });
    held.Await();
    EXPECT_EQ(engine_->Match(keys_).tokens(), 0);
    held.LetGo();
    round.get();
  }
  EXPECT_EQ(Await(keys_), 10);
  EXPECT_EQ(counters().promoted, 10);
}

TEST_P(GpuTierTest, BuffersThatCannotBeLockedAreCopiedAllTheSame) {
  if (!fake()) GTEST_SKIP() << kNoCommands;
  fail_("cuMemHostRegister#1+=CUDA_ERROR_OUT_OF_MEMORY");
  Begin();
  Compute(keys_);
  Move();
  EXPECT_EQ(counters().demoted, 10);
  PushOut();
  EXPECT_EQ(Await(keys_), 10);
}

}  // namespace
}  // namespace kvpool
