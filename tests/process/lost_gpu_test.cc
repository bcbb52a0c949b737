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
