// What blocks hold is what was sealed, or they are not answered (--verify=seal).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/space/content_checks.h"
#include "server/space/kept_facts.h"
#include "tests/service/other_table.h"
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
  void StartAndOpen() {
    ASSERT_TRUE(Start().ok());
    engine_ = Open(process_.credentials());
    ASSERT_NE(engine_, nullptr) << opened_;
  }
  // The engine seals a block under each key, and releases them.
  void SealAll() {
    blocks_ = engine_->Lease(static_cast<uint32_t>(keys_.size()));
    ASSERT_EQ(blocks_.size(), keys_.size());
    engine_->Seal(blocks_, keys_);
    engine_->Release(blocks_);
  }
  // A daemon in which an engine has sealed and released 6 blocks.
  void Seal6() {
    ASSERT_NO_FATAL_FAILURE(StartAndOpen());
    SealAll();
  }
  // The memory of the only slab. REQUIRES: no daemon runs.
  UniqueFd Memory() {
    auto link = JoinKeeper(keeper_->Connect());
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
  // Children have the daemon's memory as well, which they do not inherit otherwise.
  static void LetChildrenHaveMemory() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      uintptr_t begin = 0, end = 0;
      if (line.find("/memfd:") == std::string::npos ||
          sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2)
        continue;
      ASSERT_EQ(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DOFORK), 0) << line;
    }
  }
  void ComeBackToTheNext() {
    ASSERT_TRUE(Start().ok());
    engine_ = ComeBack(*engine_, process_.credentials());
    ASSERT_NE(engine_, nullptr);
  }

  Sleeper process_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::string> keys_ = Keys("k", 6);
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
  EXPECT_THAT(log, HasSubstr(absl::StrCat("key=", absl::BytesToHexString(keys_[0]))))
      << "that it was sealed under";
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
  options_.verify = false;
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 0) << "nor from one that compares nothing";
  options_.verify = true;
  ComeBackToTheNext();
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

TEST_F(VerifyTest, WhatIsWrongStaysSoWhereNoSumSaysIt) {
  ASSERT_NO_FATAL_FAILURE(StartAndOpen());
  End();
  VisitTable(keeper_, [](OtherTable table) { table.Become(kOldestTableRead, kOldestTableRead); });
  const UniqueFd memory = Memory();
  options_.verify_sample_bytes = 1 << 20;
  ComeBackToTheNext();
  ASSERT_TRUE(RecoveredSpace().forgets_sums());
  SealAll();
  daemon_->VerifyOnce(0);
  const v1::MatchResult held = engine_->Match(keys_);
  Flip(memory, blocks_[0]);
  daemon_->VerifyOnce(1000);
  EXPECT_EQ(Failed(CheckedWhen::kSample), 1u);
  ComeBackToTheNext();
  EXPECT_EQ(Space().doubted, 0u);
  EXPECT_EQ(Blocks().sealed(), 6u);
  EXPECT_EQ(Found(), 0);
}

// The daemon's clock is read when a match begins and when it has compared.
TEST_F(VerifyTest, ADeathWhileAMatchComparesEndsNoSession) {
  Seal6();
  daemon_->VerifyOnce(0);
  for (const bool unary : {true, false}) {
    for (const int readings : {0, 1}) {
      ASSERT_NO_FATAL_FAILURE(ComeBackToTheNext());
      ASSERT_EQ(Space().doubted, 6u);
      LetChildrenHaveMemory();
      const pid_t daemon = fork();
      if (daemon == 0) {
        clock_.on_read = [left = readings]() mutable {
          if (left-- == 0) _exit(1);
        };
        if (unary) {
          engine_->Match(keys_);
        } else {
          engine_->Step({MatchOp(keys_)});
        }
        _exit(0);
      }
      int status = 0;
      ASSERT_EQ(waitpid(daemon, &status, 0), daemon);
      ASSERT_TRUE(WIFEXITED(status));
      ASSERT_EQ(WEXITSTATUS(status), 1) << "it read no clock there";
    }
  }
  ComeBackToTheNext();
  EXPECT_EQ(Found(), 6);
}

TEST_F(VerifyTest, AMatchComparesForAWhileAndAnswersWhatItHasComeTo) {
  constexpr uint32_t kMany = 2 * ContentChecks::kPartBlocks + 100;
  keys_ = Keys("k", kMany);
  ASSERT_NO_FATAL_FAILURE(StartAndOpen());
  // Leases are answered in parts while slabs are to come.
  while (blocks_.size() < kMany) {
    const v1::LeaseResult lease = engine_->LeaseAsked(kMany - static_cast<uint32_t>(blocks_.size()), 1);
    blocks_.insert(blocks_.end(), lease.blocks().begin(), lease.blocks().end());
    daemon_->HousekeepOnce();
    engine_->MapSlabs();
  }
  engine_->Seal(blocks_, keys_);
  engine_->Release(blocks_);
  daemon_->VerifyOnce(0);
  ComeBackToTheNext();
  ASSERT_EQ(Space().doubted, kMany);
  // Each part takes so long.
  clock_.on_read = [this] { clock_.Advance(100); };
  const int found = Found();
  clock_.on_read = nullptr;
  EXPECT_EQ(found, static_cast<int>(ContentChecks::kPartBlocks));
  EXPECT_EQ(Space().doubted, kMany - ContentChecks::kPartBlocks);
  EXPECT_EQ(Found(), static_cast<int>(kMany));
}

TEST_F(VerifyTest, OnceNothingIsDoubtedNobodyLooksForIt) {
  Seal6();
  daemon_->VerifyOnce(0);
  ComeBackToTheNext();
  v1::EvictResponse response;
  ASSERT_TRUE(daemon_->Evict({}, &response).ok());
  ASSERT_EQ(response.evicted(), 6u);
  const auto locked = [this] {
    const std::vector<uint64_t> counts = Space().hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  };
  const uint64_t before = locked();
  daemon_->VerifyOnce(0);
  EXPECT_LT(locked() - before, 10u);
}

TEST(ContentChecksTest, WhatIsSummedIsLetGoOfBeforeTheMutexIsTaken) {
  MemoryDevice::Script script;
  MemoryDevice device("host", kGranuleBytes, &script);
  SpaceFacts facts;
  facts.layout.set_block_bytes(kBlockBytes);
  facts.devices = {&device};
  facts.geometry = {.block_stride_bytes = kBlockBytes,
                    .unit_bytes = kGranuleBytes,
                    .slab_bytes = kGranuleBytes,
                    .max_blocks = kSlabBlocks};
  BlockPool pool({.max_blocks = 1, .windows = {0}}, *MakeReplacementPolicy("lru", 1));
  const Growth growth(&facts, &pool);
  const ContentChecks checks(&facts, &pool, &growth);
  ContentChecks::Part part(1);
  part[0].slabs.push_back(*device.MakeSlab(kGranuleBytes));
  part[0].at.push_back(script.memory);
  ASSERT_EQ(script.alive, 1);
  checks.Sum(&part);
  EXPECT_EQ(script.alive, 0);
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
