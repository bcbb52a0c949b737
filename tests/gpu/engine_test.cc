// Engines on a GPU, against a real kvpoold that owns its memory: kernels write and read every block through
// the engine's own mappings.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/prefix_hasher.h"
#include "client/session.h"
#include "cuda/block_stamper.h"
#include "cuda/driver/cuda_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/device/driver_function.h"
#include "tests/device/gate.h"
#include "tests/gpu/engine_on_gpu.h"

namespace kvpool {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class StampsOnGpu : public EngineOnGpu {
 protected:
  void SetUp() override {
    EngineOnGpu::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    absl::StatusOr<std::unique_ptr<BlockStamper>> stamper = OpenCudaStamper(context_->uuid_bytes());
    ASSERT_TRUE(stamper.ok()) << stamper.status();
    stamper_ = *std::move(stamper);
  }

  static std::vector<PrefixKey> Keys(const Session& session, size_t blocks) {
    std::vector<uint32_t> tokens(blocks * kTokensPerBlock, 7);
    return PrefixHasher(session.hash_seed()).Chain(tokens, kTokensPerBlock);
  }
  static std::vector<StampedBlock> Stamps(const Session& session, absl::Span<const BlockRef> refs,
                                          absl::Span<const PrefixKey> keys) {
    std::vector<StampedBlock> stamps(refs.size());
    for (size_t i = 0; i < refs.size(); ++i) {
      stamps[i].address = session.address(refs[i].id);
      std::memcpy(&stamps[i].key_digest, keys[i].data(), sizeof stamps[i].key_digest);
      stamps[i].block_ref = refs[i].Pack();
    }
    return stamps;
  }
  void ExpectStamped(const Session& session, absl::Span<const BlockRef> refs,
                     absl::Span<const PrefixKey> keys) {
    const auto wrong = stamper_->Verify(Stamps(session, refs, keys), kBlockBytes);
    ASSERT_TRUE(wrong.ok()) << wrong.status();
    EXPECT_THAT(*wrong, Each(0u));
  }
  // Leases blocks, writes them on the device, seals them and gives them back.
  void Share(Session* session, absl::Span<const PrefixKey> keys) {
    absl::StatusOr<Blocks> blocks = session->LeaseWithin(static_cast<uint32_t>(keys.size()), Soon());
    ASSERT_TRUE(blocks.ok()) << blocks.status();
    const absl::Status written = stamper_->Write(Stamps(*session, blocks->refs(), keys), kBlockBytes);
    ASSERT_TRUE(written.ok()) << written;
    absl::StatusOr<PendingSeal> seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
    ASSERT_TRUE(seal.ok()) << seal.status();
    const absl::StatusOr<SealOutcome> outcome = seal->Wait(Soon());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->refused.empty());
  }
  // Matches all of `keys` and verifies the blocks' stamps.
  void ExpectShared(Session* session, absl::Span<const PrefixKey> keys) {
    absl::StatusOr<PendingMatch> match = session->Match({{GroupKeys{.keys = KeyBytes(keys)}}});
    ASSERT_TRUE(match.ok()) << match.status();
    const absl::StatusOr<MatchHit> hit = match->Wait(Soon());
    ASSERT_TRUE(hit.ok()) << hit.status();
    ASSERT_EQ(hit->groups.at(0).size(), keys.size());
    ExpectStamped(*session, hit->groups[0].refs(), keys);
  }

  std::unique_ptr<BlockStamper> stamper_;
};

TEST_F(StampsOnGpu, WhatOneWritesAnotherReads) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  const std::unique_ptr<Session> writer = Open(Options());
  ASSERT_NE(writer, nullptr);
  const std::unique_ptr<Session> reader = Open(Options());
  ASSERT_NE(reader, nullptr);
  // More blocks than a slab of 4 MiB has.
  const std::vector<PrefixKey> keys = Keys(*writer, 150);
  Share(writer.get(), keys);
  EXPECT_NE(writer->base(), reader->base());
  ExpectShared(reader.get(), keys);
}

TEST_F(StampsOnGpu, OneIpcHandleIsAWholeSpace) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  SessionOptions options = Options();
  options.kind = v1::SPACE_KIND_IPC;
  options.max_space_bytes = 32 << 20;
  const std::unique_ptr<Session> session = Open(options);
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = Keys(*session, 150);
  Share(session.get(), keys);
  ExpectShared(session.get(), keys);
}

TEST_F(StampsOnGpu, WarmupLeavesOthersBlocksAlone) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  const std::unique_ptr<Session> owner = Open(Options());
  ASSERT_NE(owner, nullptr);
  const std::vector<PrefixKey> keys = Keys(*owner, 32);
  Share(owner.get(), keys);
  SessionOptions options = Options();
  options.warmup = true;
  const std::unique_ptr<Session> late = Open(options);
  ASSERT_NE(late, nullptr);
  // Engines do so before they start: they write dummy K and V into low block ids.
  std::vector<StampedBlock> dummies;
  for (uint32_t id = 0; id < 64; ++id)
    dummies.push_back({.address = late->address(BlockId{id}), .key_digest = 1});
  ASSERT_TRUE(stamper_->Write(dummies, kBlockBytes).ok());
  const absl::Status finished = late->FinishWarmup();
  ASSERT_TRUE(finished.ok()) << finished;
  ExpectShared(late.get(), keys);
  ExpectShared(owner.get(), keys);
}

TEST_F(StampsOnGpu, ASealWaitsForTheStreamThatWrites) {
  ASSERT_NO_FATAL_FAILURE(StartDaemon());
  const std::unique_ptr<Session> session = Open(Options());
  ASSERT_NE(session, nullptr);
  const absl::StatusOr<CurrentContext> current = context_->MakeCurrent();
  ASSERT_TRUE(current.ok()) << current.status();
  const absl::StatusOr<CudaStream> stream = MakeStream(context_);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto launch = reinterpret_cast<decltype(&cuLaunchHostFunc)>(FindDriverFunction("cuLaunchHostFunc"));
  ASSERT_NE(launch, nullptr);

  const std::vector<PrefixKey> keys = Keys(*session, 4);
  absl::StatusOr<Blocks> blocks = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  Gate gate;
  const uint64_t step = session->BeginStep();
  ASSERT_EQ(launch(stream->get(), Gate::Wait, &gate), CUDA_SUCCESS);
  ASSERT_TRUE(session->CompleteStepOnStream(step, stream->get()).ok());
  absl::StatusOr<PendingSeal> seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
  ASSERT_TRUE(seal.ok()) << seal.status();
  // The daemon answers this match after the seal has reached it, and does not find the blocks yet.
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_LT(session->passed_step(), step);
  EXPECT_FALSE(seal->Ready());
  gate.Open();
  const absl::StatusOr<SealOutcome> outcome = seal->Wait(Soon());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->refused.empty());
  EXPECT_GE(session->passed_step(), step);
}

TEST_F(StampsOnGpu, ADaemonThatLosesItsGpuSaysSoAndEnds) {
  if (std::getenv("KVPOOL_LIBCUDA") == nullptr)
    GTEST_SKIP() << "only the fake driver loses a GPU when told to";
  // The second slab meets an uncorrectable memory error.
  StartDaemon({"KVPOOL_FAKE_CUDA_FAIL=cuStreamSynchronize#2=CUDA_ERROR_ECC_UNCORRECTABLE"});
  const std::unique_ptr<Session> session = Open(Options());
  ASSERT_NE(session, nullptr);
  const absl::StatusOr<Blocks> blocks = session->LeaseWithin(150, Soon());
  EXPECT_FALSE(blocks.ok());
  EXPECT_TRUE(absl::IsUnavailable(session->status())) << session->status();
  EXPECT_THAT(daemon_->Log(), HasSubstr("CUDA_ERROR_ECC_UNCORRECTABLE"));
}

TEST_F(StampsOnGpu, MemoryThatOthersTookIsAnErrorWithNumbers) {
  if (std::getenv("KVPOOL_LIBCUDA") == nullptr) GTEST_SKIP() << "only the fake driver fails on demand";
  StartDaemon({"KVPOOL_FAKE_CUDA_FAIL=cuMemCreate#2+=CUDA_ERROR_OUT_OF_MEMORY"});
  const std::unique_ptr<Session> session = Open(Options());
  ASSERT_NE(session, nullptr);
  const absl::StatusOr<Blocks> blocks =
      session->LeaseWithin(150, std::chrono::steady_clock::now() + std::chrono::seconds(1));
  EXPECT_FALSE(blocks.ok());
  EXPECT_TRUE(session->status().ok()) << session->status();
  EXPECT_TRUE(session->LeaseWithin(8, Soon()).ok());
}

}  // namespace
}  // namespace kvpool
