// Sessions that go on after the daemon ended without a word, and those that do not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/base/shared_memory.h"
#include "server/space/kept_facts.h"
#include "server/space/member_log.h"
#include "server/space/session.h"
#include "server/tiers/file_tier.h"
#include "tests/service/recovery_fixture.h"
#include "tests/support/access.h"
#include "tests/tiers/faulty_tier.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

using ResumeTest = RecoveryTest;

// The only session that was lost, and why.
v1::LostSession OnlyLost(const v1::RecoveredSpace& space) {
  EXPECT_EQ(space.sessions_back() + space.sessions_waiting(), 0u) << space.ShortDebugString();
  EXPECT_EQ(space.lost_size(), 1) << space.ShortDebugString();
  if (space.lost_size() != 1) return {};
  EXPECT_EQ(space.lost_sessions().at(space.lost(0).reason()), 1u);
  EXPECT_EQ(space.lost(0).client_name(), "engine");
  return space.lost(0);
}

TEST_F(ResumeTest, ASessionGoesOnWhenItsProcessComesBack) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<std::string> keys = Keys("k", 6);
  const std::vector<uint64_t> blocks = engine->Lease(8);
  engine->Seal({blocks.begin(), blocks.begin() + 6}, keys);
  // Its answer is lost, and so is that of the next call.
  v1::StepRequest unheard;
  unheard.set_sequence(++engine->sequence);
  *unheard.add_operations() = ReleaseOp({blocks[0]});
  *unheard.add_operations() = LeaseOp(3);
  const v1::StepResponse first = engine->Step(unheard);
  ASSERT_EQ(first.results_size(), 2);

  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Start().ok());
    EXPECT_EQ(RecoveredSpace().sessions_waiting(), 1u);
    engine = ComeBack(*engine, process.credentials());
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(RecoveredSpace().sessions_back(), 1u);
    EXPECT_EQ(RecoveredSpace().sessions_waiting(), 0u);
    const v1::StepResponse same = engine->Step(unheard);
    EXPECT_EQ(same.results(0).release().refused_size(), 0);
    EXPECT_EQ(same.results(1).lease().ShortDebugString(), first.results(1).lease().ShortDebugString());
    const v1::StateCounts counts = Blocks();
    EXPECT_EQ(counts.leased(), 2u + 3u + 1u) << counts.ShortDebugString();
    EXPECT_EQ(counts.sealed() + counts.cached(), 6u);
    EXPECT_EQ(counts.quarantined(), 0u);
  }
  // It goes on as if nothing had been.
  EXPECT_EQ(engine->Match(keys).groups(0).blocks_size(), 6);
  EXPECT_EQ(engine->Lease(2).size(), 2u);
  EXPECT_EQ(engine->Release({blocks[6], blocks[7]}).refused_size(), 0);
  EXPECT_EQ(engine->Do(CloseOp()).code(), 0);
  daemon_->HousekeepOnce();
  const v1::StateCounts counts = Blocks();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
}

// It has unmapped what it had when it closed, and lives on with another session.
TEST_F(ResumeTest, WhoClosedASessionKeepsNoSlabOfTheNextDaemons) {
  gives_back_ = true;
  options_.give_back_ms = 5000;
  ASSERT_TRUE(Start().ok());
  Sleeper process, other;
  const auto before = Open(process.credentials());
  ASSERT_NE(before, nullptr) << opened_;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  while (Blocks().capacity() + 1 < (32u << 20) / 4096) {
    ASSERT_FALSE(engine->LeaseAsked(1000, 1).blocks().empty());
    for (const auto& member : {engine.get(), before.get()}) member->MapSlabs();
    daemon_->HousekeepOnce();
  }
  EXPECT_EQ(engine->Do(CloseOp()).code(), 0);
  for (int round = 0; round < 2; ++round) {
    engine = nullptr;  // What a daemon has of the one before it goes before its link to the keeper.
    ASSERT_TRUE(Start().ok());
    engine = ComeBack(*before, process.credentials());
    ASSERT_NE(engine, nullptr);
    link_->AwaitDropped();
  }
  digest_ = "other";
  guaranteed_ = 10;
  EXPECT_NE(Open(other.credentials()), nullptr) << opened_;
}

// What is sent again would otherwise give back a block under its new holder.
TEST_F(ResumeTest, AReleaseThatWasNotAnsweredIsNotDoneAgainOnceItsBlockIsLeasedAgain) {
  ASSERT_TRUE(Start().ok());
  Sleeper process, other;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  auto second = Open(other.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  const std::vector<uint64_t> blocks = engine->Lease(2);
  v1::StepRequest to_another, to_itself;
  to_another.set_sequence(++engine->sequence);
  *to_another.add_operations() = ReleaseOp({blocks[0]});
  engine->Step(to_another);
  const std::vector<uint64_t> taken = second->Lease(1);
  ASSERT_EQ(IdOf(taken[0]), IdOf(blocks[0]));
  to_itself.set_sequence(++engine->sequence);
  *to_itself.add_operations() = ReleaseOp({blocks[1]});
  *to_itself.add_operations() = LeaseOp(1);
  const v1::StepResponse unheard = engine->Step(to_itself);
  ASSERT_EQ(unheard.results(1).lease().blocks_size(), 1);
  const uint64_t again = unheard.results(1).lease().blocks(0);
  ASSERT_EQ(IdOf(again), IdOf(blocks[1]));

  ASSERT_TRUE(Start().ok());
  engine = ComeBack(*engine, process.credentials());
  second = ComeBack(*second, other.credentials());
  ASSERT_TRUE(engine != nullptr && second != nullptr);
  EXPECT_EQ(engine->Step(to_another).results(0).release().refused_size(), 0);
  EXPECT_EQ(engine->Step(to_itself).results(1).lease().blocks(0), again);
  EXPECT_EQ(Blocks().leased(), 2u + 2u) << "one of each, and the sinks";
  // With a number of its own it is a stale ref, which ends nobody.
  EXPECT_EQ(engine->Release(blocks).refused_size(), 2);
  EXPECT_EQ(second->Release(taken).refused_size(), 0);
  EXPECT_EQ(engine->Release({again}).refused_size(), 0);
  EXPECT_EQ(Blocks().leased(), 2u);
}

TEST_F(ResumeTest, WhoHasThePidOfADeadMemberIsNotIt) {
  ASSERT_TRUE(Start().ok());
  Sleeper process, other;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  ASSERT_EQ(engine->Lease(4).size(), 4u);
  PeerCredentials again = other.credentials();
  again.pid = process.credentials().pid;
  ASSERT_TRUE(Start().ok());
  process.Kill();
  EXPECT_EQ(Refusal(*engine, again).code(), absl::StatusCode::kPermissionDenied);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().free(), Blocks().capacity()) << "the pid lives on, the member does not";
}

TEST_F(ResumeTest, ACompactThatSettledUnheardIsHeardOfFromTheNextDaemon) {
  strided_ = true;
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<uint64_t> blocks = engine->Lease(2);
  v1::StepRequest batch;
  batch.set_sequence(++engine->sequence);
  v1::Compact* const compact = batch.add_operations()->mutable_compact();
  compact->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  compact->mutable_keep()->add_positions(3);
  compact->mutable_keep()->add_positions(17);
  compact->set_keep_sources(true);
  const v1::StepResponse begun = engine->Step(batch);
  ASSERT_TRUE(begun.results(0).parked()) << begun.ShortDebugString();
  while (daemon_->RunDevicePart(0)) {
  }
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(Start().ok());
    engine = ComeBack(*engine, process.credentials());
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(Blocks().leased(), 2u + 1u + 1u) << "sources, a destination, and the sink";
  }
  const v1::StepResponse heard = engine->Pending();
  ASSERT_EQ(heard.completions_size(), 1) << heard.ShortDebugString();
  EXPECT_EQ(heard.completions(0).sequence(), batch.sequence());
  const v1::CompactResult& result = heard.completions(0).result().compact();
  ASSERT_EQ(result.table_size(), 1) << heard.ShortDebugString();
  EXPECT_EQ(result.last_block_tokens(), 2u);
  // The batch is sent again, and leases no other destination.
  EXPECT_EQ(engine->Step(batch).results(0).compact().table(0), result.table(0));
  EXPECT_EQ(engine->Release({blocks[0], blocks[1], result.table(0)}).refused_size(), 0);
  EXPECT_EQ(Blocks().leased(), 1u);
}

// An engine of four leased blocks, beside its sink.
class OwedTest : public ResumeTest {
 protected:
  void SetUp() override {
    strided_ = true;
    ASSERT_TRUE(Start().ok());
    engine_ = Open(process_.credentials());
    ASSERT_NE(engine_, nullptr) << opened_;
    blocks_ = engine_->Lease(4);
  }
  // Tokens of the first and the second block stay.
  v1::Operation CompactOp() const {
    v1::Operation operation;
    v1::Compact* const compact = operation.mutable_compact();
    compact->mutable_sequence()->mutable_blocks()->Add(blocks_.begin(), blocks_.end());
    compact->mutable_keep()->add_positions(3);
    compact->mutable_keep()->add_positions(17);
    return operation;
  }
  v1::Operation PruneOp() const {
    v1::Operation operation;
    v1::Prune* const prune = operation.mutable_prune();
    prune->mutable_sequence()->mutable_blocks()->Add(blocks_.begin(), blocks_.end());
    prune->mutable_policy()->set_name("streaming_llm");
    prune->set_budget_blocks(2);
    return operation;
  }
  void RunDevice() {
    while (daemon_->RunDevicePart(0)) {
    }
  }
  void KillAndComeBack() {
    Kill();
    ASSERT_TRUE(Start().ok());
    engine_ = ComeBack(*engine_, process_.credentials());
    ASSERT_NE(engine_, nullptr);
  }
  // A batch, which says that the answers before it have arrived.
  v1::StepResponse Acknowledge() {
    v1::StepRequest request;
    request.set_acknowledged(engine_->sequence);
    request.set_sequence(++engine_->sequence);
    return engine_->Step(request);
  }
  // What waits for the stream, and behind it an answer that has arrived.
  v1::StepResponse Hear() {
    v1::StepResponse heard = Acknowledge();
    Acknowledge();
    return heard;
  }

  Sleeper process_;
  std::unique_ptr<Engine> engine_;
  std::vector<uint64_t> blocks_;
};

TEST_F(OwedTest, WhatACompactGivesBackStaysHeldUntilItWasHeardOf) {
  ASSERT_TRUE(engine_->Step(std::vector{CompactOp()}).results(0).parked());
  RunDevice();
  EXPECT_EQ(Blocks().leased(), 4u + 1u + 1u) << "its sources, a destination, and the sink";
  KillAndComeBack();
  KillAndComeBack();
  EXPECT_EQ(Blocks().leased(), 4u + 1u + 1u);
  const v1::StepResponse heard = Acknowledge();
  ASSERT_EQ(heard.completions_size(), 1) << heard.ShortDebugString();
  const v1::CompactResult& result = heard.completions(0).result().compact();
  EXPECT_EQ(result.released(), 4u);
  EXPECT_THAT(result.released_blocks(), ElementsAreArray(blocks_));
  EXPECT_EQ(Blocks().leased(), 4u + 1u + 1u) << "it was sent, and may be lost";
  Acknowledge();
  EXPECT_EQ(Blocks().leased(), 1u + 1u);
  KillAndComeBack();
  EXPECT_EQ(Hear().completions_size(), 0);
  EXPECT_EQ(Blocks().leased(), 1u + 1u);
  EXPECT_EQ(engine_->Release({result.table(0)}).refused_size(), 0);
}

TEST_F(OwedTest, WhatAnAnswerCarriesGoesWithTheAnswer) {
  v1::StepRequest batch;
  batch.set_sequence(++engine_->sequence);
  *batch.add_operations() = CompactOp();
  ASSERT_TRUE(engine_->Step(batch).results(0).parked());
  RunDevice();
  // The batch is sent again, and its answer has the result now.
  ASSERT_EQ(engine_->Step(batch).results(0).compact().released(), 4u);
  EXPECT_EQ(Blocks().leased(), 4u + 1u + 1u);
  Acknowledge();
  EXPECT_EQ(Blocks().leased(), 1u + 1u);
}

TEST_F(OwedTest, WhatAPruneOfACallGivesBackGoesWithTheNextCall) {
  std::optional<v1::OperationResult> answer;
  engine_->Send(PruneOp(), &answer);
  RunDevice();
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->prune().released(), 2u) << answer->ShortDebugString();
  EXPECT_EQ(Blocks().leased(), 4u + 1u);
  KillAndComeBack();
  EXPECT_EQ(Blocks().leased(), 4u + 1u);
  Acknowledge();
  EXPECT_EQ(Blocks().leased(), 2u + 1u);
  EXPECT_EQ(engine_->Release({answer->prune().table().begin(), answer->prune().table().end()}).refused_size(),
            0);
}

TEST_F(OwedTest, AnAnswerThatWasForgottenWasNotHeardOf) {
  std::optional<v1::OperationResult> answer;
  engine_->Send(PruneOp(), &answer);
  // Its answer is pushed out of the window before there is one.
  for (uint64_t i = 0; i < AnswerWindow::kAnswers + 5; ++i) engine_->Step(std::vector<v1::Operation>());
  RunDevice();
  ASSERT_TRUE(answer.has_value());
  engine_->Step(std::vector<v1::Operation>());
  EXPECT_EQ(Blocks().leased(), 4u + 1u);
  Acknowledge();
  EXPECT_EQ(Blocks().leased(), 2u + 1u);
}

TEST_F(OwedTest, OfTwoOnTheSameBlocksEachHoldIsGivenBackOnce) {
  ASSERT_TRUE(engine_->Step(std::vector{CompactOp()}).results(0).parked());
  RunDevice();
  // As far as its member knows, the sequence is what it was.
  ASSERT_TRUE(engine_->Step(std::vector{CompactOp()}).results(0).parked());
  EXPECT_EQ(Blocks().leased(), 4u + 2u + 1u);
  // The first is heard of while the second reads what the first gives back.
  EXPECT_EQ(Hear().completions_size(), 0) << "it came with the batch";
  EXPECT_EQ(Blocks().leased(), 4u + 2u + 1u);
  RunDevice();
  EXPECT_EQ(Blocks().leased(), 2u + 1u) << "nothing reads them any more";
  ASSERT_EQ(Hear().completions_size(), 1);
  EXPECT_EQ(Blocks().leased(), 2u + 1u);
}

TEST_F(OwedTest, WhatWasGivenBackByItsMemberIsNotGivenBackAgain) {
  ASSERT_TRUE(engine_->Step(std::vector{CompactOp()}).results(0).parked());
  RunDevice();
  EXPECT_EQ(engine_->Release(blocks_).refused_size(), 0);
  const std::vector<uint64_t> again = engine_->Lease(4);
  Hear();
  EXPECT_EQ(Blocks().leased(), 4u + 1u + 1u) << "others have these blocks";
  EXPECT_EQ(engine_->Release(again).refused_size(), 0);
}

TEST_F(OwedTest, WhatWasGivenBackIsNotGivenBackAgainByTheNextDaemon) {
  // As long as this waits, nothing behind it leaves the log.
  const std::vector<uint64_t> waits = engine_->Lease(1);
  ASSERT_TRUE(engine_->Step(std::vector{ReleaseOp(waits, 5)}).results(0).parked());
  const std::vector<std::string> keys = Keys("k", 4);
  engine_->Seal(blocks_, keys);
  ASSERT_TRUE(engine_->Step(std::vector{PruneOp()}).results(0).parked());
  RunDevice();
  const v1::StepResponse heard = Hear();
  ASSERT_EQ(heard.completions_size(), 1);
  const v1::PruneResult& pruned = heard.completions(0).result().prune();
  ASSERT_EQ(pruned.victim_blocks_size(), 2) << heard.ShortDebugString();
  const std::vector<uint64_t> victims(pruned.victim_blocks().begin(), pruned.victim_blocks().end());
  EXPECT_EQ(engine_->Release(victims).refused_size(), 2) << "the session does not hold them any more";
  // It holds them again.
  ASSERT_EQ(engine_->Match(keys).tokens(), 4u * 16);
  for (int round = 0; round < 3; ++round) {
    KillAndComeBack();
    EXPECT_EQ(Hear().completions_size(), 0);
  }
  EXPECT_EQ(engine_->Release(victims).refused_size(), 0);
  EXPECT_EQ(engine_->Release(victims).refused_size(), 2);
}

TEST_F(OwedTest, AnOperationThatWasNotOverBeginsAnewInTheNextDaemon) {
  v1::StepRequest batch;
  batch.set_sequence(++engine_->sequence);
  *batch.add_operations() = CompactOp();
  // This one stands behind it.
  *batch.add_operations() = ReleaseOp({blocks_[3]});
  const v1::StepResponse begun = engine_->Step(batch);
  ASSERT_TRUE(begun.results(0).parked() && begun.results(1).parked()) << begun.ShortDebugString();
  std::optional<v1::OperationResult> unheard;
  engine_->Send(PruneOp(), &unheard);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(Blocks().leased(), 4u + 1u + 1u)
        << "one destination, that of the operation that began last, and the sink";
    KillAndComeBack();
  }
  RunDevice();
  const v1::StepResponse heard = Hear();
  ASSERT_EQ(heard.completions_size(), 2) << heard.ShortDebugString();
  EXPECT_EQ(heard.completions(0).result().compact().released(), 4u) << heard.ShortDebugString();
  EXPECT_EQ(heard.completions(1).result().release().refused_size(), 0);
  // The call finds what was released since: its blocks are named in vain.
  EXPECT_EQ(Blocks().leased(), 1u + 1u);
}

TEST_F(OwedTest, NobodyElseHasThemIfTheSessionDoesNotGoOn) {
  ASSERT_TRUE(engine_->Step(std::vector{CompactOp()}).results(0).parked());
  RunDevice();
  ASSERT_TRUE(Start().ok());
  clock_.Advance(options_.reattach_ms);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().quarantined(), 4u + 1u + 1u);
  process_.Kill();
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().quarantined(), 0u);
}

TEST_F(ResumeTest, AMatchThatWaitsForATierIsAnsweredByTheNextDaemon) {
  const TierFolder folder;
  auto file = FileTier::Open({.path = folder.path(), .capacity_bytes = 1 << 20});
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tier = std::make_shared<FaultyTier>(*std::move(file));
  options_.tiers = {{tier, {.when = TierWrite::kSeal}}};
  options_.tier_secret = std::string(32, 's');
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<std::string> keys = Keys("k", 6);
  const std::vector<uint64_t> blocks = engine->Lease(6);
  engine->Seal(blocks, keys);
  // The first four stay resident, all of them are below.
  engine->Release({blocks.begin() + 4, blocks.end()});
  do {
    tier->Drain();
  } while (daemon_->MoveTierOnce());
  v1::EvictResponse evicted;
  ASSERT_TRUE(daemon_->Evict({}, &evicted).ok());
  ASSERT_EQ(evicted.evicted(), 2u);
  tier->hangs = true;
  v1::StepRequest batch;
  batch.set_sequence(++engine->sequence);
  *batch.add_operations() = MatchOp(keys);
  batch.mutable_operations(0)->mutable_match()->set_wait_ms(60000);
  ASSERT_TRUE(engine->Step(batch).results(0).parked());
  std::optional<v1::OperationResult> call;
  v1::Operation by_call = MatchOp(keys);
  by_call.mutable_match()->set_wait_ms(60000);
  engine->Send(by_call, &call);
  ASSERT_FALSE(call.has_value());

  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(RecoveredSpace().sessions_waiting(), 1u);
  engine = ComeBack(*engine, process.credentials());
  ASSERT_NE(engine, nullptr);
  const v1::StepResponse heard = engine->Pending();
  ASSERT_EQ(heard.completions_size(), 1) << heard.ShortDebugString();
  const v1::MatchResult& match = heard.completions(0).result().match();
  EXPECT_EQ(match.tokens(), 4u * 16) << match.ShortDebugString();
  EXPECT_THAT(match.groups(0).blocks(), ElementsAreArray(absl::MakeConstSpan(blocks).first(4)));
  // It holds them now: one hold of the seal, one of each match.
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(engine->Release({blocks.begin(), blocks.begin() + 4}).refused_size(), 0) << round;
  }
  EXPECT_EQ(engine->Release({blocks[0]}).refused_size(), 1);
  tier->Answer();
}

TEST_F(ResumeTest, NobodyElseComesBackToASession) {
  ASSERT_TRUE(Start().ok());
  Sleeper process, other;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  ASSERT_EQ(engine->Lease(4).size(), 4u);
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Refusal(*engine, other.credentials()).code(), absl::StatusCode::kPermissionDenied);
  const auto itself = ComeBack(*engine, process.credentials());
  EXPECT_EQ(Refusal(*engine, process.credentials()).code(), absl::StatusCode::kFailedPrecondition) << "twice";
  engine->token = std::string(16, 'x');
  EXPECT_EQ(Refusal(*engine, process.credentials()).code(), absl::StatusCode::kNotFound);
  engine->token = "x";
  EXPECT_EQ(Refusal(*engine, process.credentials()).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ResumeTest, WhoStaysAwayForTooLongIsEndedAndKeepsItsBlocksUntilItsProcessEnds) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  ASSERT_EQ(engine->Lease(4).size(), 4u);
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Blocks().leased(), 5u);
  clock_.Advance(options_.reattach_ms);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().quarantined(), 5u);
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "away");
  EXPECT_EQ(Refusal(*engine, process.credentials()).code(), absl::StatusCode::kFailedPrecondition);
  process.Kill();
  daemon_->HousekeepOnce();
  const v1::StateCounts counts = Blocks();
  EXPECT_EQ(counts.free(), counts.capacity()) << counts.ShortDebugString();
}

TEST_F(ResumeTest, WhoDiedWhileTheDaemonWasGoneGivesBack) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  ASSERT_EQ(engine->Lease(4).size(), 4u);
  ASSERT_TRUE(Start().ok());
  process.Kill();
  daemon_->HousekeepOnce();
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "died");
  const v1::StateCounts counts = Blocks();
  EXPECT_EQ(counts.free(), counts.capacity()) << counts.ShortDebugString();
}

TEST_F(ResumeTest, AReleaseThatWaitsForItsStepGoesOnWaiting) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<uint64_t> blocks = engine->Lease(4);
  engine->Seal(blocks, Keys("k", 4));
  v1::StepRequest batch;
  batch.set_sequence(++engine->sequence);
  *batch.add_operations() = ReleaseOp({blocks[2], blocks[3]}, /*after=*/7);
  *batch.add_operations() = ReleaseOp({blocks[1]}, /*after=*/9);
  ASSERT_TRUE(engine->Step(batch).results(0).parked());
  const auto go_on = [&] {
    ASSERT_TRUE(Start().ok());
    engine = ComeBack(*engine, process.credentials());
    ASSERT_NE(engine, nullptr);
  };
  go_on();
  EXPECT_EQ(Blocks().sealed(), 4u);
  EXPECT_EQ(engine->Fence(7), 7u);
  EXPECT_EQ(Blocks().cached(), 2u);
  // The completion of the first was not heard; the second still waits.
  go_on();
  go_on();
  const v1::StepResponse heard = engine->Pending();
  ASSERT_EQ(heard.completions_size(), 1) << heard.ShortDebugString();
  EXPECT_EQ(heard.completions(0).sequence(), batch.sequence());
  EXPECT_EQ(heard.completions(0).index(), 0u);
  EXPECT_EQ(Blocks().cached(), 2u);
  // The batch is sent again, as its answer was lost too: nothing of it is done twice.
  const v1::StepResponse same = engine->Step(batch);
  EXPECT_FALSE(same.results(0).parked());
  EXPECT_TRUE(same.results(1).parked());
  EXPECT_EQ(engine->Fence(9), 9u);
  EXPECT_EQ(Blocks().cached(), 3u);
  EXPECT_EQ(Blocks().sealed(), 1u);
  EXPECT_EQ(engine->Release({blocks[0]}).refused_size(), 0);
  EXPECT_EQ(Blocks().cached(), 4u);
}

TEST_F(ResumeTest, ASessionWithAnEpisodeDoesNotGoOn) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<uint64_t> blocks = engine->Lease(2);
  engine->Seal(blocks, Keys("k", 2));
  v1::Operation put;
  put.mutable_put_episode()->set_name("night");
  put.mutable_put_episode()->add_centroid(1);
  v1::Sequence* sequence = put.mutable_put_episode()->add_sequences();
  for (const uint64_t block : blocks) sequence->add_blocks(block);
  sequence->set_last_block_tokens(16);
  const v1::OperationResult result = engine->Do(put);
  ASSERT_EQ(result.code(), 0) << result.message();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Refusal(*engine, process.credentials()).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "not_kept");
  EXPECT_THAT(OnlyLost(RecoveredSpace()).detail(), HasSubstr("episodes"));
  EXPECT_EQ(Blocks().sealed(), 2u) << "its process lives";
}

TEST_F(ResumeTest, AMemberGoesOnWithItsWarmup) {
  warmup_ = true;
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(Start().ok());
    engine = ComeBack(*engine, process.credentials());
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(engine->member->session->warming_up(), 1u);
  }
  EXPECT_EQ(engine->Do(WarmupDoneOp()).warmup_done().waiting_for(), 0u);
  ASSERT_TRUE(Start().ok());
  engine = ComeBack(*engine, process.credentials());
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->member->session->warming_up(), 0u);
}

TEST_F(ResumeTest, ASessionCountsInItsRulesLimitsOnceItIsBack) {
  options_.access = MakeAccess("[rule]\nuid = *\nrole = engine, operator\ntenant = *\nsessions = 1\n");
  ASSERT_TRUE(Start().ok());
  Sleeper process, other;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  ASSERT_TRUE(Start().ok());
  engine = ComeBack(*engine, process.credentials());
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(Open(other.credentials()), nullptr);
  EXPECT_THAT(std::string(opened_.message()), HasSubstr("sessions = 1: 1 are taken"));
  EXPECT_EQ(engine->Do(CloseOp()).code(), 0);
  EXPECT_NE(Open(other.credentials()), nullptr) << opened_;
}

TEST_F(ResumeTest, ASpacesLimitOfItsRuleCountsFromTheStart) {
  options_.access = MakeAccess("[rule]\nuid = *\nrole = engine, operator\ntenant = *\nspace-blocks = 100\n");
  ASSERT_TRUE(Start().ok());
  const Sleeper process;
  const auto engine = Open(process.credentials());
  const uint32_t limit = daemon_->Snapshot().spaces[0].limit_blocks;
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(daemon_->Snapshot().spaces[0].limit_blocks, limit);
  const auto back = ComeBack(*engine, process.credentials());
  EXPECT_EQ(daemon_->Snapshot().spaces[0].limit_blocks, limit);
}

// What it does not hold of its guarantee is with sessions that are gone, whose processes live.
TEST_F(ResumeTest, ASessionWhoseGuaranteeOthersHoldIsReady) {
  guaranteed_ = 600;
  ASSERT_TRUE(Start().ok());
  Sleeper first, second;
  auto engine = Open(first.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const std::vector<uint64_t> mine = engine->Lease(2);
  guaranteed_ = 0;
  auto other = Open(second.credentials());
  ASSERT_NE(other, nullptr) << opened_;
  ASSERT_TRUE(Start().ok());
  other = ComeBack(*other, second.credentials());
  ASSERT_NE(other, nullptr);
  engine = ComeBack(*engine, first.credentials());
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->Lease(2).size(), 2u);
}

// ----------------------------------------------------------------------------------------- several members

// A scheduler and two ranks, each a process.
class ResumeGroupTest : public ResumeTest {
 protected:
  static constexpr size_t kMembers = 3;
  ResumeGroupTest() {
    ranks_ = 2;
    role_.set_scheduler(true);
  }
  void OpenGroup() {
    members_[0] = Open(processes_[0].credentials());
    ASSERT_NE(members_[0], nullptr) << opened_;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      v1::Role role;
      role.set_rank(rank);
      members_[1 + rank] = Join(*members_[0], role, processes_[1 + rank].credentials());
      ASSERT_NE(members_[1 + rank], nullptr);
    }
    Settle();
  }
  void Settle() {
    for (int i = 0; i < 4; ++i) {
      for (const auto& member : members_) member->MapSlabs();
      daemon_->HousekeepOnce();
    }
  }
  void Back(size_t member) {
    members_[member] = ComeBack(*members_[member], processes_[member].credentials());
    ASSERT_NE(members_[member], nullptr) << member;
  }
  absl::StatusCode RefusalOf(size_t member) const {
    return Refusal(*members_[member], processes_[member].credentials()).code();
  }
  uint32_t LeasedNow(uint32_t count) {
    return static_cast<uint32_t>(members_[0]->LeaseAsked(count, 0).blocks_size());
  }

  Sleeper processes_[kMembers];
  std::unique_ptr<Engine> members_[kMembers];  // The scheduler, rank 0, rank 1.
};

TEST_F(ResumeGroupTest, ItGoesOnWhenAllAreBackAndLeasesNothingBefore) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  const std::vector<std::string> keys = Keys("k", 4);
  const std::vector<uint64_t> blocks = members_[0]->Lease(6);
  ASSERT_EQ(blocks.size(), 6u);
  members_[0]->Seal({blocks.begin(), blocks.begin() + 4}, keys);
  v1::StepRequest batch;
  batch.set_sequence(++members_[0]->sequence);
  *batch.add_operations() = ReleaseOp({blocks[2], blocks[3]}, /*after=*/7);
  ASSERT_TRUE(members_[0]->Step(batch).results(0).parked());
  EXPECT_EQ(members_[1]->Fence(7), 0u);
  EXPECT_EQ(members_[2]->Fence(5), 5u);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Start().ok());
    daemon_->HousekeepOnce();
    // The order in which they come is another each time.
    Back(round);
    EXPECT_EQ(members_[round]->member->session->passed, 5u);
    Back((round + 1) % 3);
    if (round != 1) {
      EXPECT_EQ(LeasedNow(1), 0u) << "a rank is not back";
      EXPECT_EQ(members_[0]->Match(keys).groups(0).blocks_size(), 0);
    }
    EXPECT_EQ(Blocks().sealed(), 4u);
    EXPECT_EQ(Blocks().leased(), 3u) << "two, and the sink";
    Back((round + 2) % 3);
    EXPECT_EQ(members_[1]->Fence(7), 5u);
    const std::vector<uint64_t> more = members_[0]->Lease(1);
    ASSERT_EQ(more.size(), 1u);
    EXPECT_EQ(members_[0]->Release(more).refused_size(), 0);
  }
  EXPECT_EQ(members_[2]->Fence(7), 7u);
  EXPECT_EQ(Blocks().cached(), 2u);
  EXPECT_EQ(members_[0]->Pending().completions_size(), 1);
  EXPECT_EQ(members_[0]->Match(keys).groups(0).blocks_size(), 4);
  EXPECT_EQ(members_[0]->Do(CloseOp()).code(), 0);
  const v1::StateCounts counts = Blocks();
  EXPECT_EQ(counts.free() + counts.cached(), counts.capacity()) << counts.ShortDebugString();
}

TEST_F(ResumeGroupTest, ASlabThatOneOfTwoRanksHasAcknowledgedIsSentToBoth) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  const uint32_t capacity = static_cast<uint32_t>(Blocks().capacity());
  LeasedNow(capacity + 1);  // Not all of them are there: the space grows.
  daemon_->HousekeepOnce();
  ASSERT_TRUE(members_[1]->MapSlabs());
  ASSERT_EQ(Blocks().capacity(), capacity) << "rank 1 has not mapped it";
  ASSERT_TRUE(Start().ok());
  for (size_t member = 0; member < kMembers; ++member) Back(member);
  EXPECT_EQ(members_[1]->peer->slabs().size(), members_[2]->peer->slabs().size());
  EXPECT_GT(Blocks().capacity(), capacity);
  // The scheduler, which came before the ranks, hears of all slabs.
  ASSERT_FALSE(members_[0]->peer->ready().empty());
  EXPECT_EQ(members_[0]->peer->ready().back().capacity_blocks(), Blocks().capacity() + 1);
  EXPECT_EQ(LeasedNow(10), 10u);
}

TEST_F(ResumeGroupTest, WhoComesLastIsToldOfAllSlabs) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  ASSERT_TRUE(Start().ok());
  for (const size_t member : {1, 2, 0}) Back(member);
  ASSERT_FALSE(members_[0]->peer->ready().empty());
  EXPECT_EQ(members_[0]->peer->ready().back().capacity_blocks(), Blocks().capacity() + 1);
}

TEST_F(ResumeGroupTest, ARankThatDiedInTheGapEndsIt) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  ASSERT_EQ(members_[0]->Lease(4).size(), 4u);
  End();
  processes_[2].Kill();
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(RefusalOf(0), absl::StatusCode::kNotFound);
  EXPECT_EQ(RefusalOf(1), absl::StatusCode::kNotFound);
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "died");
  processes_[0].Kill();
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().quarantined(), 5u) << "rank 0 lives, and writes";
  processes_[1].Kill();
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
}

TEST_F(ResumeGroupTest, ARankThatDiesBeforeItIsBackEndsIt) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  ASSERT_EQ(members_[0]->Lease(4).size(), 4u);
  ASSERT_TRUE(Start().ok());
  Back(0);
  processes_[2].Kill();
  daemon_->HousekeepOnce();
  EXPECT_THAT(members_[0]->peer->closed().value_or(""), HasSubstr("member 2"));
  EXPECT_EQ(Blocks().quarantined(), 5u);
  // Rank 0 hears of it when it comes.
  Back(1);
  EXPECT_THAT(members_[1]->peer->closed().value_or(""), HasSubstr("member 2"));
  for (const size_t member : {0, 1}) {
    members_[member]->Die();
    EXPECT_EQ(Blocks().quarantined(), member == 0 ? 5u : 0u);
  }
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
}

TEST_F(ResumeGroupTest, ARankThatStaysAwayEndsIt) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  ASSERT_EQ(members_[0]->Lease(4).size(), 4u);
  ASSERT_TRUE(Start().ok());
  Back(0);
  Back(1);
  clock_.Advance(options_.reattach_ms);
  daemon_->HousekeepOnce();
  EXPECT_THAT(members_[0]->peer->closed().value_or(""), HasSubstr("member 2"));
  EXPECT_EQ(Blocks().quarantined(), 5u);
  EXPECT_EQ(RefusalOf(2), absl::StatusCode::kFailedPrecondition);
  // A daemon that comes then does not take it up again.
  ASSERT_TRUE(Start().ok());
  for (size_t member = 0; member < kMembers; ++member) {
    EXPECT_EQ(RefusalOf(member), absl::StatusCode::kNotFound) << member;
  }
}

// Rank 0 asks first and the scheduler, which is member 0, then: what waits behind a verb of another stays behind it.
TEST_F(ResumeGroupTest, VerbsOfSeveralMembersWaitInTheOrderInWhichTheyCame) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  const std::vector<uint64_t> blocks = members_[0]->Lease(2);
  const auto send = [](Engine* engine, const v1::Operation& operation) {
    v1::StepRequest batch;
    batch.set_sequence(++engine->sequence);
    *batch.add_operations() = operation;
    EXPECT_TRUE(engine->Step(batch).results(0).parked());
  };
  const std::vector<std::string> keys = Keys("k", 2);
  send(members_[1].get(), SealOp(blocks, keys, "", /*after=*/3));
  send(members_[0].get(), ReleaseOp(blocks));
  ASSERT_TRUE(Start().ok());
  for (size_t member = 0; member < kMembers; ++member) Back(member);
  EXPECT_EQ(members_[1]->Fence(3), 0u);
  EXPECT_EQ(members_[2]->Fence(3), 3u);
  EXPECT_EQ(Blocks().cached(), 2u);
  EXPECT_EQ(members_[0]->Match(keys).groups(0).blocks_size(), 2);
}

// The daemon was killed before the newcomer was a member: it was told nothing.
TEST_F(ResumeGroupTest, WhoHadNotEnteredIsNoMember) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  const uint64_t space = members_[0]->opened.space(), session = members_[0]->opened.session();
  const Sleeper newcomer;
  KeptMember member{.space = space, .session = session, .ranks = 2, .token = "newcomer"};
  KeptLog log{.space = space, .token = "newcomer"};
  const auto memory = MemberLog::Make();
  ASSERT_TRUE(memory.ok());
  auto kept_log = link_->Keep(KeptKind::kLog, FactBytes(log), (*memory)->fd());
  auto kept = link_->Keep(KeptKind::kMember, FactBytes(member), newcomer.credentials().pidfd->get());
  ASSERT_TRUE(kept_log.ok() && kept.ok());
  kept_log->Forget();
  kept->Forget();
  ASSERT_TRUE(Start().ok());
  for (size_t member = 0; member < kMembers; ++member) Back(member);
  EXPECT_EQ(members_[0]->Lease(3).size(), 3u);
}

TEST_F(ResumeGroupTest, WithoutTheLogOfAMemberItDoesNotGoOn) {
  ASSERT_TRUE(Start().ok());
  OpenGroup();
  ASSERT_EQ(members_[0]->Lease(3).size(), 3u);
  End();
  {
    auto link = JoinKeeper(keeper_->Connect());
    ASSERT_TRUE(link.ok());
    bool first = true;
    for (KeptThing& thing : (*link)->TakeInherited()) {
      if (thing.kind != KeptKind::kLog || !std::exchange(first, false)) thing.kept.Forget();
    }
    (*link)->Flush();
    (*link)->Leave();
  }
  ASSERT_TRUE(Start().ok());
  for (size_t member = 0; member < kMembers; ++member)
    EXPECT_EQ(RefusalOf(member), absl::StatusCode::kNotFound);
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "incomplete");
  EXPECT_EQ(Blocks().quarantined(), 4u) << "their processes live";
}

TEST_F(ResumeTest, ASessionWhoseLogIsDamagedDoesNotGoOnAndAnOperatorMayEndOneThatIsAwaited) {
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const uint64_t session = engine->opened.session();
  ASSERT_TRUE(Start().ok());
  v1::EndSessionRequest request;
  request.set_session(session);
  v1::EndSessionResponse response;
  ASSERT_TRUE(daemon_->EndSession(request, &response).ok());
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "other");
  Sleeper another;
  engine = Open(another.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  const uint64_t damaged = engine->opened.session();
  End();
  {
    auto link = JoinKeeper(keeper_->Connect());
    ASSERT_TRUE(link.ok());
    for (KeptThing& thing : (*link)->TakeInherited()) {
      thing.kept.Forget();
      KeptLog log;
      if (thing.kind != KeptKind::kLog || !ReadFacts(thing.facts, &log)) continue;
      if (std::string(log.token, sizeof(log.token)) != engine->token) continue;
      const auto memory = SharedMemory::Map(std::move(thing.fd));
      ASSERT_TRUE(memory.ok()) << memory.status();
      memory->data()[0] ^= 1;
    }
    (*link)->Leave();
  }
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(OnlyLost(RecoveredSpace()).reason(), "damaged");
  EXPECT_EQ(RecoveredSpace().lost(0).session(), damaged) << "the one that had ended before was not lost";
}

}  // namespace
}  // namespace kvpool
