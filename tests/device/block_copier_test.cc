// Copies beside an engine: they are whole, wait for the point that they are told, and are over when the copier is.
#include "cuda/block_copier.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <vector>

#include "cuda/driver/cuda_context.h"
#include "gtest/gtest.h"
#include "tests/device/driver_function.h"
#include "tests/device/gate.h"

namespace kvpool {
namespace {

constexpr size_t kBytes = size_t{1} << 20;
constexpr size_t kPage = 4096;

class BlockCopierTest : public ::testing::Test {
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
    engine_ = *std::move(stream);
    CUdeviceptr address;
    ASSERT_EQ(context_->driver().cuMemAlloc(&address, kBytes), CUDA_SUCCESS);
    device_ = CudaArray(context_, address);
    absl::StatusOr<std::unique_ptr<BlockCopier>> copier = OpenCudaBlockCopier("0");
    ASSERT_TRUE(copier.ok()) << copier.status();
    copier_ = *std::move(copier);
    void* host = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(host, MAP_FAILED);
    host_ = static_cast<unsigned char*>(host);
  }
  void TearDown() override {
    copier_.reset();
    if (host_ != nullptr) ::munmap(host_, kBytes);
  }

  // So many bytes at an offset of the device's memory, and at one of the host's.
  CopyRange Range(size_t on_device, size_t on_host, size_t bytes) {
    return {device_.get() + on_device, HostAt(on_host), bytes};
  }
  uint64_t HostAt(size_t offset) { return reinterpret_cast<uint64_t>(host_ + offset); }
  void HoldUpEngine(Gate* gate) {
    const auto launch = reinterpret_cast<decltype(&cuLaunchHostFunc)>(FindDriverFunction("cuLaunchHostFunc"));
    ASSERT_NE(launch, nullptr);
    const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    ASSERT_EQ(launch(engine_.get(), Gate::Wait, gate), CUDA_SUCCESS);
  }
  // The engine computes: it fills the device's memory.
  void Compute(unsigned char value) {
    const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
    ASSERT_EQ(context_->driver().cuMemsetD8Async(device_.get(), value, kBytes, engine_.get()), CUDA_SUCCESS);
  }
  std::unique_ptr<FenceEvent> Record() {
    absl::StatusOr<std::unique_ptr<FenceEvent>> point = copier_->Record(engine_.get());
    EXPECT_TRUE(point.ok()) << point.status();
    return point.ok() ? *std::move(point) : nullptr;
  }
  std::unique_ptr<FenceEvent> Submit(CopyDirection direction, const std::vector<CopyRange>& ranges,
                                     const FenceEvent* after = nullptr) {
    absl::StatusOr<std::unique_ptr<FenceEvent>> ticket = copier_->Submit(direction, ranges, after);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.ok() ? *std::move(ticket) : nullptr;
  }
  void Copy(CopyDirection direction, const std::vector<CopyRange>& ranges) {
    const std::unique_ptr<FenceEvent> ticket = Submit(direction, ranges);
    ASSERT_NE(ticket, nullptr);
    const absl::Status done = ticket->Wait();
    ASSERT_TRUE(done.ok()) << done;
    EXPECT_TRUE(ticket->Done().value());
  }

  std::shared_ptr<const CudaContext> context_;
  CudaStream engine_;
  CudaArray device_;
  unsigned char* host_ = nullptr;
  std::unique_ptr<BlockCopier> copier_;
};

TEST_F(BlockCopierTest, ContentArrivesBothWays) {
  // Registered and not.
  ASSERT_TRUE(copier_->Register(HostAt(0), kBytes / 2).ok());
  std::iota(host_, host_ + kBytes, 0);
  for (size_t page = 0; page < kBytes; page += kPage) std::memcpy(host_ + page, &page, sizeof page);
  const std::vector<unsigned char> before(host_, host_ + kBytes);
  // Runs of two pages, and between them pages that follow each other on the host's side only, or on the device's.
  std::vector<CopyRange> ranges;
  const size_t pages = kBytes / kPage;
  for (size_t i = 0; i < pages; ++i) {
    const size_t moved = (i / 8 ^ 1) * 8 + (i % 8 < 2 ? i % 8 : 9 - i % 8);
    ranges.push_back(i < pages / 2 ? Range(moved * kPage, i * kPage, kPage)
                                   : Range(i * kPage, moved * kPage, kPage));
  }
  Copy(CopyDirection::kToDevice, ranges);
  std::memset(host_, 0, kBytes);
  Copy(CopyDirection::kToHost, ranges);
  EXPECT_EQ(std::memcmp(host_, before.data(), kBytes), 0);
  // What the device has where.
  Copy(CopyDirection::kToHost, {Range(0, 0, kBytes / 2), Range(kBytes / 2, kBytes / 2, kBytes / 2)});
  for (const CopyRange& range : ranges) {
    const size_t on_device = range.device_address - device_.get();
    const size_t on_host = range.host_address - HostAt(0);
    EXPECT_EQ(std::memcmp(host_ + on_device, before.data() + on_host, kPage), 0) << on_host;
  }
}

TEST_F(BlockCopierTest, ACopyWaitsForTheEnginesPoint) {
  Gate step;
  Compute(1);
  HoldUpEngine(&step);
  Compute(2);
  const std::unique_ptr<FenceEvent> point = Record();
  // Page-locked: else Submit may wait itself.
  ASSERT_TRUE(copier_->Register(HostAt(0), kBytes).ok());
  const std::unique_ptr<FenceEvent> ticket =
      Submit(CopyDirection::kToHost, {Range(0, 0, kBytes / 2)}, point.get());
  // In the order of submits, whatever a later one waits for. What it writes is not read before it is done.
  const std::unique_ptr<FenceEvent> later = Submit(CopyDirection::kToHost, {Range(0, kBytes / 2, kPage)});
  std::future<absl::Status> waited = std::async(std::launch::async, [&] { return later->Wait(); });
  EXPECT_EQ(waited.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  EXPECT_FALSE(ticket->Done().value());
  step.Open();
  ASSERT_TRUE(ticket->Wait().ok());
  EXPECT_EQ(std::vector<unsigned char>(host_, host_ + kBytes / 2), std::vector<unsigned char>(kBytes / 2, 2));
  EXPECT_TRUE(waited.get().ok());
}

TEST_F(BlockCopierTest, APointOutlivesItsStream) {
  Gate step;
  HoldUpEngine(&step);
  Compute(4);
  const std::unique_ptr<FenceEvent> point = Record();
  engine_ = CudaStream();  // What was queued is done all the same.
  ASSERT_TRUE(copier_->Register(HostAt(0), kBytes).ok());
  const std::unique_ptr<FenceEvent> ticket =
      Submit(CopyDirection::kToHost, {Range(0, 0, kBytes)}, point.get());
  EXPECT_FALSE(ticket->Done().value());
  step.Open();
  ASSERT_TRUE(ticket->Wait().ok());
  EXPECT_TRUE(point->Done().value());
  EXPECT_EQ(std::vector<unsigned char>(host_, host_ + kBytes), std::vector<unsigned char>(kBytes, 4));
}

TEST_F(BlockCopierTest, ASubmitOfNothingIsItsPoint) {
  Gate step;
  HoldUpEngine(&step);
  const std::unique_ptr<FenceEvent> point = Record();
  const std::unique_ptr<FenceEvent> ticket = Submit(CopyDirection::kToHost, {}, point.get());
  EXPECT_FALSE(ticket->Done().value());
  step.Open();
  EXPECT_TRUE(ticket->Wait().ok());
}

TEST_F(BlockCopierTest, NoRunCrossesTheEdgeOfARegistration) {
  // [none | one | another | none]
  ASSERT_TRUE(copier_->Register(HostAt(kPage), kPage).ok());
  ASSERT_TRUE(copier_->Register(HostAt(2 * kPage), kPage).ok());
  std::iota(host_, host_ + 4 * kPage, 1);
  const std::vector<unsigned char> before(host_, host_ + 4 * kPage);
  std::vector<CopyRange> ranges;
  for (size_t half = 0; half < 8; ++half)
    ranges.push_back(Range(half * kPage / 2, half * kPage / 2, kPage / 2));
  Copy(CopyDirection::kToDevice, ranges);
  std::memset(host_, 0, 4 * kPage);
  Copy(CopyDirection::kToHost, ranges);
  EXPECT_EQ(std::memcmp(host_, before.data(), before.size()), 0);
}

TEST_F(BlockCopierTest, ItsEndWaitsForCopiesUnderWay) {
  ASSERT_TRUE(copier_->Register(HostAt(0), kBytes).ok());
  Gate step;
  HoldUpEngine(&step);
  Compute(3);
  const std::unique_ptr<FenceEvent> point = Record();
  Submit(CopyDirection::kToHost, {Range(0, 0, kBytes)}, point.get());  // Nobody holds the ticket.
  std::promise<void> closed;
  // The step takes until the copier is closed, or a while where that waits, as it must.
  std::future<bool> waited = std::async(std::launch::async, [&, over = closed.get_future()] {
    const bool waits = over.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout;
    step.Open();
    return waits;
  });
  copier_.reset();
  closed.set_value();
  EXPECT_TRUE(waited.get());
  EXPECT_EQ(std::vector<unsigned char>(host_, host_ + kBytes), std::vector<unsigned char>(kBytes, 3));
  // What was registered is free to be registered again.
  copier_ = OpenCudaBlockCopier("0").value();
  EXPECT_TRUE(copier_->Register(HostAt(0), kBytes).ok());
}

TEST_F(BlockCopierTest, Limits) {
  const std::vector<CopyRange> many(kMaxCopyRanges + 1, Range(0, 0, 1));
  EXPECT_TRUE(absl::IsInvalidArgument(copier_->Submit(CopyDirection::kToHost, many, nullptr).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      copier_->Submit(CopyDirection::kToHost, {Range(0, 0, 1), Range(1, 1, 0)}, nullptr).status()));
  std::vector<std::unique_ptr<FenceEvent>> held;
  while (held.size() < kMaxCopyTickets) held.push_back(Submit(CopyDirection::kToHost, {Range(0, 0, 1)}));
  EXPECT_TRUE(absl::IsResourceExhausted(copier_->Record(engine_.get()).status()));
  EXPECT_TRUE(
      absl::IsResourceExhausted(copier_->Submit(CopyDirection::kToHost, {Range(0, 0, 1)}, nullptr).status()));
  held.pop_back();
  EXPECT_NE(Submit(CopyDirection::kToHost, {Range(0, 0, 1)}), nullptr);
}

TEST_F(BlockCopierTest, MemoryThatIsNotTheDevicesIsRefused) {
  EXPECT_FALSE(copier_->Submit(CopyDirection::kToHost, {Range(0, 0, 1), {0, HostAt(0), 1}}, nullptr).ok());
  Copy(CopyDirection::kToHost, {Range(0, 0, 1)});
}

}  // namespace
}  // namespace kvpool
