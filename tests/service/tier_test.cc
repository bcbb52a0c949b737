// The way of a block down to a tier and back.
#include "tests/service/tier_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/daemon/space_terms.h"
#include "server/space/space.h"
#include "server/tiers/host_tier.h"

namespace kvpool {
namespace {

TEST_F(TierTest, WhatIsNotWhatWasSealedStaysAbove) {
  options_.verify = true;
  options_.verify_sample_bytes = 0;
  Begin();
  Compute(keys_);
  daemon_->VerifyOnce(0);
  const v1::MatchResult match = engine_->Match(keys_);
  Fill(match.groups(0).blocks(4), "else");
  LetGo(match);
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 9u);
  EXPECT_EQ(daemon_->Snapshot().spaces.at(0).checks.failed[static_cast<size_t>(CheckedWhen::kSample)], 1u);
  EXPECT_EQ(engine_->Match(keys_).groups(0).blocks_size(), 4) << "it was condemned";
  LetGo(match);
  PushOut();
  const auto sums = [this] {
    return daemon_->Snapshot().spaces.at(0).checks.checked[static_cast<size_t>(CheckedWhen::kSeal)];
  };
  EXPECT_EQ(sums(), 10u);
  EXPECT_EQ(Await(keys_).groups(0).blocks_size(), 4);
  daemon_->VerifyOnce(0);
  EXPECT_EQ(sums(), 14u) << "what comes up gets its sum";
}

TEST_F(TierTest, AGpuThatCopiesNothingIsRefusedAtTheStart) {
  Begin();
  scripts_.push_back(std::make_unique<MemoryDevice::Script>());
  scripts_.back()->uuid_bytes = std::string(16, 'g');
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("gpu", kGranuleBytes, scripts_.back().get()));
  const auto daemon = Daemon::Start(options_, std::move(devices), &clock_);
  ASSERT_FALSE(daemon.ok());
  EXPECT_THAT(std::string(daemon.status().message()),
              testing::StartsWith("--tier: device gpu copies nothing to a tier: "));
}

TEST_F(TierTest, WhatLeavesComesBack) {
  Begin();
  Compute(keys_);
  Move();
  EXPECT_EQ(counters().demoted, 10);
  PushOut();
  const v1::MatchResult at_once = engine_->Match(keys_);
  EXPECT_EQ(at_once.tokens(), 0);
  EXPECT_EQ(at_once.below_tokens(), 160);
  EXPECT_EQ(at_once.below(), "file");
  const v1::MatchResult waited = Await(keys_);
  EXPECT_EQ(waited.tokens(), 160);
  EXPECT_EQ(waited.below_tokens(), 0);
  EXPECT_EQ(counters().promoted, 10);
  // The daemon holds nothing of it any more.
  LetGo(waited);
  EXPECT_EQ(Blocks().cached(), 10);
  EXPECT_EQ(engine_->Lease(14).size(), 14);
}

TEST_F(TierTest, OnlyTheMissingPartComesUp) {
  Begin();
  Compute(keys_);
  Move();
  // Four of ten leave, from the tail.
  const auto held = engine_->Match({keys_.begin(), keys_.begin() + 6});
  EXPECT_EQ(engine_->Lease(8).size(), 8);
  EXPECT_EQ(engine_->Match(keys_).below_tokens(), 64);
  LetGo(held);
}

TEST_F(TierTest, ACleanBlockIsNotWrittenAgain) {
  Begin();
  Compute(keys_);
  Move();
  for (int i = 0; i < 3; ++i) {
    PushOut();
    LetGo(Await(keys_));
    Move();
  }
  EXPECT_EQ(tier_->usage().counters.stored, 10);
}

TEST_F(TierTest, TheNextDaemonFindsItByteForByte) {
  Begin();
  Compute(keys_);
  Move();
  const std::string seed = engine_->opened.hash_seed();
  End();
  Begin();
  EXPECT_EQ(engine_->opened.hash_seed(), seed);
  EXPECT_EQ(Await(keys_).tokens(), 160);
}

TEST_F(TierTest, AnotherTenantFindsNothing) {
  Begin();
  Compute(keys_);
  Move();
  End();
  Begin(TierWrite::kEvict, 2);
  const auto other = Attach("other", 2000);
  ASSERT_TRUE(other->Open(OpenRequest()).ok());
  Settle({engine_.get(), other.get()});
  EXPECT_EQ(engine_->Match(keys_).below_tokens(), 160);
  const v1::MatchResult match = other->Match(keys_);
  EXPECT_EQ(match.miss(), v1::MISS_REASON_NEVER_SEEN);
  EXPECT_EQ(match.below_tokens(), 0);
}

TEST_F(TierTest, SealWritesAtOnce) {
  Begin(TierWrite::kSeal);
  const std::vector<uint64_t> blocks = engine_->Lease(3);
  for (size_t i = 0; i < blocks.size(); ++i) Fill(blocks[i], keys_[i]);
  engine_->Seal(blocks, {keys_.begin(), keys_.begin() + 3});
  Move();
  // They are held still.
  EXPECT_EQ(tier_->usage().values, 3);
  EXPECT_EQ(counters().demoted, 3);
}

TEST_F(TierTest, OnlyWhatIsUsedAgainIsWritten) {
  Begin(TierWrite::kReuse);
  Compute(keys_);
  Move();
  PushOut();
  EXPECT_EQ(tier_->usage().counters.stored, 0u) << "nobody asked again";
  EXPECT_EQ(Unwritten(), 0u) << "and nothing is missing for that";
  const std::vector<std::string> keys = Keys("m", 10);
  Compute(keys);
  const std::vector<std::string> first = {keys.begin(), keys.begin() + 4};
  LetGo(engine_->Match(first));
  Move();
  EXPECT_EQ(tier_->usage().values, 4u);
  LetGo(engine_->Match(first));
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 4u) << "once";
  PushOut();
  EXPECT_EQ(Unwritten(), 0u);
  EXPECT_EQ(Await(keys).tokens(), 64u);
}

// The pool remembers what left it.
TEST_F(TierTest, WhatIsComputedAgainIsUsedAgain) {
  Begin(TierWrite::kReuse, 8);
  Compute(keys_);
  v1::EvictRequest all;
  all.set_space(engine_->member->session->space->facts.id);
  all.set_count(10);
  v1::EvictResponse evicted;
  ASSERT_TRUE(daemon_->Evict(all, &evicted).ok());
  ASSERT_EQ(engine_->Match(keys_).tokens(), 0u);
  const uint64_t before = tier_->usage().values;
  Compute(keys_);
  Move();
  EXPECT_EQ(tier_->usage().values, before + 10);
}

TEST_F(TierTest, WhatCameUpIsCountedAnew) {
  options_.tiers = {{std::make_shared<HostTier>(1 << 20), {.when = TierWrite::kReuse, .uses = 3}}};
  Begin();
  Compute(keys_);
  for (int i = 0; i < 5; ++i) LetGo(engine_->Match({keys_.begin(), keys_.begin() + 1}));
  Move();
  Tier* const host = options_.tiers[1].tier.get();
  ASSERT_EQ(host->usage().values, 1u);
  host->Erase(OwnerBelow(options_, engine_->member->session->space->facts.tenant), {});
  PushOut();
  LetGo(Await(keys_));
  Move();
  EXPECT_EQ(host->usage().values, 0u) << "the one that waited for it is the second";
  LetGo(engine_->Match(keys_));
  Move();
  EXPECT_EQ(host->usage().values, 10u);
}

// Two engines have computed the same: that are two requests.
TEST_F(TierTest, WhatIsComputedTwiceIsUsedTwice) {
  Begin(TierWrite::kReuse);
  Compute(keys_);
  const std::vector<uint64_t> again = engine_->Lease(2);
  engine_->Seal(again, {keys_.begin(), keys_.begin() + 2});
  engine_->Release(again);
  Move();
  EXPECT_EQ(tier_->usage().values, 2u);
}

TEST_F(TierTest, WhatWasReusedAndNotWrittenInTimeIsMissing) {
  Begin(TierWrite::kReuse);
  Compute(keys_);
  LetGo(engine_->Match(keys_));
  PushOut();
  EXPECT_EQ(Unwritten(), 10u);
  Move();
  EXPECT_EQ(tier_->usage().values, 0u);
}

// The host's memory has it until the daemon ends, the folder for longer.
TEST_F(TierTest, EachTierHasItsOwnRule) {
  options_.tiers = {{std::make_shared<HostTier>(1 << 20), {.when = TierWrite::kEvict}}};
  Begin(TierWrite::kReuse);
  Tier* const host = options_.tiers[1].tier.get();
  Compute(keys_);
  LetGo(engine_->Match({keys_.begin(), keys_.begin() + 4}));
  Move();
  EXPECT_EQ(host->usage().values, 10u);
  EXPECT_EQ(tier_->usage().values, 4u);
  PushOut();
  const v1::MatchResult at_once = engine_->Match(keys_);
  EXPECT_EQ(at_once.below_tokens(), 160u);
  EXPECT_EQ(at_once.below(), "file,host");
  LetGo(Await(keys_));
  EXPECT_EQ(host->usage().counters.loaded, 6u);
  const v1::MatchResult held = engine_->Match(keys_);
  daemon_->FlushTier(std::chrono::minutes(1));
  EXPECT_EQ(host->usage().values, 10u) << "what is gone with the daemon is given nothing at its end";
  LetGo(held);
  v1::ListTiersResponse tiers;
  ASSERT_TRUE(daemon_->ListTiers({}, &tiers).ok());
  ASSERT_EQ(tiers.tiers_size(), 2);
  EXPECT_EQ(tiers.tiers(0).write(), "reuse:2");
  EXPECT_EQ(tiers.tiers(1).write(), "evict");
}

TEST_F(TierTest, ATierThatFailsDoesNotKeepTheOtherFromItsValues) {
  options_.tiers = {{std::make_shared<HostTier>(1 << 20), {}}};
  Begin();
  tier_->all_fail = true;
  tier_->stores_fail = TierResult::kFailed;
  Compute(keys_);
  Move();
  EXPECT_EQ(options_.tiers[1].tier->usage().values, 10u);
  EXPECT_EQ(counters().demoted, 10u);
  EXPECT_EQ(counters().dropped, 0u);
  PushOut();
  const v1::MatchResult found = Await(keys_);
  EXPECT_EQ(found.tokens(), 160u);
  LetGo(found);
  // It is asked again after a while, and what the other has is not written there again.
  tier_->stores_fail = TierResult::kDone;
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(options_.tiers[1].tier->usage().counters.stored, 10u);
  EXPECT_EQ(tier_->usage().values, 10u);
}

// What one could not take is owed to it, whatever the others took.
TEST_F(TierTest, WhatATierMissedComesToItLater) {
  options_.tiers = {{std::make_shared<HostTier>(1 << 20), {.when = TierWrite::kReuse}}};
  Begin(TierWrite::kSeal, 100);
  Tier* const host = options_.tiers[1].tier.get();
  tier_->all_fail = true;
  tier_->stores_fail = TierResult::kFailed;
  Compute({keys_.begin(), keys_.begin() + 2});
  Move();
  Compute({keys_.begin(), keys_.begin() + 10});  // It is left alone by now.
  Move();
  LetGo(engine_->Match(keys_));
  Move();
  EXPECT_EQ(host->usage().values, 10u);
  EXPECT_EQ(tier_->usage().values, 0u);
  tier_->stores_fail = TierResult::kDone;
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(tier_->usage().values, 10u);
  // The same in a space that no session uses.
  tier_->stores_fail = TierResult::kFailed;
  Compute(Keys("l", 3));
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(tier_->usage().values, 10u);
  tier_->stores_fail = TierResult::kDone;
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(tier_->usage().values, 13u);
}

TEST_F(TierTest, ATierThatHangsLeavesTheOthersTheirPartOfTheBuffers) {
  options_.tiers = {{std::make_shared<HostTier>(1 << 20), {.when = TierWrite::kSeal}}};
  options_.tier_buffer_bytes = 8 * kTierPageBytes;
  Begin(TierWrite::kSeal, 100);
  tier_->hangs = true;
  Compute(keys_);
  for (int round = 0; round < 4; ++round) daemon_->MoveTierOnce();
  EXPECT_EQ(options_.tiers[1].tier->usage().values, 10u);
  // The folder has threads of its own.
  for (int i = 0; i < 10000 && tier_->held() < 4; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  daemon_->MoveTierOnce();
  EXPECT_EQ(tier_->held(), 4u);
  tier_->Answer();
  Move();
  EXPECT_EQ(tier_->usage().values, 10u) << "the rest was owed to it";
}

// A block that is on its way to one may be asked for by another.
TEST_F(TierTest, OnItsWayToOneABlockGoesToAnother) {
  options_.tiers = {{std::make_shared<HostTier>(1 << 20), {.when = TierWrite::kReuse}}};
  Begin(TierWrite::kSeal, 100);
  tier_->hangs = true;
  Compute(keys_);
  daemon_->MoveTierOnce();
  LetGo(engine_->Match(keys_));
  daemon_->MoveTierOnce();
  EXPECT_EQ(options_.tiers[1].tier->usage().values, 10u);
  tier_->Answer();
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 10u) << "once";
}

// ---- Whether to load or to compute.

TEST_F(TierTest, WhatIsComputedFasterIsNotLoaded) {
  Begin();
  Compute(keys_);
  Move();
  // Each load takes a millisecond and more.
  for (int round = 0; round < 6; ++round) {
    PushOut();
    LetGo(AwaitSlowly(keys_));
  }
  PushOut();
  EXPECT_GT(engine_->Match(keys_).below_ms(), 0u);
  v1::ExplainRequest asked;
  asked.set_key(keys_[0]);
  v1::ExplainResponse explained;
  ASSERT_TRUE(daemon_->Explain(asked, &explained).ok());
  EXPECT_THAT(
      explained.details(),
      testing::Contains(testing::ContainsRegex(
          "below, in file; to bring it up takes [0-9.]+ ms, to compute its 16 tokens, with none in front, "
          "nobody knows how long, as engines don't say")));
  Report(1000, 0, std::chrono::hours(1), 31);
  LetGo(Await(keys_));
  EXPECT_EQ(counters().not_worth, 0u);
  PushOut();
  // To compute 160 tokens takes as good as nothing.
  Report(1000, 0, std::chrono::microseconds(1), 10000);
  std::optional<v1::OperationResult> answer;
  engine_->Send(WaitOp(keys_), &answer);
  ASSERT_TRUE(answer.has_value()) << "it does not wait";
  EXPECT_EQ(answer->match().tokens(), 0u);
  EXPECT_EQ(answer->match().below_tokens(), 160u);
  EXPECT_EQ(counters().not_worth, 10u);
  // Neither is it prefetched.
  v1::Operation prefetch = MatchOp(keys_);
  prefetch.mutable_match()->set_prefetch(true);
  engine_->Do(prefetch);
  Move();
  EXPECT_EQ(engine_->Match(keys_).tokens(), 0u);
  EXPECT_EQ(counters().not_worth, 20u);
  // To compute them takes minutes.
  Report(1000, 0, std::chrono::hours(1), 2000);
  EXPECT_EQ(Await(keys_).tokens(), 160u);
  EXPECT_GT(counters().forecasts, 0u);
}

TEST_F(TierTest, AReportBeyondItsLimitsIsRefused) {
  Begin();
  const auto refusal = [&](uint64_t tokens, uint64_t before, uint64_t microseconds, int count = 1) {
    v1::StepRequest batch;
    batch.set_sequence(++engine_->sequence);
    for (int i = 0; i < count; ++i) {
      v1::PrefillSample& sample = *batch.add_prefills();
      sample.set_tokens(tokens);
      sample.set_tokens_before(before);
      sample.set_microseconds(microseconds);
    }
    return engine_->Step(batch).message();
  };
  EXPECT_EQ(refusal(1, 0, 1, 64), "");
  EXPECT_THAT(refusal(1, 0, 1, 65), testing::HasSubstr("prefills in the batch is 65; must be 0 to 64"));
  EXPECT_THAT(refusal(0, 0, 1), testing::HasSubstr("prefills.tokens is 0; must be 1 to 16777216"));
  EXPECT_THAT(refusal(1, UINT64_MAX, 1),
              testing::HasSubstr("prefills.tokens_before is 18446744073709551615"));
  EXPECT_THAT(refusal(1, 0, 0), testing::HasSubstr("prefills.microseconds is 0; must be 1 to 3600000000"));
  EXPECT_THAT(refusal(1, 0, 3600000001), testing::HasSubstr("prefills.microseconds is 3600000001"));
}

TEST_F(TierTest, WhileMuchIsFreeNothingIsWritten) {
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 0);
}

// A round would push out below what the round before has written, and write it again.
TEST_F(TierTest, ATierThatIsSmallerThanWhatMayLeaveIsNotWrittenForEver) {
  Begin(TierWrite::kEvict, 40);
  // Some 220 of these 632 blocks have room below.
  for (int chain = 0; chain < 158; ++chain) {
    const std::vector<uint64_t> blocks = engine_->Lease(4);
    ASSERT_EQ(blocks.size(), 4);
    engine_->Seal(blocks, Keys("c" + std::to_string(chain), 4));
    engine_->Release(blocks);
    Settle({engine_.get()});
  }
  ASSERT_LT(Blocks().free(), 8);
  for (int round = 0; round < 20; ++round) {
    tier_->Drain();
    daemon_->MoveTierOnce();
  }
  EXPECT_GT(tier_->usage().counters.stored, 100);
  EXPECT_LT(tier_->usage().counters.stored, 220);
}

TEST_F(TierTest, WhatNoSessionUsesIsWritten) {
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 0);
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 10);
  // Once.
  engine_ = OpenEngine(OpenRequest());
  Settle({engine_.get()});
  Compute(Keys("l", 3));
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 10);
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 13);
}

TEST_F(TierTest, WhatNoSessionUsesWaitsForBuffers) {
  options_.tier_buffer_bytes = 3 * kTierPageBytes;
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  engine_->Do(CloseOp());
  tier_->hangs = true;
  daemon_->MoveTierOnce();
  daemon_->MoveTierOnce();
  EXPECT_EQ(counters().demoted, 0);
  tier_->Answer();
  Move();
  EXPECT_EQ(counters().demoted, 10);
}

TEST_F(TierTest, TheEndOfADaemonWritesWhatIsInThePoolAlone) {
  Begin(TierWrite::kEvict, 100);
  const std::vector<uint64_t> blocks = engine_->Lease(3);
  for (size_t i = 0; i < blocks.size(); ++i) Fill(blocks[i], keys_[i]);
  engine_->Seal(blocks, {keys_.begin(), keys_.begin() + 3});  // They are held still.
  Compute(Keys("l", 10));
  Move();
  EXPECT_EQ(tier_->usage().counters.stored, 0);
  const TierFlush flushed = daemon_->FlushTier(std::chrono::minutes(1));
  EXPECT_EQ(flushed.written, 13);
  EXPECT_EQ(flushed.left, 0);
  End();
  Begin();
  EXPECT_EQ(Await({keys_.begin(), keys_.begin() + 3}).tokens(), 48);
  EXPECT_EQ(Await(Keys("l", 10)).tokens(), 160);
}

TEST_F(TierTest, TheEndOfADaemonDoesNotWriteWhatIsThere) {
  Begin();
  Compute(keys_);
  Move();
  EXPECT_EQ(daemon_->FlushTier(std::chrono::minutes(1)).written, 0);
  EXPECT_EQ(tier_->usage().counters.stored, 10);
}

TEST_F(TierTest, TheEndOfADaemonIsNotKeptByATierThatIsFull) {
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  tier_->stores_fail = TierResult::kFull;
  const TierFlush flushed = daemon_->FlushTier(std::chrono::minutes(1));
  EXPECT_EQ(flushed.written, 5);
  EXPECT_EQ(flushed.left, 5);
}

TEST_F(TierTest, WithoutTimeTheEndOfADaemonWritesNothing) {
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  const TierFlush flushed = daemon_->FlushTier(std::chrono::milliseconds(0));
  EXPECT_EQ(flushed.written, 0);
  EXPECT_EQ(flushed.left, 10);
}

TEST_F(TierTest, OperatorsSeeTheTier) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  LetGo(Await(keys_));
  v1::ListTiersResponse tiers;
  ASSERT_TRUE(daemon_->ListTiers({}, &tiers).ok());
  ASSERT_EQ(tiers.tiers_size(), 1);
  const v1::TierInfo& tier = tiers.tiers(0);
  EXPECT_EQ(tier.tier(), "file");
  EXPECT_EQ(tier.path(), folder_.path());
  EXPECT_EQ(tier.capacity_bytes(), 1 << 20);
  EXPECT_EQ(tier.values(), 10);
  EXPECT_EQ(tier.bytes(), 10 * kBlockBytes);
  EXPECT_EQ(tier.waiting(), 0);
  EXPECT_EQ(tier.stored(), 10);
  EXPECT_EQ(tier.loaded_bytes(), 10 * kBlockBytes);
  EXPECT_EQ(tier.demoted_blocks(), 10);
  EXPECT_EQ(tier.promoted_blocks(), 10);
  EXPECT_EQ(tier.waits(), 1);
}

TEST_F(TierTest, DamagedBytesAreAMiss) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  tier_->loads_fail = TierResult::kCorrupt;
  // Every second value of the batch is damaged: what is in front of the first of them comes.
  EXPECT_EQ(Await(keys_).tokens(), 16);
  EXPECT_EQ(counters().lost, 1);
}

TEST_F(TierTest, AStoreThatIsFullDropsCopiesAndNoVerbFails) {
  Begin();
  tier_->stores_fail = TierResult::kFull;
  Compute(keys_);
  Move();
  EXPECT_EQ(counters().dropped, 5);
  PushOut();
  EXPECT_EQ(Unwritten(), 5);
  // It is asked again when its time has come.
  tier_->stores_fail = TierResult::kDone;
  Compute(Keys("l", 5));
  Move();
  EXPECT_EQ(counters().demoted, 5);
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(counters().demoted, 10);
}

// A store that nodes share knows nothing of what nobody has asked for.
TEST_F(TierTest, WhatLeavesBeforeTheMoverSawItIsCountedByATierThatKnowsNothing) {
  Begin();
  tier_->knows_nothing = true;
  Compute(keys_);
  PushOut();
  EXPECT_EQ(Unwritten(), 10);
}

// Under write=seal what is there was written long ago, and such a tier has forgotten that.
TEST_F(TierTest, WhatWasWrittenWhenItWasSealedAndForgottenIsNotCounted) {
  Begin(TierWrite::kSeal);
  Compute(keys_);
  Move();
  tier_->knows_nothing = true;
  PushOut();
  EXPECT_EQ(Unwritten(), 0);
  EXPECT_EQ(counters().demoted, 10);
}

TEST_F(TierTest, OneNodeThatFailsDoesNotKeepTheOthersFromWriting) {
  Begin();
  tier_->stores_fail = TierResult::kFailed;
  Compute(keys_);
  Move();
  // Each time all but half of what is left is written, and none is waited with.
  EXPECT_EQ(counters().demoted, 10);
}

TEST_F(TierTest, WhatNoSessionUsesIsWrittenThoughSomeOfItFails) {
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  tier_->stores_fail = TierResult::kFailed;
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(counters().demoted, 10);
}

TEST_F(TierTest, WhatNoSessionUsesIsWrittenOnceTheTierIsBack) {
  Begin(TierWrite::kEvict, 100);
  Compute(keys_);
  tier_->stores_fail = TierResult::kFailed;
  tier_->all_fail = true;
  engine_->Do(CloseOp());
  Move();
  EXPECT_EQ(counters().demoted, 0);
  tier_->all_fail = false;
  tier_->stores_fail = TierResult::kDone;
  Move();
  EXPECT_EQ(counters().demoted, 0);
  clock_.Advance(1001);
  Move();
  EXPECT_EQ(counters().demoted, 10);
}

TEST_F(TierTest, ALateLoadIsNotWaitedFor) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  tier_->hangs = true;
  std::optional<v1::OperationResult> answer;
  engine_->Send(WaitOp(keys_), &answer);
  daemon_->MoveTierOnce();
  EXPECT_FALSE(answer.has_value());
  // Others are served meanwhile.
  EXPECT_EQ(engine_->Lease(2).size(), 2);
  clock_.Advance(kWaitMs);
  daemon_->MoveTierOnce();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->match().tokens(), 0);
  EXPECT_EQ(answer->match().below_tokens(), 160);
  EXPECT_EQ(counters().late, 10);
  // What comes now goes to nobody.
  Move();
  EXPECT_EQ(counters().promoted, 0);
}

TEST_F(TierTest, AWaitIsAnsweredOnceItsSessionHasMappedItsSlabs) {
  Begin(TierWrite::kSeal, 2);
  Compute(keys_);
  Move();
  v1::EvictResponse evicted;
  ASSERT_TRUE(daemon_->Evict({}, &evicted).ok());
  ASSERT_EQ(evicted.evicted(), 10);
  tier_->hangs = true;
  std::optional<v1::OperationResult> answer;
  engine_->Send(WaitOp(keys_), &answer);
  daemon_->MoveTierOnce();
  // The space grows, and the engine does not map the slab in time.
  EXPECT_EQ(engine_->Lease(12).size(), 12);
  daemon_->HousekeepOnce();
  clock_.Advance(kPatienceMs + 1);
  daemon_->HousekeepOnce();
  Move();
  EXPECT_FALSE(answer.has_value());
  EXPECT_TRUE(engine_->MapSlabs());
  daemon_->HousekeepOnce();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->match().tokens(), 160);
}

TEST_F(TierTest, OneLoadServesAllThatWait) {
  const auto [first, second] = BothAsk();
  EXPECT_EQ(first.match().tokens(), 160);
  EXPECT_EQ(second.match().tokens(), 160);
  EXPECT_EQ(tier_->usage().counters.loaded, 10);
}

TEST_F(TierTest, ALoadThatWasLateForAnotherIsAskedForAgain) {
  const auto [first, second] = BothAsk(TierResult::kLate);
  EXPECT_EQ(first.match().tokens(), 16);
  EXPECT_EQ(second.match().tokens(), 160);
}

TEST_F(TierTest, WhatTheTierDoesNotKnowOfIsTriedByThoseWhoWait) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  // It knows nothing at the moment at which somebody asks.
  const auto ask = [&](const std::vector<std::string>& keys) {
    std::optional<v1::OperationResult> answer;
    tier_->knows_nothing = true;
    EXPECT_EQ(engine_->Match(keys).below_tokens(), 0);
    engine_->Send(WaitOp(keys), &answer);
    tier_->knows_nothing = false;
    Move();
    EXPECT_TRUE(answer.has_value());
    return answer.value_or(v1::OperationResult()).match();
  };
  EXPECT_EQ(ask(Keys("n", 10)).tokens(), 0);
  const v1::MatchResult found = ask(keys_);
  EXPECT_EQ(found.tokens(), 160);
  EXPECT_EQ(counters().promoted, 10);
  EXPECT_EQ(counters().lost, 0);
  // What is known to be there and is not is a loss.
  LetGo(found);
  PushOut();
  tier_->loads_fail = TierResult::kMiss;
  EXPECT_EQ(Await(keys_).tokens(), 16);
  EXPECT_EQ(counters().lost, 1);
}

TEST_F(TierTest, ASessionThatEndsWhileItWaits) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  std::optional<v1::OperationResult> answer;
  engine_->Send(WaitOp(keys_), &answer);
  engine_->Die();
  ASSERT_TRUE(answer.has_value());
  EXPECT_NE(answer->code(), 0);
  Move();
  EXPECT_EQ(Blocks().leased() + Blocks().sealed() + Blocks().quarantined(), 0);
}

TEST_F(TierTest, PromotionTakesNothingThatIsHeldOrPromised) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  const std::vector<uint64_t> held = engine_->Lease(12);
  ASSERT_EQ(held.size(), 12);
  const v1::MatchResult match = Await(keys_);
  EXPECT_EQ(match.tokens(), 32);
  EXPECT_EQ(counters().no_room, 8);
  EXPECT_EQ(Blocks().leased(), 13);
}

// To find or to seal one takes as long as its chain is.
TEST_F(TierTest, OthersAreLetInBetweenBlocksThatComeUp) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  const auto holds = [&] {
    const std::vector<uint64_t> counts = daemon_->Snapshot().spaces.at(0).hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  };
  std::optional<v1::OperationResult> answer;
  engine_->Send(WaitOp(keys_), &answer);
  // A tier may answer within the first round already.
  const uint64_t before = holds();
  daemon_->MoveTierOnce();
  tier_->Drain();
  daemon_->MoveTierOnce();
  EXPECT_GE(holds() - before, 2 * keys_.size());
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->match().tokens(), 160);
}

TEST_F(TierTest, PrefetchDoesNotWait) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  v1::Operation prefetch = MatchOp(keys_);
  prefetch.mutable_match()->set_prefetch(true);
  EXPECT_EQ(engine_->Do(prefetch).match().tokens(), 0);
  Move();
  EXPECT_EQ(engine_->Match(keys_).tokens(), 160);
  EXPECT_EQ(counters().waits, 0);
}

TEST_F(TierTest, TooManyThatWaitAreAnsweredAtOnce) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  std::vector<std::optional<v1::OperationResult>> answers(Below::kMostWaits + 1);
  for (auto& answer : answers) engine_->Send(WaitOp(keys_), &answer);
  EXPECT_FALSE(answers[Below::kMostWaits - 1].has_value());
  EXPECT_TRUE(answers[Below::kMostWaits].has_value());
  EXPECT_EQ(counters().refused_waits, 1);
  Move();
  for (const auto& answer : answers) EXPECT_TRUE(answer.has_value());
}

// What has no room to wait is answered at once, and counted where it would have waited.
TEST_F(TierTest, AWaitThatHasNoRoomIsCounted) {
  Begin();
  Compute(keys_);
  Move();
  PushOut();
  // A match of more bytes than may wait.
  std::vector<std::string> large = keys_;
  for (const std::string& key : Keys("large", 17000)) large.push_back(key);
  ASSERT_GT(WaitOp(large).ByteSizeLong(), Below::kMostWaitBytes);
  EXPECT_EQ(engine_->Do(WaitOp(large)).match().tokens(), 0);
  EXPECT_EQ(counters().refused_waits, 1);
  // As many names as may be parked.
  const std::vector<uint64_t> blocks = engine_->Lease(1);
  v1::Operation ref = RefOp(std::vector<uint64_t>(65535, blocks[0]));
  ref.set_after(1);
  std::optional<v1::OperationResult> held, answer;
  engine_->Send(ref, &held);
  ASSERT_FALSE(held.has_value()) << held->message();
  engine_->Send(WaitOp(keys_), &answer);
  EXPECT_TRUE(answer.has_value());
  EXPECT_EQ(counters().refused_waits, 2);
  // Nothing of this one is below.
  EXPECT_EQ(engine_->Do(WaitOp(Keys("other", 2))).match().tokens(), 0);
  EXPECT_EQ(counters().refused_waits, 2);
  engine_->Fence(1);
  EXPECT_EQ(Await(keys_).tokens(), 160);
}

TEST_F(TierTest, AWaitThatIsTooLongIsRefused) {
  Begin();
  v1::Operation operation = MatchOp(keys_);
  operation.mutable_match()->set_wait_ms(60001);
  EXPECT_THAT(engine_->Do(operation).message(),
              testing::HasSubstr("match.wait_ms is 60001; must be 0 to 60000"));
}

}  // namespace
}  // namespace kvpool
