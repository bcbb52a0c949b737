// Verbs that wait: for a step, or behind a verb that does.
#include "absl/strings/str_cat.h"
#include "server/space/session.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class ParkedTest : public ServiceTest {
 protected:
  uint32_t Parked() { return daemon_->Snapshot().spaces.at(0).parked; }
};

// Free while a step is in flight: the block is nobody else's before the step is done.
TEST_F(ParkedTest, AReleaseWaitsForItsStep) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(13);
  std::optional<v1::OperationResult> answer;
  engine->Send(ReleaseOp(blocks, 7), &answer);
  EXPECT_FALSE(answer.has_value());
  const auto other = OpenEngine(OpenRequest(), "other");
  EXPECT_EQ(other->LeaseAsked(1, 1).blocks_size(), 0);
  engine->Fence(6);
  EXPECT_FALSE(answer.has_value());
  engine->Fence(7);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->release().refused_size(), 0);
  EXPECT_EQ(Blocks().leased(), 2) << "the sinks";
  EXPECT_EQ(other->LeaseAsked(1, 1).blocks_size(), 1);
}

// What is pending belongs to the stream that the member has now, not to one whose batch took long to apply.
TEST_F(ParkedTest, AStreamThatWasReplacedTakesNothingAlong) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const FakeListener replaced;
  const auto present = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, present);
  ASSERT_TRUE(engine->Step({ReleaseOp(engine->Lease(1), 7)}).results(0).parked());
  engine->Fence(7);
  const auto lease_on = [&](const StreamListener* stream) {
    v1::StepRequest request;
    request.set_sequence(++engine->sequence);
    *request.add_operations() = LeaseOp(1);
    v1::StepResponse response;
    daemon_->Apply(engine->member, request, &response, nullptr, stream);
    EXPECT_EQ(response.results(0).lease().blocks_size(), 1);
    return response;
  };
  EXPECT_EQ(lease_on(&replaced).completions_size(), 0);
  EXPECT_EQ(lease_on(present.get()).completions_size(), 1);
}

TEST_F(ParkedTest, AStepThatIsPassedDoesNotPark) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  engine->Fence(5);
  EXPECT_EQ(engine->Fence(3), 5) << "a fence never moves back";
  EXPECT_EQ(engine->Release(blocks, 5).refused_size(), 0);
}

TEST_F(ParkedTest, LaterVerbsOnTheSameBlockWaitBehind) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  // Seal after 4, then release now: were the release not to wait, it would free what is about to be sealed.
  const v1::StepResponse response = engine->Step(
      {SealOp({blocks[0]}, {Key("a")}, "", 4), ReleaseOp({blocks[0]}), ReleaseOp({blocks[1]}),
       UnpinOp({blocks[2], blocks[0]}), TouchOp({blocks[0]}), RefOp({blocks[2]}), MatchOp({Key("a")})});
  EXPECT_TRUE(response.results(0).parked());
  EXPECT_TRUE(response.results(1).parked());
  EXPECT_FALSE(response.results(2).parked()) << "another block is not held up";
  EXPECT_TRUE(response.results(3).parked()) << "one of its blocks is";
  EXPECT_FALSE(response.results(4).parked()) << "a touch is advice";
  EXPECT_FALSE(response.results(5).parked()) << "the block is held now";
  EXPECT_FALSE(response.results(6).parked()) << "a match never waits";
  EXPECT_EQ(response.results(6).match().tokens(), 0);
  EXPECT_EQ(Parked(), 3);

  const v1::StepResponse passed = engine->Step({FenceOp(4)});
  ASSERT_EQ(passed.completions_size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(passed.completions(i).sequence(), response.sequence());
    EXPECT_EQ(passed.completions(i).result().code(), 0);
  }
  EXPECT_EQ(passed.completions(0).index(), 0);
  EXPECT_EQ(passed.completions(1).index(), 1);
  EXPECT_EQ(passed.completions(2).index(), 3);
  EXPECT_EQ(passed.completions(0).result().seal().canonical(0), blocks[0]);
  EXPECT_EQ(passed.completions(1).result().release().refused_size(), 0);
  EXPECT_EQ(passed.completions(2).result().unpin().unpinned(), 0);
  EXPECT_EQ(Blocks().cached(), 1);
  EXPECT_EQ(Parked(), 0);
}

TEST_F(ParkedTest, OrderOfABlockHoldsAcrossDifferentSteps) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  // The release names an earlier step than the seal before it.
  engine->Step({SealOp(blocks, {Key("a")}, "", 9), ReleaseOp(blocks, 2)});
  EXPECT_EQ(engine->Step({FenceOp(8)}).completions_size(), 0);
  const v1::StepResponse passed = engine->Step({FenceOp(9)});
  ASSERT_EQ(passed.completions_size(), 2);
  EXPECT_EQ(passed.completions(0).index(), 0);
  EXPECT_EQ(Blocks().cached(), 1);
}

TEST_F(ParkedTest, EveryRankMustPass) {
  StartDaemon(2, /*devices=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const auto rank0 = OpenEngine(request);
  const auto rank1 = Attach();
  ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1)).ok());
  const auto scheduler = Attach();
  v1::AddMember join = JoinRequest(*rank0, 0);
  join.mutable_role()->set_scheduler(true);
  ASSERT_TRUE(scheduler->Join(*rank0, join).ok());
  Settle({rank0.get(), rank1.get(), scheduler.get()});

  const std::vector<uint64_t> blocks = scheduler->Lease(2);
  std::optional<v1::OperationResult> answer;
  scheduler->Send(ReleaseOp(blocks, 3), &answer);
  EXPECT_EQ(rank0->Fence(5), 0);
  EXPECT_FALSE(answer.has_value());
  EXPECT_EQ(rank1->Fence(3), 3);
  EXPECT_TRUE(answer.has_value());
  const v1::OperationResult refused = scheduler->Do(FenceOp(9));
  EXPECT_EQ(refused.code(), kFailedPrecondition);
  EXPECT_EQ(refused.message(), "fence from member 2, the scheduler; only ranks report fences");
}

TEST_F(ParkedTest, CompletionsGoToTheMemberThatAsked) {
  StartDaemon(2);
  const auto rank = OpenEngine(OpenRequest());
  const auto scheduler = Attach();
  v1::AddMember join = JoinRequest(*rank, 0);
  join.mutable_role()->set_scheduler(true);
  ASSERT_TRUE(scheduler->Join(*rank, join).ok());
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(scheduler->member, listener);
  scheduler->Pending();
  const std::vector<uint64_t> blocks = scheduler->Lease(1);
  const v1::StepResponse sent = scheduler->Step({ReleaseOp(blocks, 1)});
  const int before = listener->pending;
  const v1::StepResponse fenced = rank->Step({FenceOp(1)});
  EXPECT_EQ(fenced.completions_size(), 0);
  EXPECT_EQ(listener->pending, before + 1);
  const v1::StepResponse told = scheduler->Pending();
  ASSERT_EQ(told.completions_size(), 1);
  EXPECT_EQ(told.completions(0).sequence(), sent.sequence());
  EXPECT_EQ(told.sequence(), 0);
}

TEST_F(ParkedTest, ACompletionLostWithItsStreamComesAgain) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  daemon_->BindStream(engine->member, std::make_shared<FakeListener>());
  engine->Step({ReleaseOp(blocks, 1)});
  engine->Fence(1);
  EXPECT_EQ(engine->Pending().completions_size(), 1);
  EXPECT_EQ(engine->Pending().completions_size(), 0) << "once a stream";
  daemon_->BindStream(engine->member, std::make_shared<FakeListener>());
  const v1::StepResponse again = engine->Step({TouchOp(blocks)});
  ASSERT_EQ(again.completions_size(), 1);
  EXPECT_TRUE(again.completions(0).result().has_release());
  v1::StepRequest acknowledging;
  acknowledging.set_sequence(++engine->sequence);
  acknowledging.set_acknowledged(again.sequence());
  engine->Step(acknowledging);
  daemon_->BindStream(engine->member, std::make_shared<FakeListener>());
  EXPECT_EQ(engine->Pending().completions_size(), 0) << "it is known to have arrived";
}

TEST_F(ParkedTest, AStreamThatWasReplacedTakesNothing) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  const auto replaced = std::make_shared<FakeListener>(), present = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, replaced);
  engine->Step({ReleaseOp(blocks, 1)});
  engine->Fence(1);
  daemon_->BindStream(engine->member, present);
  v1::StepResponse nowhere, there;
  EXPECT_FALSE(daemon_->TakePending(engine->member, replaced.get(), &nowhere));
  EXPECT_EQ(nowhere.completions_size(), 0);
  EXPECT_TRUE(daemon_->TakePending(engine->member, present.get(), &there));
  EXPECT_EQ(there.completions_size(), 1);
}

TEST_F(ParkedTest, AbortWithTwoBatchesInFlight) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(4);
  engine->Step({ReleaseOp({blocks[0]}, 1), ReleaseOp({blocks[1]}, 2)});
  engine->Step({ReleaseOp({blocks[2]}, 3)});
  std::optional<v1::OperationResult> unary;
  engine->Send(ReleaseOp({blocks[3]}, 3), &unary);
  engine->Fence(1);
  daemon_->OnHangup(engine->id);
  ASSERT_TRUE(unary.has_value());
  EXPECT_EQ(unary->code(), kAborted);
  const v1::StepResponse pending = engine->Pending();
  ASSERT_EQ(pending.completions_size(), 3);
  EXPECT_EQ(pending.completions(0).result().code(), 0);
  EXPECT_EQ(pending.completions(1).result().code(), kAborted);
  EXPECT_NE(pending.completions(1).result().message().find("hung up"), std::string::npos);
  EXPECT_EQ(Blocks().quarantined(), 4) << "three blocks and the sink: parked verbs changed nothing";
  daemon_->OnProcessDead(engine->id);
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
}

TEST_F(ParkedTest, CloseMayWaitToo) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  std::optional<v1::OperationResult> sealed, closed, late;
  engine->Send(SealOp({blocks[0]}, {Key("a")}, "", 5), &sealed);
  engine->Send(CloseOp(5), &closed);
  engine->Send(ReleaseOp({blocks[1]}, 6), &late);
  EXPECT_FALSE(closed.has_value());
  EXPECT_EQ(engine->Fence(5), 5);
  ASSERT_TRUE(sealed.has_value() && closed.has_value() && late.has_value());
  EXPECT_EQ(sealed->seal().canonical(0), blocks[0]);
  EXPECT_EQ(closed->close_session().released_blocks(), 2);
  EXPECT_EQ(late->code(), kAborted);
  EXPECT_EQ(Blocks().cached(), 1);
  EXPECT_EQ(Blocks().leased(), 0);
}

TEST_F(ParkedTest, ParkedBlocksAreBounded) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> many(60000, engine->Lease(1)[0]);
  std::optional<v1::OperationResult> first, second;
  engine->Send(ReleaseOp(many, 5), &first);
  v1::Operation pin = PinOp(many, 1000);
  pin.set_after(5);
  engine->Send(pin, &second);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->code(), kResourceExhausted);
  EXPECT_EQ(second->message(),
            "verb for after step 5: 1 verbs with 60000 blocks are parked, 0 completions have not been "
            "acknowledged; "
            "limit 65536 in all; step 0 is passed");
  engine->Fence(5);
  EXPECT_TRUE(first.has_value());
}

// ------------------------------------------------------------------------------------------------- memory

class ParkedBytesTest : public ParkedTest {
 protected:
  // So many names of a block, each with 512 bytes of keys.
  static v1::Operation SealWithLongKeys(uint64_t block, size_t names, uint64_t after) {
    v1::Operation operation;
    operation.set_after(after);
    v1::Seal* seal = operation.mutable_seal();
    seal->set_key_bytes(64);
    seal->set_keys_per_block(8);
    seal->mutable_blocks()->Resize(static_cast<int>(names), block);
    seal->set_keys(std::string(names * 512, 'k'));
    return operation;
  }
  static v1::Operation PinAfter(const std::vector<uint64_t>& blocks, uint64_t after) {
    v1::Operation operation = PinOp(blocks, 1000);
    operation.set_after(after);
    return operation;
  }
};

TEST_F(ParkedBytesTest, KeysCountByTheirSize) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const v1::Operation seal = SealWithLongKeys(engine->Lease(1)[0], 4096, 5);
  int parked = 0;
  v1::OperationResult last;
  while ((last = engine->Step({seal}).results(0)).parked()) ++parked;
  EXPECT_EQ(last.code(), kResourceExhausted);
  EXPECT_EQ(parked, 5) << "each has twice as many bytes of keys as the weight of its blocks allows";
  EXPECT_LT(engine->member->session->parked.bytes().bytes(), 16u << 20);
}

TEST_F(ParkedBytesTest, WhatGoesGivesBackWhatItTook) {
  StartDaemon(2);
  const size_t before = ParkedBytes::bytes_of_all();
  for (const size_t names : {1, 20, 4000}) {
    for (const bool ends : {false, true}) {
      const auto engine = OpenEngine(OpenRequest());
      const uint64_t block = engine->Lease(1)[0], other = engine->Lease(1)[0];
      std::optional<v1::OperationResult> unary;
      engine->Step({SealWithLongKeys(block, names, 1), PinAfter({block, other}, 2), ReleaseOp({other}, 3)});
      engine->Send(ReleaseOp(std::vector<uint64_t>(names, block), /*after=*/3), &unary);
      engine->Step({ReleaseOp({block})});  // It is behind those on its block.
      EXPECT_GT(ParkedBytes::bytes_of_all(), before + names * 512);
      EXPECT_EQ(ParkedBytes::bytes_of_all() - before, engine->member->session->parked.bytes().bytes());
      if (!ends) {
        engine->Fence(1);
        EXPECT_GT(ParkedBytes::bytes_of_all(), before) << "two wait for another step";
        engine->Fence(3);
        EXPECT_EQ(ParkedBytes::bytes_of_all(), before);
      }
      engine->Die();
      EXPECT_TRUE(unary.has_value());
      EXPECT_EQ(ParkedBytes::bytes_of_all(), before);
    }
  }
}

TEST_F(ParkedBytesTest, AllSessionsTogetherHaveABound) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  ParkedBytes others;
  others.Add(ParkedBytes::kMaxBytesOfAll + 1);
  const v1::Operation large = SealWithLongKeys(blocks[0], 1000, 5);
  const v1::OperationResult refused = engine->Step({large}).results(0);
  EXPECT_EQ(refused.code(), kResourceExhausted);
  EXPECT_EQ(refused.message(),
            absl::StrCat("verb for after step 5: it takes ", ParkedVerbs::BytesOf(large, 1),
                         " bytes, and what is parked 0; limit 524288, with ", ParkedBytes::bytes_of_all(),
                         " bytes of all sessions"));
  EXPECT_EQ(engine->member->session->parked.bytes().bytes(), 0u);
  EXPECT_TRUE(engine->Step({SealOp({blocks[0]}, {Key("a")}, "", 5)}).results(0).parked()) << "a small one";
  // A release is never refused.
  engine->Step({RefOp(std::vector<uint64_t>(20000, blocks[1]))});
  const v1::OperationResult late =
      engine->Step({ReleaseOp(std::vector<uint64_t>(20001, blocks[1]), 5)}).results(0);
  EXPECT_EQ(late.code(), 0) << late.message();
  EXPECT_FALSE(late.parked());
  EXPECT_EQ(late.release().refused_size(), 0);
  others.Subtract(others.bytes());
  EXPECT_TRUE(engine->Step({SealWithLongKeys(blocks[2], 1000, 5)}).results(0).parked())
      << "there is room again";
  EXPECT_EQ(Blocks().leased(), 4) << "three and the sink";
  engine->Fence(5);
  for (int i = 0; i < 20; ++i) daemon_->HousekeepOnce();
  EXPECT_EQ(engine->Release({blocks[1]}).refused_size(), 1) << "all its holds were given back";
}

class LateReleaseTest : public ParkedTest {
 protected:
  // Parks so many names, of a block of their own: with 65,535 no other verb can be parked.
  void FillUp(Engine* engine, uint64_t step, size_t names = 65535) {
    const uint64_t block = engine->Lease(1)[0];
    engine->Step({RefOp(std::vector<uint64_t>(names - 1, block))});
    const v1::StepResponse parked = engine->Step({ReleaseOp(std::vector<uint64_t>(names, block), step)});
    ASSERT_TRUE(parked.results(0).parked());
  }
  // Turns that let late releases go on.
  void GoOn() {
    for (int i = 0; i < 20; ++i) daemon_->HousekeepOnce();
  }
};

TEST_F(LateReleaseTest, AReleaseIsNeverRefused) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(8);
  for (int i = 0; i < 4; ++i) engine->Step({RefOp(std::vector<uint64_t>(16383, blocks[i]))});
  FillUp(engine.get(), 1);
  // Four blocks of 16,384 holds and four of one: all come back, each exactly at its step.
  for (int i = 0; i < 4; ++i) {
    const v1::StepResponse late =
        engine->Step({ReleaseOp(std::vector<uint64_t>(16384, blocks[i]), 2), ReleaseOp({blocks[i + 4]}, 3)});
    for (const v1::OperationResult& result : late.results()) {
      EXPECT_EQ(result.code(), 0) << result.message();
      EXPECT_FALSE(result.parked());
      EXPECT_EQ(result.release().refused_size(), 0);
    }
  }
  EXPECT_EQ(Blocks().leased(), 10) << "nine and the sink";
  engine->Fence(1);
  GoOn();
  EXPECT_EQ(Blocks().leased(), 9);
  engine->Fence(2);
  GoOn();
  EXPECT_EQ(Blocks().leased(), 5);
  engine->Fence(3);
  GoOn();
  EXPECT_EQ(Blocks().leased(), 1) << "the sink";
}

TEST_F(LateReleaseTest, ABlockThatIsNotHeldIsRefusedWhenItIsNamed) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  engine->Release({blocks[0]});
  FillUp(engine.get(), 1);
  const v1::ReleaseResult result =
      engine->Step({ReleaseOp({blocks[0], blocks[1], 0, engine->opened.sink_block()}, 1)})
          .results(0)
          .release();
  ASSERT_EQ(result.refused_size(), 3);
  EXPECT_EQ(result.refused(0).index(), 0);
  EXPECT_EQ(result.refused(1).index(), 2);
  EXPECT_EQ(result.refused(2).index(), 3);
}

// One block, two owners: a Ref that says OK is a hold, whatever is parked.
TEST_F(LateReleaseTest, ARefCountsAtOnceHoweverMuchIsParked) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const auto other = OpenEngine(OpenRequest(), "other");
  const uint64_t block = engine->Lease(1)[0];
  engine->Step({RefOp({block})});
  ASSERT_TRUE(engine->Step({ReleaseOp({block}, 1)}).results(0).parked());
  FillUp(engine.get(), 1, 65533);
  const v1::OperationResult forked = engine->Step({RefOp({block})}).results(0);
  ASSERT_EQ(forked.code(), 0) << forked.message();
  ASSERT_FALSE(forked.parked());
  ASSERT_EQ(forked.ref().refused_size(), 0);
  engine->Fence(1);
  // Two holds are left, the first and the fork's: the fork goes.
  EXPECT_EQ(engine->Release({block}).refused_size(), 0);
  const v1::LeaseResult others = other->LeaseAsked(100, 0);
  for (const uint64_t leased : others.blocks()) EXPECT_NE(leased << 32, block << 32);
  EXPECT_EQ(engine->Release({block}).refused_size(), 0) << "it is still held";
  EXPECT_EQ(engine->Release({block}).refused_size(), 1);
}

TEST_F(LateReleaseTest, TheyEndWithTheirSession) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  FillUp(engine.get(), 1);
  engine->Step({ReleaseOp(blocks, 1)});
  engine->Die();
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
  GoOn();
}

// Answers that did not fit into one response must leave nothing behind that names a member: it may be gone with its
// session before the next turn at the space.
TEST_F(ParkedTest, AMemberThatIsGoneIsNotWokenForAnswersThatAreLeft) {
  StartDaemon(2);
  std::unique_ptr<Engine> engine = OpenEngine(OpenRequest());
  const std::unique_ptr<Engine> neighbour = OpenEngine(OpenRequest());
  std::vector<uint64_t> unknown(15000);
  for (size_t i = 0; i < unknown.size(); ++i) unknown[i] = uint64_t{7} << 32 | (i % 16 + 1);
  engine->Step({ReleaseOp(unknown, 1)});  // Each answer has 15,000 refusals: some MiB.
  engine->Step({ReleaseOp(unknown, 1)});
  engine->Step({FenceOp(1)});
  engine->Die();
  const std::weak_ptr<Member> member = engine->member;
  engine->Pending();
  engine.reset();
  EXPECT_TRUE(member.expired());
  daemon_->HousekeepOnce();
  EXPECT_EQ(neighbour->Lease(1).size(), 1);
}

}  // namespace
}  // namespace kvpool
