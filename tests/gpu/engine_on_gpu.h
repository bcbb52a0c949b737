// A daemon on the GPU of this run, and engines as its clients.
#ifndef KVPOOL_TESTS_GPU_ENGINE_ON_GPU_H_
#define KVPOOL_TESTS_GPU_ENGINE_ON_GPU_H_

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/layouts.h"
#include "client/session.h"
#include "cuda/driver/cuda_context.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"

namespace kvpool {

inline Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

class EngineOnGpu : public ::testing::Test {
 protected:
  static constexpr uint64_t kBlockBytes = 64 << 10;
  static constexpr uint32_t kTokensPerBlock = 16;

  void SetUp() override {
    absl::StatusOr<std::shared_ptr<const CudaContext>> context = CudaContext::Open("0");
    if (absl::IsUnavailable(context.status())) GTEST_SKIP() << "no such device here: " << context.status();
    ASSERT_TRUE(context.ok()) << context.status();
    context_ = *std::move(context);
  }

  void StartDaemon(std::vector<std::string> environment = {}) {
    // The binary beside this one, since the folder that tests/gpu/build.sh makes has no build tree.
    const std::filesystem::path beside =
        std::filesystem::read_symlink("/proc/self/exe").replace_filename("kvpoold");
    absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon =
        DaemonProcess::Start({.binary = beside, .device = "cuda:0", .environment = std::move(environment)});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  SessionOptions Options() const {
    SessionOptions options;
    options.socket = daemon_->socket();
    options.client_name = "engine_test";
    options.layout = OpaqueLayout({.block_bytes = kBlockBytes, .tokens_per_block = kTokensPerBlock});
    options.fingerprint.set_digest("engine_test");
    options.device_uuids = {context_->uuid()};
    options.magazine_blocks = 16;
    return options;
  }
  static std::unique_ptr<Session> Open(const SessionOptions& options) {
    absl::StatusOr<std::unique_ptr<Session>> session = Session::Open(options);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }

  std::shared_ptr<const CudaContext> context_;
  std::unique_ptr<DaemonProcess> daemon_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_GPU_ENGINE_ON_GPU_H_
