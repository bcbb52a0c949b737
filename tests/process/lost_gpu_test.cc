// A GPU that is lost ends the daemon, whichever call meets it first. These tests run on the fake driver.
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "proto/support/unique_fd.h"
#include "tests/process/raw_engine.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

std::unique_ptr<DaemonProcess> StartOnFakeGpu(const std::string& faults,
                                              std::vector<std::string> flags = {}) {
  auto daemon = DaemonProcess::Start(
      {.device = "cuda:0",
       .flags = std::move(flags),
       .environment = {"KVPOOL_LIBCUDA=" KVPOOL_FAKE_CUDA, "KVPOOL_FAKE_CUDA_FAIL=" + faults}});
  EXPECT_TRUE(daemon.ok()) << daemon.status();
  return daemon.ok() ? *std::move(daemon) : nullptr;
}

constexpr int kPatienceMs = 60000;  // Bounds a wait that ends by itself much earlier.

// Waits until the daemon has ended by itself.
void ExpectEndsFor(DaemonProcess* daemon, const std::string& reason) {
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, daemon->pid(), 0)));
  pollfd death{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&death, 1, kPatienceMs), 1) << "it goes on";
  const int status = daemon->End(SIGKILL);  // It has ended, so that this only reads its wait status.
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) << "wait status " << status;
  EXPECT_TRUE(absl::StrContains(daemon->Log(), reason)) << daemon->Log();
  EXPECT_TRUE(absl::StrContains(daemon->Log(), "CUDA_ERROR_ECC_UNCORRECTABLE")) << daemon->Log();
}

TEST(LostGpuTest, WhileASlabIsMade) {
  const auto daemon = StartOnFakeGpu("cuMemMap#1=CUDA_ERROR_ECC_UNCORRECTABLE");
  ASSERT_NE(daemon, nullptr);
  EXPECT_FALSE(RawEngine::Open(daemon->socket()).ok());
  ExpectEndsFor(daemon.get(), "space 1: rank 0: ");
}

TEST(LostGpuTest, WhileASlabIsSent) {
  const auto daemon = StartOnFakeGpu("cuMemExportToShareableHandle#1=CUDA_ERROR_ECC_UNCORRECTABLE");
  ASSERT_NE(daemon, nullptr);
  EXPECT_FALSE(RawEngine::Open(daemon->socket()).ok());
  ExpectEndsFor(daemon.get(), "space 1: sending slab 0: ");
}

// A destructor that meets the loss can't report it, and at that time nothing else needs the GPU.
TEST(LostGpuTest, WhileASlabIsDestroyed) {
  const auto daemon =
      StartOnFakeGpu("cuMemCreate#2=CUDA_ERROR_OUT_OF_MEMORY,cuMemUnmap#1=CUDA_ERROR_ECC_UNCORRECTABLE");
  ASSERT_NE(daemon, nullptr);
  auto engine = RawEngine::Attach(daemon->socket());
  ASSERT_TRUE(engine.ok()) << engine.status();
  v1::OpenSession request = SmallSession((*engine)->attach_token());
  request.set_guaranteed_blocks(
      1500);  // Two slabs. The second can't be made, so that the first is destroyed again.
  grpc::ClientContext context;
  v1::OpenSessionResult result;
  EXPECT_FALSE((*engine)->stub().OpenSession(&context, request, &result).ok());
  ExpectEndsFor(daemon.get(), "device GPU-");
}

// A block on its way to a tier or from it: nothing of it is in the tier, and none is found.
class LostWhileItCopies : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(LostGpuTest, LostWhileItCopies,
                         testing::Values("cuMemcpyBatchAsync#1", "cuEventSynchronize#1",
                                         "cuMemcpyBatchAsync#2", "cuEventSynchronize#2"));

TEST_P(LostWhileItCopies, TheDaemonEnds) {
  const std::string call = GetParam();
  const bool up = call.ends_with("2");
  const TemporaryDirectory folder;
  const std::string tier = "--tier=file:" + folder.path() + "/tier,capacity=64MiB,write=seal";
  const auto daemon = StartOnFakeGpu(call + "=CUDA_ERROR_ECC_UNCORRECTABLE", {tier});
  ASSERT_NE(daemon, nullptr);
  auto engine = RawEngine::Open(daemon->socket());
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto blocks = (*engine)->Lease(1);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  ASSERT_TRUE((*engine)->Seal(*blocks, KeysOf("k", 1)).ok());
  if (up) {
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
         daemon->Metric("kvpool_tier_demoted_blocks_total") < 1 && std::chrono::steady_clock::now() < end;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ASSERT_TRUE((*engine)->Release(*blocks).ok());
    v1::EvictResponse evicted;
    grpc::ClientContext evicting, matching;
    ASSERT_TRUE(v1::Operator::NewStub((*engine)->channel())->Evict(&evicting, {}, &evicted).ok());
    EXPECT_EQ(evicted.evicted(), 1);
    v1::MatchRequest match;
    *match.mutable_call() = (*engine)->NextCall();
    match.mutable_match()->set_wait_ms(kPatienceMs);
    v1::GroupKeys* const keys = match.mutable_match()->add_groups();
    keys->set_key_bytes(32);
    keys->set_keys(KeysOf("k", 1));
    v1::MatchResult found;
    EXPECT_FALSE((*engine)->stub().Match(&matching, match, &found).ok());
  }
  ExpectEndsFor(daemon.get(), ": copies for the tier: ");
  const auto next = StartOnFakeGpu("", {tier});
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(next->Metric("kvpool_tier_values"), up ? 1 : 0);
  EXPECT_EQ(next->Stop(), 0);
}

TEST(LostGpuTest, ATierIsRefusedWhereAServerGoesOnWithTheWorkOfTheDead) {
  const TemporaryDirectory folder;
  const auto daemon = DaemonProcess::Start(
      {.device = "cuda:0",
       .flags = {"--tier=file:" + folder.path() + "/tier,capacity=64MiB"},
       .environment = {"KVPOOL_LIBCUDA=" KVPOOL_FAKE_CUDA, "KVPOOL_FAKE_CUDA_WITHOUT=own-context"}});
  ASSERT_FALSE(daemon.ok());
  EXPECT_TRUE(absl::StrContains(daemon.status().message(), "--tier: device GPU-")) << daemon.status();
  EXPECT_TRUE(absl::StrContains(daemon.status().message(), "share a server (MPS)")) << daemon.status();
}

void ExpectInLog(const DaemonProcess& daemon, const std::string& text) {
  const std::string log = daemon.AwaitInLog(text);
  EXPECT_TRUE(absl::StrContains(log, text)) << log;
}

// What lies in the memory of a lost GPU is served by no daemon, though the memory is there.
TEST(LostGpuTest, NothingOutlivesTheDaemonThen) {
  // The first export goes to the keeper, the second to an engine, the third to the next engine. The witness is a process of its
  // own, which exports two.
  const auto daemon = StartOnFakeGpu("cuMemExportToShareableHandle#3=CUDA_ERROR_ECC_UNCORRECTABLE",
                                     {"--keeper=on", "--keeper-deaths=1000000"});
  ASSERT_NE(daemon, nullptr);
  ExpectInLog(*daemon, "memory outlives a process");
  const auto first = RawEngine::Open(daemon->socket());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(RawEngine::Open(daemon->socket()).ok());
  ExpectInLog(*daemon, "CUDA_ERROR_ECC_UNCORRECTABLE");
  ExpectInLog(*daemon, "a GPU was lost, and nobody knows what its memory holds");
  // Its daemon would outlive a keeper that is killed.
  EXPECT_EQ(daemon->Stop(), 0);
}

// Where memory ends with its process, or can't be had afterwards, the daemon serves as one without a keeper.
TEST(LostGpuTest, AKeeperIsOfNoUseWhereMemoryDoesNotOutliveItsProcess) {
  const auto daemon =
      StartOnFakeGpu("cuMemImportFromShareableHandle#1+=CUDA_ERROR_INVALID_VALUE", {"--keeper=on"});
  ASSERT_NE(daemon, nullptr);
  ExpectInLog(*daemon, "keeper not used");
  ExpectInLog(*daemon, "cuMemImportFromShareableHandle");
  EXPECT_TRUE(RawEngine::Open(daemon->socket()).ok());
  EXPECT_EQ(daemon->Stop(), 0);
}

TEST(LostGpuTest, AKeeperIsOfNoUseWhereAServerGoesOnWithTheWorkOfTheDead) {
  auto daemon = DaemonProcess::Start(
      {.device = "cuda:0",
       .flags = {"--keeper=on"},
       .environment = {"KVPOOL_LIBCUDA=" KVPOOL_FAKE_CUDA, "KVPOOL_FAKE_CUDA_WITHOUT=own-context"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  ExpectInLog(**daemon, "keeper not used");
  ExpectInLog(**daemon, "share a server (MPS)");
  EXPECT_TRUE(RawEngine::Open((*daemon)->socket()).ok());
  EXPECT_EQ((*daemon)->Stop(), 0);
}

}  // namespace
}  // namespace kvpool
