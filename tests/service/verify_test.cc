// What blocks hold is what was sealed, or they are not answered (--verify=seal).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/space/content_checks.h"
#include "server/space/kept_facts.h"
#include "tests/service/recovery_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

constexpr off_t kStride = 4096;  // RecoveryTest's blocks lie so far apart.

class VerifyTest : public RecoveryTest {
 protected:
  VerifyTest() {
    options_.verify = true;
    options_.verify_sample_bytes = 0;
  }
  // A daemon in which an engine has sealed and released 6 blocks.
  void Seal6() {
    ASSERT_TRUE(Start().ok());
    engine_ = Open(process_.credentials());
    ASSERT_NE(engine_, nullptr) << opened_;
    blocks_ = engine_->Lease(6);
    ASSERT_EQ(blocks_.size(), 6u);
    engine_->Seal(blocks_, keys_);
    engine_->Release(blocks_);
  }
  // The memory of the only slab. REQUIRES: no daemon runs.
  UniqueFd Memory() {
    auto link = KeeperLink::Join(keeper_->Connect());
    EXPECT_TRUE(link.ok()) << link.status();
    UniqueFd memory;
    for (KeptThing& thing : (*link)->TakeInherited()) {
      thing.kept.Forget();
      KeptSlab slab;
      if (thing.kind == KeptKind::kSlab && ReadFacts(thing.facts, &slab) && slab.slab == 0)
        memory = std::move(thing.fd);
    }
    (*link)->Leave();
    EXPECT_TRUE(memory.valid());
    return memory;
  }
  // One bit of the block is another.
  void Flip(const UniqueFd& memory, uint64_t block) const {
    const off_t at = IdOf(block) * kStride + 1234;
    char byte = 0;
    ASSERT_EQ(pread(memory.get(), &byte, 1, at), 1);
    byte ^= 4;
    ASSERT_EQ(pwrite(memory.get(), &byte, 1, at), 1);
  }
  SpaceSnapshot Space() {
    const DaemonSnapshot snapshot = daemon_->Snapshot();
    EXPECT_EQ(snapshot.spaces.size(), 1u);
    return snapshot.spaces.front();
  }
  uint64_t Checked(CheckedWhen when) { return Space().checks.checked[static_cast<size_t>(when)]; }
  uint64_t Failed(CheckedWhen when) { return Space().checks.failed[static_cast<size_t>(when)]; }
  // How many of the keys are found. They are given back.
  int Found() {
    const v1::MatchResult match = engine_->Match(keys_);
    const std::vector<uint64_t> found(match.groups(0).blocks().begin(), match.groups(0).blocks().end());
    if (!found.empty()) engine_->Release(found);
    return static_cast<int>(found.size());
  }
  void ComeBackToTheNext() {
    ASSERT_TRUE(Start().ok());
    engine_ = ComeBack(*engine_, process_.credentials());
    ASSERT_NE(engine_, nullptr);
  }

  Sleeper process_;
  std::unique_ptr<Engine> engine_;
  const std::vector<std::string> keys_ = Keys("k", 6);
  std::vector<uint64_t> blocks_;
};

TEST_F(VerifyTest, WhatBecameAnotherWhileTheDaemonWasAwayIsNotAnswered) {
  Seal6();
  daemon_->VerifyOnce(0);
  EXPECT_EQ(Checked(CheckedWhen::kSeal), 6u);
  End();
  Flip(Memory(), blocks_[3]);
  ComeBackToTheNext();
  EXPECT_EQ(Space().doubted, 6u);
  EXPECT_EQ(Found(), 3);
  EXPECT_EQ(Checked(CheckedWhen::kRestart), 6u);
  EXPECT_EQ(Failed(CheckedWhen::kRestart), 1u);
  EXPECT_EQ(Space().doubted, 0u);
  daemon_->VerifyOnce(0);
  EXPECT_EQ(Found(), 3);
  EXPECT_EQ(Checked(CheckedWhen::kRestart), 6u) << "each once";
  // It is sealed anew, and what is behind it is found again.
  EXPECT_EQ(Blocks().cached(), 6u);
  const std::vector<uint64_t> again = engine_->Lease(1);
  const v1::SealResult sealed = engine_->Seal(again, {keys_[3]}, keys_[2]);
  EXPECT_EQ(sealed.canonical(0), again[0]);
  engine_->Release(again);
  EXPECT_EQ(Found(), 6);
  // It stays as long as something is behind it.
  daemon_->VerifyOnce(0);
  EXPECT_EQ(Blocks().cached(), 7u);
}

TEST_F(VerifyTest, WhatIsWrongAndHasNothingBehindItIsFree) {
  Seal6();
  daemon_->VerifyOnce(0);
  End();
  Flip(Memory(), blocks_[5]);
  ComeBackToTheNext();
  daemon_->VerifyOnce(0);
  EXPECT_EQ(Failed(CheckedWhen::kRestart), 1u);
  EXPECT_EQ(Blocks().cached(), 5u);
  EXPECT_EQ(Space().pool.evicted[static_cast<size_t>(EvictReason::kDamaged)], 1u);
  EXPECT_EQ(Found(), 5);
}

TEST_F(VerifyTest, WhatIsDoubtedIsComparedWhileNobodyAsks) {
  Seal6();
  daemon_->VerifyOnce(0);
  ComeBackToTheNext();
  EXPECT_EQ(Space().doubted, 6u);
  daemon_->VerifyOnce(0);
  EXPECT_EQ(Space().doubted, 0u);
  EXPECT_EQ(Checked(CheckedWhen::kRestart), 6u);
  EXPECT_EQ(Found(), 6);
  EXPECT_EQ(Checked(CheckedWhen::kRestart), 6u);
}

TEST_F(VerifyTest, OfMuchThatIsWrongOneLineASecondIsLogged) {
  Seal6();
  daemon_->VerifyOnce(0);
  End();
  const UniqueFd memory = Memory();
  options_.verify_sample_bytes = 3 * kStride;
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 6);
  for (const uint64_t block : blocks_) Flip(memory, block);
  testing::internal::CaptureStderr();
  daemon_->VerifyOnce(1000);
  daemon_->VerifyOnce(1000);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(Failed(CheckedWhen::kSample), 6u);
  const size_t line = log.find("block is not what was sealed");
  ASSERT_NE(line, std::string::npos) << log;
  EXPECT_EQ(log.find("block is not what was sealed", line + 1), std::string::npos) << log;
  EXPECT_THAT(log, HasSubstr("when=sample more=2"));
  testing::internal::CaptureStderr();
  clock_.Advance(1000);
  daemon_->VerifyOnce(0);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("when=sample more=2"));
}

TEST_F(VerifyTest, WhatBecomesAnotherUnderTheDaemonIsFoundByTheSample) {
  Seal6();
  daemon_->VerifyOnce(0);
  End();
  const UniqueFd memory = Memory();
  options_.verify_sample_bytes = 2 * kStride;
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 6);
  Flip(memory, blocks_[4]);
  EXPECT_EQ(Found(), 6) << "nobody has looked";
  uint64_t before = 0;
  for (int second = 0; second < 3; ++second) {
    daemon_->VerifyOnce(1000);
    EXPECT_EQ(Checked(CheckedWhen::kSample) - before, 2u) << "as much as a second has";
    before = Checked(CheckedWhen::kSample);
  }
  EXPECT_EQ(Failed(CheckedWhen::kSample), 1u);
  EXPECT_EQ(Failed(CheckedWhen::kRestart), 0u);
  EXPECT_EQ(Found(), 4);
}

TEST_F(VerifyTest, OfASampleNoMoreIsReadThanItsTimeHas) {
  Seal6();
  daemon_->VerifyOnce(0);
  options_.verify_sample_bytes = 2 * kStride;
  ComeBackToTheNext();
  daemon_->VerifyOnce(499);
  EXPECT_EQ(Checked(CheckedWhen::kSample), 0u) << "less than a block";
  daemon_->VerifyOnce(2);
  EXPECT_EQ(Checked(CheckedWhen::kSample), 1u);
  daemon_->VerifyOnce(3600 * 1000);
  EXPECT_EQ(Checked(CheckedWhen::kSample), 3u) << "an hour is not made up for at once";
}

TEST_F(VerifyTest, WithoutItNothingIsComputed) {
  options_.verify = false;
  options_.verify_sample_bytes = 1 << 20;
  Seal6();
  daemon_->VerifyOnce(1000);
  EXPECT_EQ(Checked(CheckedWhen::kSeal) + Checked(CheckedWhen::kSample), 0u);
  ComeBackToTheNext();
  EXPECT_EQ(Space().doubted, 0u);
  EXPECT_EQ(Found(), 6);
  EXPECT_EQ(RecoveredSpace().unverified_blocks(), 0u);
}

TEST_F(VerifyTest, WhatHasNoSumWhenTheDaemonDiesIsAnsweredAndCounted) {
  Seal6();
  ComeBackToTheNext();
  EXPECT_EQ(Space().doubted, 0u);
  EXPECT_EQ(RecoveredSpace().unverified_blocks(), 6u);
  EXPECT_EQ(Found(), 6);
}

TEST_F(VerifyTest, SumsOutliveADaemonThatDoesNotVerify) {
  Seal6();
  daemon_->VerifyOnce(0);
  options_.verify = false;
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 6);
  // What it leases and seals has no sum, whatever lies there.
  const std::vector<uint64_t> more = engine_->Lease(2);
  engine_->Seal(more, Keys("more", 2));
  End();
  Flip(Memory(), blocks_[5]);
  options_.verify = true;
  ComeBackToTheNext();
  EXPECT_EQ(RecoveredSpace().unverified_blocks(), 2u);
  EXPECT_EQ(Found(), 5);
}

TEST_F(VerifyTest, WhatIsWrongAndHeldIsItsHoldersAlone) {
  Seal6();
  daemon_->VerifyOnce(0);
  End();
  const UniqueFd memory = Memory();
  options_.verify_sample_bytes = 1 << 20;
  ComeBackToTheNext();
  const v1::MatchResult held = engine_->Match(keys_);
  ASSERT_EQ(held.groups(0).blocks_size(), 6);
  Flip(memory, blocks_[0]);
  daemon_->VerifyOnce(1000);
  EXPECT_EQ(Failed(CheckedWhen::kSample), 1u);
  EXPECT_EQ(Found(), 0) << "nobody else gets it";
  EXPECT_EQ(Blocks().sealed(), 6u);
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 0) << "nor from the next daemon";
  // Another is sealed under its key, and is the one that is found, by the next daemon as well.
  clock_.Advance(1);
  const std::vector<uint64_t> again = engine_->Lease(1);
  const v1::SealResult sealed = engine_->Seal(again, {keys_[0]});
  EXPECT_EQ(sealed.canonical(0), again[0]);
  EXPECT_EQ(Found(), 6);
  daemon_->VerifyOnce(0);
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 6);
  EXPECT_EQ(Failed(CheckedWhen::kRestart), 0u) << "that of again is right, and nobody asks for the other";
  EXPECT_EQ(RecoveredSpace().sessions_back(), 1u);
  EXPECT_EQ(Blocks().sealed(), 7u);
  engine_->Release({held.groups(0).blocks().begin(), held.groups(0).blocks().end()});
  EXPECT_EQ(Found(), 6);
}

TEST_F(VerifyTest, ASealUnderTheKeyOfADoubtedBlockIsRefusedForNow) {
  Seal6();
  daemon_->VerifyOnce(0);
  ComeBackToTheNext();
  const std::vector<uint64_t> mine = engine_->Lease(1);
  const v1::SealResult sealed = engine_->Seal(mine, {keys_[0]});
  ASSERT_EQ(sealed.refused_size(), 1) << sealed.ShortDebugString();
  EXPECT_EQ(sealed.refused(0).code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_THAT(sealed.refused(0).message(),
              HasSubstr("to be compared first with what was sealed: seal again later"));
  EXPECT_EQ(sealed.canonical(0), 0u);
  EXPECT_EQ(Found(), 6) << "it is as it was";
  const v1::SealResult again = engine_->Seal(mine, {keys_[0]});
  EXPECT_EQ(again.canonical(0), blocks_[0]);
}

TEST_F(VerifyTest, OnAGpuItIsRefused) {
  MemoryDevice::Script script;
  script.uuid_bytes = std::string(16, 'g');
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("gpu", kGranuleBytes, &script));
  options_.access = MakeAccess();
  options_.device_capacity_bytes = {kGranuleBytes * 16};
  const auto daemon = Daemon::Start(options_, std::move(devices), &clock_);
  EXPECT_EQ(daemon.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(daemon.status().message()), HasSubstr("--verify=seal: device gpu is a GPU"));
}

}  // namespace
}  // namespace kvpool
