// Fences on an engine's stream: a fence has not passed while the work before it runs, has passed after, and
// only Wait waits.
#include "cuda/fence_events.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver/cuda_context.h"
#include "gtest/gtest.h"
#include "tests/device/driver_function.h"
#include "tests/device/gate.h"

namespace kvpool {
namespace {

class FenceEventsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::shared_ptr<const CudaContext>> context = CudaContext::Open("0");
    if (absl::IsUnavailable(context.status())) GTEST_SKIP() << "no such device here: " << context.status();
    ASSERT_TRUE(context.ok()) << context.status();
    context_ = *context;
    absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    ASSERT_TRUE(current.ok()) << current.status();
    absl::StatusOr<CudaStream> stream = MakeStream(context_);
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
    absl::StatusOr<std::unique_ptr<FenceEvents>> fences = OpenCudaFenceEvents(context_->uuid_bytes());
    ASSERT_TRUE(fences.ok()) << fences.status();
    fences_ = *std::move(fences);
  }

  void HoldUpStream(Gate* gate) {
    const auto launch = reinterpret_cast<decltype(&cuLaunchHostFunc)>(FindDriverFunction("cuLaunchHostFunc"));
    ASSERT_NE(launch, nullptr);
    const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    ASSERT_EQ(launch(stream_.get(), Gate::Wait, gate), CUDA_SUCCESS);
  }
  std::unique_ptr<FenceEvent> Record() {
    absl::StatusOr<std::unique_ptr<FenceEvent>> fence = fences_->Record(stream_.get());
    EXPECT_TRUE(fence.ok()) << fence.status();
    return fence.ok() ? *std::move(fence) : nullptr;
  }

  std::shared_ptr<const CudaContext> context_;
  CudaStream stream_;
  std::unique_ptr<FenceEvents> fences_;
};

TEST_F(FenceEventsTest, PassesWhenTheWorkBeforeItIsDone) {
  Gate first_step;
  Gate second_step;
  HoldUpStream(&first_step);
  const std::unique_ptr<FenceEvent> first = Record();
  HoldUpStream(&second_step);
  const std::unique_ptr<FenceEvent> second = Record();
  EXPECT_FALSE(first->Done().value());
  EXPECT_FALSE(second->Done().value());
  first_step.Open();
  EXPECT_TRUE(first->Wait().ok());
  EXPECT_TRUE(first->Done().value());
  EXPECT_FALSE(second->Done().value());
  second_step.Open();
  EXPECT_TRUE(second->Wait().ok());
  EXPECT_TRUE(second->Done().value());
}

TEST_F(FenceEventsTest, AnotherThreadMayWait) {
  Gate step;
  HoldUpStream(&step);
  const std::unique_ptr<FenceEvent> fence = Record();
  absl::Status waited = absl::UnknownError("not yet");
  std::thread waiter([&] { waited = fence->Wait(); });
  step.Open();
  waiter.join();
  EXPECT_TRUE(waited.ok()) << waited;
}

// An engine captures its graphs while fences are waited for and slabs are mapped.
TEST_F(FenceEventsTest, AGraphThatAThreadCapturesIsNotBroken) {
  const auto begin =
      reinterpret_cast<decltype(&cuStreamBeginCapture)>(FindDriverFunction("cuStreamBeginCapture_v2"));
  const auto end = reinterpret_cast<decltype(&cuStreamEndCapture)>(FindDriverFunction("cuStreamEndCapture"));
  const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
  const absl::StatusOr<CudaStream> captured = MakeStream(context_);
  ASSERT_TRUE(captured.ok()) << captured.status();
  const std::unique_ptr<FenceEvent> fence = Record();
  ASSERT_EQ(begin(captured->get(), CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  absl::Status waited, reserved;
  std::thread([&] {
    waited = fence->Wait();
    if (waited.ok()) waited = fence->Done().status();
    reserved = ReserveCudaMemory(context_->uuid_bytes(), {.reserve_bytes = size_t{64} << 20}).status();
  }).join();
  const absl::Status recorded = fences_->Record(captured->get()).status();
  CUgraph graph;
  EXPECT_EQ(end(captured->get(), &graph), CUDA_SUCCESS);
  EXPECT_TRUE(waited.ok()) << waited;
  EXPECT_TRUE(reserved.ok()) << reserved;
  EXPECT_TRUE(absl::IsFailedPrecondition(recorded)) << recorded;
}

// Work that waits for its turn behind a gate writes to a member's memory, which is unmapped meanwhile.
class UnmapTest : public FenceEventsTest {
 protected:
  static constexpr size_t kBytes = size_t{64} << 20;

  void SetUp() override {
    FenceEventsTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    absl::StatusOr<std::unique_ptr<Device>> device = OpenCudaDevice("0");
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    absl::StatusOr<std::unique_ptr<Slab>> slab = device_->MakeSlab(kBytes);
    ASSERT_TRUE(slab.ok()) << slab.status();
    slab_ = *std::move(slab);
    absl::StatusOr<UniqueFd> fd = slab_->Export();
    ASSERT_TRUE(fd.ok()) << fd.status();
    absl::StatusOr<std::unique_ptr<MemberMemory>> member =
        ReserveCudaMemory(context_->uuid_bytes(), {.reserve_bytes = kBytes});
    ASSERT_TRUE(member.ok()) << member.status();
    member_ = *std::move(member);
    ASSERT_TRUE(member_->MapSlab(*std::move(fd), 0, kBytes).ok());
    HoldUpStream(&step_);
    const auto set = reinterpret_cast<decltype(&cuMemsetD8Async)>(FindDriverFunction("cuMemsetD8Async"));
    ASSERT_NE(set, nullptr);
    const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    ASSERT_EQ(set(member_->base() + kBytes / 2, 1, kBytes / 2, stream_.get()), CUDA_SUCCESS);
  }
  // `unmap` waits until the work is done, which then has met no fault.
  template <typename Body>
  void WaitsForTheStep(Body unmap) {
    std::atomic<bool> is_gone = false;
    std::thread unmapping([&] {
      unmap();
      is_gone = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(is_gone);
    step_.Open();
    unmapping.join();
    EXPECT_TRUE(Record()->Wait().ok());
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Slab> slab_;
  std::unique_ptr<MemberMemory> member_;
  Gate step_;
};

TEST_F(UnmapTest, AMembersMemoryStaysWhileAStepRuns) {
  WaitsForTheStep([this] { member_.reset(); });
}

TEST_F(UnmapTest, ASlabIsUnmappedOnceItsWorkIsFinished) {
  WaitsForTheStep([this] {
    EXPECT_TRUE(member_->FinishWork().ok());
    EXPECT_TRUE(member_->UnmapSlab(0, kBytes).ok());
  });
}

TEST_F(UnmapTest, ASlabStaysWhileAStreamCapturesAGraph) {
  const auto begin =
      reinterpret_cast<decltype(&cuStreamBeginCapture)>(FindDriverFunction("cuStreamBeginCapture_v2"));
  const auto end = reinterpret_cast<decltype(&cuStreamEndCapture)>(FindDriverFunction("cuStreamEndCapture"));
  step_.Open();
  const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
  const absl::StatusOr<CudaStream> captured = MakeStream(context_);
  ASSERT_TRUE(captured.ok()) << captured.status();
  ASSERT_EQ(begin(captured->get(), CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  const absl::Status finished = member_->FinishWork();
  EXPECT_TRUE(absl::IsFailedPrecondition(finished)) << finished;
  CUgraph graph;
  end(captured->get(), &graph);
  EXPECT_TRUE(member_->FinishWork().ok());
  EXPECT_TRUE(member_->UnmapSlab(0, kBytes).ok());
}

TEST_F(FenceEventsTest, AnEventUsedAgainMeansItsNewPoint) {
  Record()->Wait().IgnoreError();
  Gate step;
  HoldUpStream(&step);
  const std::unique_ptr<FenceEvent> fence = Record();
  EXPECT_FALSE(fence->Done().value());
  step.Open();
  EXPECT_TRUE(fence->Wait().ok());
}

TEST_F(FenceEventsTest, GivenBackBeforeItIsDone) {
  Gate step;
  HoldUpStream(&step);
  Record().reset();
  const std::unique_ptr<FenceEvent> fence = Record();
  EXPECT_FALSE(fence->Done().value());
  step.Open();
  EXPECT_TRUE(fence->Wait().ok());
}

TEST_F(FenceEventsTest, OutlivesThePoolItCameFrom) {
  const std::unique_ptr<FenceEvent> fence = Record();
  fences_.reset();
  EXPECT_TRUE(fence->Wait().ok());
}

}  // namespace
}  // namespace kvpool
