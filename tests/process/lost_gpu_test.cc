// A GPU that is lost ends the daemon, whichever call meets it first. These tests run on the fake driver.
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "absl/strings/match.h"
#include "proto/support/unique_fd.h"
#include "tests/process/raw_engine.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

std::unique_ptr<DaemonProcess> StartOnFakeGpu(const std::string& faults) {
  auto daemon = DaemonProcess::Start(
      {.device = "cuda:0",
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

}  // namespace
}  // namespace kvpool
