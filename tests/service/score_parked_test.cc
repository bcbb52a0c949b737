// Device operations while they run: what waits behind them, and what can't take their blocks from them.
#include <algorithm>

#include "server/space/session.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

class RunningTest : public ScoreTest {
 protected:
  ~RunningTest() override { hold_.Release(); }

  // A prune of five blocks to three that is in the scorer.
  void BeginPrune(Engine* engine) {
    blocks_ = LeaseWith(engine, {1, 5, 2, 3, 1});
    hold_.Hold();
    prune_ = Begin(engine, PruneOp(blocks_, 3 * kTokens));
    hold_.AwaitCalls(1);
    EXPECT_FALSE(prune_->there());
  }
  // A compaction of five blocks to two that is in the scorer.
  std::shared_ptr<LateAnswer> BeginCompact(Engine* engine) {
    blocks_ = LeaseWith(engine, {1, 5, 2, 3, 1});
    hold_.Hold();
    std::shared_ptr<LateAnswer> compact = Begin(engine, CompactOp(blocks_, 2 * kTokens));
    hold_.AwaitCalls(1);
    return compact;
  }
  uint32_t Parked() {
    const DaemonSnapshot snapshot = daemon_->Snapshot();
    return snapshot.spaces.empty() ? 0 : snapshot.spaces[0].parked;
  }
  // A fork of all blocks waits for nothing.
  void RefAll(Engine* engine) {
    const auto ref = Begin(engine, RefOp(blocks_));
    ASSERT_TRUE(ref->there());
    EXPECT_EQ(ref->Await().code(), 0);
    EXPECT_EQ(ref->Await().ref().refused_size(), 0);
    EXPECT_EQ(Parked(), 1);
  }
  // Each of the blocks has the fork's hold, and one that was no victim that of before.
  void ExpectTheForkAlone(Engine* engine, int victims) {
    const v1::LeaseResult others = engine->LeaseAsked(100, 0);
    EXPECT_FALSE(others.blocks().empty());
    for (const uint64_t leased : others.blocks()) {
      for (const uint64_t block : blocks_) EXPECT_NE(IdOf(leased), IdOf(block));
    }
    EXPECT_EQ(engine->Release(blocks_).refused_size(), 0);
    EXPECT_EQ(engine->Release(blocks_).refused_size(), victims);
    EXPECT_EQ(engine->Release(blocks_).refused_size(), 5);
  }
  // Until the runner has nothing left: another operation, of another space, is over.
  void AwaitIdle() {
    hold_.Release();
    const auto other = OpenScored("other", "other model");
    Run(other.get(), ScoreOp(other->Lease(1)));
    other->Do(CloseOp());
  }

  Refs blocks_;
  std::shared_ptr<LateAnswer> prune_;
};

TEST_F(RunningTest, LaterVerbsOnItsBlocksWaitBehind) {
  StartScoring(2);
  const auto engine = OpenScored();
  const Refs others = engine->Lease(1);
  BeginPrune(engine.get());
  const auto release = Begin(engine.get(), ReleaseOp({blocks_[1]}));
  const auto seal = Begin(engine.get(), SealOp({blocks_[0]}, {Key("a")}));
  const auto again = Begin(engine.get(), ReleaseOp({blocks_[0]}));
  const auto apart = Begin(engine.get(), ReleaseOp(others));
  const auto touch = Begin(engine.get(), TouchOp(blocks_));
  EXPECT_FALSE(release->there());
  EXPECT_FALSE(seal->there());
  EXPECT_FALSE(again->there());
  EXPECT_TRUE(apart->there()) << "another block is not held up";
  EXPECT_TRUE(touch->there()) << "a touch is advice";
  EXPECT_EQ(Parked(), 4);
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().released(), 2);
  EXPECT_EQ(release->Await().release().refused_size(), 0);
  EXPECT_EQ(seal->Await().seal().canonical(0), blocks_[0]);
  EXPECT_EQ(again->Await().release().refused_size(), 0);
  EXPECT_EQ(Blocks().cached(), 1) << "sealed before it was released";
  EXPECT_EQ(Parked(), 0);
}

// Of what the device operation takes, a hold that was added while it ran is left: one, and no other.
TEST_F(RunningTest, ARefOfVictimsWhileAPruneRunsIsAHoldMore) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  RefAll(engine.get());
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().released(), 2);
  EXPECT_EQ(Blocks().leased(), 6) << "five and the sink";
  ExpectTheForkAlone(engine.get(), /*victims=*/2);
}

TEST_F(RunningTest, ARefOfSourcesWhileACompactRunsIsAHoldMore) {
  StartScoring(2);
  const auto engine = OpenScored();
  const auto compact = BeginCompact(engine.get());
  RefAll(engine.get());
  hold_.Release();
  EXPECT_EQ(compact->Await().compact().released(), 4) << "the first stays where it is";
  EXPECT_EQ(Blocks().leased(), 7) << "five, one that was written, and the sink";
  ExpectTheForkAlone(engine.get(), /*victims=*/4);
}

TEST_F(RunningTest, AVictimReleasedBehindIsRefused) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  const auto release = Begin(engine.get(), ReleaseOp(blocks_));
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().released(), 2);
  const v1::OperationResult answer = release->Await();
  ASSERT_EQ(answer.release().refused_size(), 2);
  EXPECT_EQ(answer.release().refused(0).index(), 2);
  EXPECT_EQ(Blocks().leased(), 1) << "the sink";
}

TEST_F(RunningTest, OperationsOnTheSameBlocksKeepTheirOrder) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  const auto score = Begin(engine.get(), ScoreOp({blocks_[0], blocks_[2]}));
  const auto second = Begin(engine.get(), PruneOp({blocks_[0], blocks_[1], blocks_[4]}, 2 * kTokens));
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().released(), 2);
  EXPECT_NE(score->Await().code(), 0) << "block 2 has left";
  EXPECT_EQ(second->Await().prune().released(), 1);
}

TEST_F(RunningTest, AVerbThatIsDueLaterWaitsForBoth) {
  StartScoring(2);
  const auto engine = OpenScored();
  blocks_ = LeaseWith(engine.get(), {1, 5, 2});
  hold_.Hold();
  prune_ = Begin(engine.get(), PruneOp(blocks_, 2 * kTokens, 3));
  const auto release = Begin(engine.get(), ReleaseOp({blocks_[0]}, 2));
  EXPECT_FALSE(prune_->there());
  engine->Fence(2);
  EXPECT_FALSE(release->there()) << "behind the prune, which waits for step 3";
  engine->Fence(3);
  hold_.AwaitCalls(1);
  EXPECT_FALSE(release->there()) << "and which runs now";
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().released(), 1);
  EXPECT_EQ(release->Await().release().refused_size(), 0);
}

TEST_F(RunningTest, CloseFreesItsBlocksWhenItIsOver) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  const v1::OperationResult closed = engine->Do(CloseOp());
  EXPECT_EQ(closed.close_session().released_blocks(), 5);
  EXPECT_EQ(prune_->Await().code(), kAborted);
  EXPECT_EQ(Blocks().quarantined(), 6) << "it is still read";
  AwaitIdle();
  EXPECT_EQ(Blocks().quarantined(), 0);
}

TEST_F(RunningTest, DeathFreesItsBlocksWhenItIsOver) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  engine->Die();
  EXPECT_EQ(prune_->Await().code(), kAborted);
  EXPECT_EQ(Blocks().quarantined(), 6);
  AwaitIdle();
  EXPECT_EQ(Blocks().quarantined(), 0);
  EXPECT_EQ(Blocks().leased(), 0);
}

TEST_F(RunningTest, WhatRunsCountsInBytesUntilItIsOver) {
  StartScoring(2);
  const size_t before = ParkedBytes::bytes_of_all();
  for (const bool ends : {false, true}) {
    const auto engine = OpenScored();
    BeginPrune(engine.get());
    const auto behind = Begin(engine.get(), ScoreOp(blocks_));
    const v1::Operation of_step = PruneOp(blocks_, kTokens, /*after=*/7);
    const auto later = Begin(engine.get(), of_step);
    EXPECT_FALSE(behind->there());
    EXPECT_EQ(ParkedBytes::bytes_of_all() - before, engine->member->session->parked.bytes().bytes());
    EXPECT_GT(ParkedBytes::bytes_of_all() - before, 3 * 5 * 48u);
    if (!ends) {
      hold_.Release();
      EXPECT_EQ(prune_->Await().code(), 0);
      EXPECT_EQ(behind->Await().code(), kFailedPrecondition) << "two of its blocks are pruned";
      EXPECT_EQ(ParkedBytes::bytes_of_all() - before, ParkedVerbs::BytesOf(of_step, 1))
          << "one waits for its step";
    }
    engine->Die();
    EXPECT_EQ(ParkedBytes::bytes_of_all(), before);
    EXPECT_EQ(later->Await().code(), kAborted);
    if (ends) AwaitIdle();
  }
}

TEST_F(RunningTest, AHangUpLeavesItsBlocksToTheDeathThatFollows) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  daemon_->OnHangup(engine->id);
  AwaitIdle();
  EXPECT_EQ(Blocks().quarantined(), 6) << "its processes may still run";
  daemon_->OnProcessDead(engine->id);
  EXPECT_EQ(Blocks().quarantined(), 0);
}

// Compactions whose destinations are not to be had in the slabs there are.
class LackingTest : public RunningTest {
 protected:
  // Of two slabs at most: 14 blocks to 12, with 11 free, which is more than a quarter of a slab, and 5
  // cached.
  void BeginLacking(std::unique_ptr<Engine>* other = nullptr) {
    StartScoring(2);
    engine_ = OpenScored();
    if (other != nullptr) *other = OpenScored("other");
    const Refs cached = engine_->Lease(5);
    for (size_t i = 0; i < cached.size(); ++i) engine_->Seal({cached[i]}, {Key("c" + std::to_string(i))});
    engine_->Release(cached);
    std::vector<float> values(14);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    blocks_ = LeaseWith(engine_.get(), values);
    ASSERT_GE(Pool().free(), 10);
    leased_ = Pool().leased();
    compact_ = Begin(engine_.get(), CompactOp(blocks_, 12 * kTokens));
    EXPECT_EQ(Parked(), 1);
    ExpectWaits();
  }
  // It was not started, and nothing is leased for it.
  void ExpectWaits() {
    EXPECT_FALSE(compact_->there());
    EXPECT_EQ(Pool().leased(), leased_);
    EXPECT_EQ(Pool().cached(), 5);
  }
  // Of the first space.
  v1::StateCounts Pool() {
    v1::ListSpacesResponse spaces;
    EXPECT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
    for (const v1::SpaceInfo& space : spaces.spaces()) {
      if (space.space() == engine_->opened.space()) return space.blocks();
    }
    return {};
  }

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<LateAnswer> compact_;
  uint32_t leased_ = 0;
};

TEST_F(LackingTest, WaitForASlab) {
  BeginLacking();
  const auto release = Begin(engine_.get(), ReleaseOp({blocks_[5]}));
  const auto apart = Begin(engine_.get(), FenceOp(1));
  EXPECT_TRUE(apart->there());
  EXPECT_FALSE(release->there()) << "it came later";
  daemon_->HousekeepOnce();
  ExpectWaits();
  Settle({engine_.get()});
  const v1::OperationResult result = compact_->Await();
  EXPECT_EQ(result.code(), 0) << result.message();
  const Refs table = TableOf(result.compact());
  ASSERT_EQ(table.size(), 12);
  EXPECT_EQ(ValueAt(table.back(), 0), 13);
  EXPECT_EQ(release->Await().release().refused_size(), 1) << "it was given back by the compaction";
  EXPECT_EQ(Pool().capacity(), 63);
  EXPECT_EQ(Pool().cached(), 5);
}

TEST_F(LackingTest, AStoppedSessionHoldsThemUpForASecond) {
  std::unique_ptr<Engine> stopped;
  BeginLacking(&stopped);
  daemon_->HousekeepOnce();
  engine_->MapSlabs();
  clock_.Advance(999);
  daemon_->HousekeepOnce();
  ExpectWaits();
  clock_.Advance(1);
  daemon_->HousekeepOnce();
  EXPECT_EQ(compact_->Await().code(), 0);
  EXPECT_EQ(Pool().cached(), 5);
}

TEST_F(LackingTest, TheSessionThatIsBehindWaitsItself) {
  BeginLacking();
  daemon_->HousekeepOnce();
  clock_.Advance(1000);
  daemon_->HousekeepOnce();
  ASSERT_EQ(Pool().capacity(), 63);
  ExpectWaits();
  clock_.Advance(60000);
  daemon_->HousekeepOnce();
  ExpectWaits();  // What it would be answered is not mapped.
  engine_->MapSlabs();
  EXPECT_EQ(compact_->Await().code(), 0);
}

// Blocks are free, in a slab that it has not mapped.
TEST_F(LackingTest, TheSessionThatIsBehindIsLeasedNothing) {
  StartScoring(2);
  engine_ = OpenScored();
  const auto other = OpenScored("other");
  blocks_ = LeaseWith(engine_.get(), std::vector<float>(14, 1.0f));
  other->Lease(Pool().free());
  daemon_->HousekeepOnce();
  other->MapSlabs();
  clock_.Advance(1000);
  daemon_->HousekeepOnce();
  ASSERT_EQ(Pool().free(), 32);
  leased_ = Pool().leased();
  compact_ = Begin(engine_.get(), CompactOp(blocks_, 12 * kTokens));
  EXPECT_EQ(Pool().leased(), leased_);
  EXPECT_FALSE(compact_->there());
  engine_->MapSlabs();
  EXPECT_EQ(compact_->Await().code(), 0);
}

TEST_F(LackingTest, BlocksThatComeFreeDoAsWell) {
  BeginLacking();
  v1::EvictRequest evict;
  evict.set_count(1);
  v1::EvictResponse evicted;
  ASSERT_TRUE(daemon_->Evict(evict, &evicted).ok());
  ASSERT_EQ(Pool().free(), 12);
  daemon_->HousekeepOnce();
  EXPECT_EQ(compact_->Await().code(), 0);
  EXPECT_EQ(Pool().capacity(), 31);
}

// Another space took the memory.
TEST_F(LackingTest, EvictWhereTheSpaceCanNotGrowAnyMore) {
  BeginLacking();
  const auto other = OpenScored("other", "other model");
  daemon_->HousekeepOnce();
  EXPECT_EQ(compact_->Await().code(), 0);
  EXPECT_LT(Pool().cached(), 5);
  EXPECT_EQ(Pool().capacity(), 31);
}

TEST_F(LackingTest, AreRefusedWhereNothingIsToBeHad) {
  BeginLacking();
  const Refs rest = engine_->Lease(11);
  engine_->Match({Key("c0")});
  engine_->Match({Key("c1")});
  EXPECT_FALSE(compact_->there());
  const auto other = OpenScored("other", "other model");
  daemon_->HousekeepOnce();
  const v1::OperationResult refused = compact_->Await();
  EXPECT_EQ(refused.code(), kResourceExhausted);
  EXPECT_NE(refused.message().find("12 blocks to be leased for what stays, 2 free, 3 available"),
            std::string::npos)
      << refused.message();
  EXPECT_EQ(engine_->Release(blocks_).refused_size(), 0) << "it changed nothing";
}

TEST_F(LackingTest, TheEndOfTheSessionEndsThem) {
  BeginLacking();
  const auto closed = Begin(engine_.get(), CloseOp());
  EXPECT_EQ(compact_->Await().code(), kAborted);
  EXPECT_EQ(closed->Await().close_session().released_blocks(), 14);
  EXPECT_EQ(Pool().free() + Pool().cached(), Pool().capacity());
  daemon_->HousekeepOnce();
}

TEST_F(RunningTest, DestinationsOfACompactStayTooWhenTheSessionEnds) {
  StartScoring(2);
  const auto engine = OpenScored();
  const auto compact = BeginCompact(engine.get());
  EXPECT_EQ(Blocks().leased(), 8) << "five, two to write and the sink";
  engine->Do(CloseOp());
  EXPECT_EQ(compact->Await().code(), kAborted);
  EXPECT_EQ(Blocks().quarantined(), 8);
  AwaitIdle();
  EXPECT_EQ(Blocks().quarantined(), 0);
}

TEST_F(RunningTest, AStrayReleaseOfADestinationWaitsBehindToo) {
  StartScoring(2);
  const auto engine = OpenScored();
  const auto compact = BeginCompact(engine.get());
  // The two that come after these five, in their first life.
  const uint32_t last = Index(BlockRef::Unpack(blocks_[4]).id);
  const Refs guessed = {BlockRef{.id = BlockId{last + 1}, .generation = 1}.Pack()};
  const auto release = Begin(engine.get(), ReleaseOp(guessed));
  EXPECT_FALSE(release->there());
  hold_.Release();
  EXPECT_EQ(compact->Await().code(), 0);
  EXPECT_EQ(release->Await().code(), 0);
}

TEST_F(RunningTest, AVerbThatNamedADestinationBeforeItWasOneWaitsForIt) {
  StartScoring(2);
  const auto engine = OpenScored();
  const Refs others = LeaseWith(engine.get(), {1, 5, 2, 3, 1});
  BeginPrune(engine.get());
  // Behind the prune for its own block; the other two are nobody's yet.
  const uint32_t last = Index(BlockRef::Unpack(blocks_[4]).id);
  const auto guess = [](uint32_t id) { return BlockRef{.id = BlockId{id}, .generation = 1}.Pack(); };
  const auto release = Begin(engine.get(), ReleaseOp({blocks_[4], guess(last + 1), guess(last + 2)}));
  const auto compact = Begin(engine.get(), CompactOp(others, 2 * kTokens));
  EXPECT_FALSE(release->there());
  EXPECT_FALSE(compact->there());
  hold_.Release();
  EXPECT_EQ(prune_->Await().code(), 0);
  const v1::OperationResult compacted = compact->Await();
  EXPECT_EQ(compacted.code(), 0) << compacted.message();
  const Refs table = TableOf(compacted.compact());
  EXPECT_TRUE(std::any_of(table.begin(), table.end(), [last](uint64_t ref) {
    return Index(BlockRef::Unpack(ref).id) == last + 1;
  })) << "its destination is another";
  EXPECT_EQ(release->Await().code(), 0);
  EXPECT_EQ(Parked(), 0);
}

TEST_F(RunningTest, RevokeAsksAndTakesNothing) {
  StartScoring(2);
  const auto engine = OpenScored();
  daemon_->BindStream(engine->member, std::make_shared<FakeListener>());
  BeginPrune(engine.get());
  v1::RevokeRequest request;
  request.set_blocks(4);
  v1::RevokeResponse response;
  EXPECT_TRUE(daemon_->Revoke(request, &response).ok());
  EXPECT_EQ(response.sessions_asked(), 1);
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().released(), 2);
}

TEST_F(RunningTest, ARepeatedCallWaitsForTheSameOperation) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  --engine->sequence;
  const auto repeated = Begin(engine.get(), PruneOp(blocks_, 3 * kTokens));
  EXPECT_FALSE(repeated->there());
  hold_.Release();
  EXPECT_EQ(prune_->Await().prune().victims_size(), 2);
  EXPECT_EQ(repeated->Await().SerializeAsString(), prune_->Await().SerializeAsString());
  --engine->sequence;
  const auto later = Begin(engine.get(), PruneOp(blocks_, 3 * kTokens));
  EXPECT_EQ(later->Await().prune().victims_size(), 2) << "the first answer again";
  EXPECT_EQ(Blocks().leased(), 4) << "applied once";
}

// On the stream: parked, and then a completion.
TEST_F(RunningTest, OnTheStreamTheResultIsACompletion) {
  StartScoring(2);
  const auto engine = OpenScored();
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, listener);
  engine->Pending();
  blocks_ = LeaseWith(engine.get(), {1, 5, 2});
  hold_.Hold();
  v1::StepRequest request;
  request.set_sequence(++engine->sequence);
  *request.add_operations() = PruneOp(blocks_, 2 * kTokens);
  *request.add_operations() = ReleaseOp({blocks_[0]});
  *request.add_operations() = LeaseOp(1);
  const v1::StepResponse response = engine->Step(request);
  EXPECT_TRUE(response.results(0).parked());
  EXPECT_TRUE(response.results(1).parked());
  EXPECT_EQ(response.results(2).lease().blocks_size(), 1);
  const v1::StepResponse repeated = engine->Step(request);
  EXPECT_TRUE(repeated.results(0).parked());
  const int woken = listener->pending;
  AwaitIdle();
  EXPECT_GT(listener->pending, woken);
  const v1::StepResponse pending = engine->Pending();
  ASSERT_EQ(pending.completions_size(), 2);
  EXPECT_EQ(pending.completions(0).sequence(), request.sequence());
  EXPECT_EQ(pending.completions(0).index(), 0);
  EXPECT_EQ(pending.completions(0).result().prune().victims(0), 1);
  EXPECT_EQ(pending.completions(1).index(), 1);
  EXPECT_EQ(pending.completions(1).result().release().refused_size(), 0);
  EXPECT_EQ(engine->Step(request).results(0).prune().victims_size(), 1) << "said again, with its result";
}

TEST_F(RunningTest, AnErrorOnTheStreamIsAnsweredAtOnce) {
  StartScoring(2);
  const auto engine = OpenScored();
  v1::Operation operation = PruneOp(LeaseWith(engine.get(), {1, 2}), kTokens);
  operation.mutable_prune()->mutable_policy()->set_name("h2o");
  const v1::StepResponse response = engine->Step({operation});
  EXPECT_FALSE(response.results(0).parked());
  EXPECT_EQ(response.results(0).code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST_F(RunningTest, LargeCompletionsComeInSeveralResponses) {
  StartScoring(2);
  const auto engine = OpenScored();
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, listener);
  engine->Pending();
  // 24 blocks of 4 tokens and 4 planes are 480 scores, about 2 KB: 700 are more than a MiB.
  constexpr int kScores = 700;
  const Refs blocks = LeaseWith(engine.get(), std::vector<float>(24, 1));
  v1::Operation score = ScoreOp(blocks);
  score.mutable_score()->set_scope(v1::SCOPE_HEAD);
  const v1::StepResponse first = engine->Step(std::vector<v1::Operation>(kScores, score));
  EXPECT_EQ(first.completions_size(), 0);
  EXPECT_EQ(Run(engine.get(), score).code(), 0) << "behind all of them";
  // Those that were over before the batch was applied to its end are in its answer.
  int completions = 0, responses = 0;
  for (const v1::OperationResult& result : first.results()) completions += result.has_score();
  for (v1::StepResponse pending = engine->Pending(); !pending.completions().empty();
       pending = engine->Pending()) {
    EXPECT_LT(pending.ByteSizeLong(), 2 << 20);
    completions += pending.completions_size();
    ++responses;
  }
  EXPECT_EQ(responses, 2);
  EXPECT_EQ(completions, kScores);
}

TEST_F(RunningTest, TheQueueIsBoundedAndSaysSo) {
  options_.score_queue = 8;
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  const Refs others = LeaseWith(engine.get(), {1, 2});
  const auto queued = Begin(engine.get(), ScoreOp({others[0]}));
  const auto refused = Begin(engine.get(), ScoreOp({others[1]}));
  ASSERT_TRUE(refused->there());
  EXPECT_EQ(refused->Await().code(), kResourceExhausted);
  EXPECT_NE(refused->Await().message().find("2 operations of session"), std::string::npos)
      << refused->Await().message();
  const DeviceCounters counters = daemon_->Snapshot().device_operations.at(0).counters;
  EXPECT_EQ(counters.refused_by_session, 1);
  EXPECT_EQ(counters.refused_by_queue, 0);
  hold_.Release();
  EXPECT_EQ(queued->Await().code(), 0);
}

// Parts run one by one here: the order is a matter of counting.
class TurnsTest : public ScoreTest {
 protected:
  void SetUp() override {
    options_.device_threads = false;
    options_.score_queue = 8;
    StartScoring(4);
    flooder_ = OpenScored("flooder");
    more_of_it_.push_back(OpenScored("flooder 2"));
    more_of_it_.push_back(OpenScored("flooder 3"));
    more_of_it_.push_back(OpenScored("flooder 4"));
    victim_ = Attach("victim", 2000);
    ASSERT_TRUE(victim_->Open(ScoredRequest()).ok());
    Settle({victim_.get()});
  }
  std::shared_ptr<LateAnswer> Score(Engine* engine) { return Begin(engine, ScoreOp(engine->Lease(1))); }

  std::unique_ptr<Engine> flooder_, victim_;
  std::vector<std::unique_ptr<Engine>> more_of_it_;
};

TEST_F(TurnsTest, TenantsTakeTurnsAtADevice) {
  // The part of each session of the flooder's: 2 places of 8.
  std::vector<std::shared_ptr<LateAnswer>> flood;
  for (Engine* const engine : {flooder_.get(), more_of_it_[0].get(), more_of_it_[1].get()}) {
    flood.push_back(Score(engine));
    flood.push_back(Score(engine));
  }
  const auto refused = Score(more_of_it_[2].get());
  ASSERT_TRUE(refused->there());
  EXPECT_EQ(refused->Await().code(), kResourceExhausted);
  EXPECT_NE(refused->Await().message().find("the limit is 6 of 8"), std::string::npos)
      << refused->Await().message();
  const auto first = Score(victim_.get()), second = Score(victim_.get());
  EXPECT_FALSE(first->there()) << "there is a place for it";
  ASSERT_TRUE(daemon_->RunDevicePart(0));
  ASSERT_TRUE(daemon_->RunDevicePart(0));
  EXPECT_TRUE(flood[0]->there() && first->there()) << "it waited for one";
  EXPECT_FALSE(flood[1]->there());
  ASSERT_TRUE(daemon_->RunDevicePart(0));
  ASSERT_TRUE(daemon_->RunDevicePart(0));
  EXPECT_TRUE(flood[1]->there() && second->there()) << "and the next one for two";
  EXPECT_FALSE(flood[2]->there());
  while (daemon_->RunDevicePart(0)) {
  }
  EXPECT_TRUE(flood.back()->there());
}

TEST_F(RunningTest, ADaemonThatEndsAnswersWhatIsQueued) {
  StartScoring(2);
  const auto engine = OpenScored();
  BeginPrune(engine.get());
  const Refs others = LeaseWith(engine.get(), {1});
  const auto queued = Begin(engine.get(), ScoreOp(others));
  hold_.Release();
  daemon_.reset();
  EXPECT_TRUE(prune_->there());
  EXPECT_TRUE(queued->there());
}

}  // namespace
}  // namespace kvpool
