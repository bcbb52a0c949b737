// Exactly once: what a member that lost an answer gets when it asks again.
#include "server/space/answer_window.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class OnceTest : public ServiceTest {
 protected:
  v1::StepRequest Batch(uint64_t sequence, std::vector<v1::Operation> operations) {
    v1::StepRequest request;
    request.set_sequence(sequence);
    for (v1::Operation& operation : operations) *request.add_operations() = std::move(operation);
    return request;
  }
  v1::OperationResult Unary(Engine* engine, uint64_t sequence, v1::Operation operation) {
    engine->sequence = sequence - 1;
    return engine->Do(std::move(operation));
  }
};

TEST_F(OnceTest, ARepeatedBatchGetsTheFirstAnswer) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const v1::StepRequest request = Batch(1, {LeaseOp(4), LeaseOp(2)});
  const v1::StepResponse first = engine->Step(request);
  v1::StepResponse again = engine->Step(request);
  again.clear_notices();
  v1::StepResponse without = first;
  without.clear_notices();
  EXPECT_EQ(again.SerializeAsString(), without.SerializeAsString());
  EXPECT_EQ(Blocks().leased(), 7) << "six and the sink";
}

TEST_F(OnceTest, ReleaseRetriedAfterALostAnswerTakesOneHold) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  engine->Seal(blocks, Keys("a", 1));
  engine->Do(RefOp(blocks));
  const v1::StepRequest request = Batch(10, {ReleaseOp(blocks)});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(engine->Step(request).results(0).release().refused_size(), 0);
  EXPECT_EQ(Blocks().sealed(), 1) << "one of two holds is left";
  // The same by unary call: numbers are shared.
  EXPECT_EQ(Unary(engine.get(), 10, ReleaseOp(blocks)).release().refused_size(), 0);
  EXPECT_EQ(Blocks().sealed(), 1);
}

TEST_F(OnceTest, CallsMayOvertakeOneAnotherInsideTheWindow) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(Unary(engine.get(), 9, LeaseOp(1)).lease().blocks_size(), 1);
  EXPECT_EQ(Unary(engine.get(), 7, LeaseOp(2)).lease().blocks_size(), 2);
  EXPECT_EQ(Unary(engine.get(), 8, LeaseOp(3)).lease().blocks_size(), 3);
  EXPECT_EQ(Unary(engine.get(), 7, LeaseOp(2)).lease().blocks_size(), 2);
  EXPECT_EQ(Blocks().leased(), 7);
}

TEST_F(OnceTest, WhatIsForgottenIsRefused) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  for (uint64_t i = 1; i <= 70; ++i) engine->Step(Batch(i, {TouchOp({1})}));
  v1::StepResponse response = engine->Step(Batch(6, {LeaseOp(1)}));
  EXPECT_EQ(response.code(), kOutOfRange);
  EXPECT_EQ(response.message(), "sequence 6 is forgotten: answers through 6 are gone");
  EXPECT_EQ(engine->Step(Batch(7, {LeaseOp(1)})).code(), 0);
  v1::StepRequest acknowledging = Batch(71, {TouchOp({1})});
  acknowledging.set_acknowledged(70);
  engine->Step(acknowledging);
  EXPECT_EQ(engine->Step(Batch(70, {LeaseOp(1)})).code(), kOutOfRange);
  EXPECT_EQ(engine->Step(Batch(71, {TouchOp({1})})).results_size(), 1);
  EXPECT_EQ(Blocks().leased(), 1) << "the sink";
}

TEST_F(OnceTest, SequenceZeroIsRefused) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const v1::StepResponse response = engine->Step(Batch(0, {LeaseOp(1)}));
  EXPECT_EQ(response.code(), kInvalidArgument);
  EXPECT_EQ(response.message(), "sequence is 0; sequences start at 1");
  EXPECT_EQ(Unary(engine.get(), 0, LeaseOp(1)).message(), "call.sequence is 0; sequences start at 1");
}

TEST_F(OnceTest, AcknowledgingTheFutureForgetsNothingNew) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  v1::StepRequest request = Batch(1, {LeaseOp(1)});
  request.set_acknowledged(UINT64_MAX);
  EXPECT_EQ(engine->Step(request).code(), 0);
  EXPECT_EQ(engine->Step(Batch(2, {LeaseOp(1)})).code(), 0);
}

TEST_F(OnceTest, WhatIsParkedAndAppliedInOneBatchIsAnsweredInPlace) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  const v1::StepRequest request = Batch(5, {ReleaseOp(blocks, 1), FenceOp(1)});
  for (int time = 0; time < 2; ++time) {
    const v1::StepResponse response = engine->Step(request);
    EXPECT_FALSE(response.results(0).parked());
    EXPECT_TRUE(response.results(0).has_release());
    EXPECT_EQ(response.results(1).fence().passed(), 1);
    EXPECT_EQ(response.completions_size(), 0);
  }
}

TEST_F(OnceTest, ARepeatedBatchCarriesWhatWasCompletedMeanwhile) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  const v1::StepRequest request = Batch(5, {ReleaseOp({blocks[0]}, 1), ReleaseOp({blocks[1]}, 2)});
  v1::StepResponse response = engine->Step(request);
  EXPECT_TRUE(response.results(0).parked());
  engine->sequence = 5;
  EXPECT_EQ(engine->Fence(1), 1);
  response = engine->Step(request);
  EXPECT_FALSE(response.results(0).parked());
  EXPECT_TRUE(response.results(0).has_release());
  EXPECT_TRUE(response.results(1).parked());
  EXPECT_EQ(response.completions_size(), 0) << "told once, in place";
  engine->Fence(2);
  response = engine->Pending();
  ASSERT_EQ(response.completions_size(), 1);
  EXPECT_EQ(response.completions(0).sequence(), 5);
  EXPECT_EQ(response.completions(0).index(), 1);
}

TEST_F(OnceTest, AParkedUnaryCallThatIsRetriedIsAppliedOnceAndAnsweredTwice) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  engine->Seal(blocks, Keys("a", 1));
  engine->Do(RefOp(blocks));
  std::optional<v1::OperationResult> first, second, third;
  engine->sequence = 10;
  engine->Send(ReleaseOp(blocks, 4), &first);
  engine->sequence = 10;
  engine->Send(ReleaseOp(blocks, 4), &second);
  EXPECT_FALSE(first.has_value() || second.has_value());
  engine->Fence(4);
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ(first->release().refused_size(), 0);
  EXPECT_EQ(Blocks().sealed(), 1) << "one of two holds is left";
  engine->sequence = 10;
  engine->Send(ReleaseOp(blocks, 4), &third);
  ASSERT_TRUE(third.has_value());
  EXPECT_FALSE(third->parked());
  EXPECT_EQ(engine->Pending().completions_size(), 0) << "unary calls are no news for the stream";
}

TEST_F(OnceTest, CloseRetriedAfterALostAnswer) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  engine->Lease(3);
  EXPECT_EQ(Unary(engine.get(), 20, CloseOp()).close_session().released_blocks(), 3);
  EXPECT_EQ(Unary(engine.get(), 20, CloseOp()).close_session().released_blocks(), 3);
  const v1::OperationResult later = Unary(engine.get(), 21, LeaseOp(1));
  EXPECT_EQ(later.code(), kAborted);
  EXPECT_EQ(later.message(), "session 1 was closed by member 0");
}

TEST_F(OnceTest, TheWireSaysWhatTheAnswerSays) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto apply = [&](const v1::StepRequest& request) {
    v1::StepResponse response, read;
    std::string wire = "of the last batch";
    daemon_->Apply(engine->member, request, &response, &wire);
    EXPECT_TRUE(read.ParseFromString(wire));
    EXPECT_EQ(read.SerializeAsString(), response.SerializeAsString());
    return response;
  };
  const v1::StepResponse first = apply(Batch(1, {LeaseOp(2), FenceOp(1)}));
  EXPECT_EQ(first.results_size(), 2);
  EXPECT_EQ(first.results(0).lease().blocks_size(), 2);
  EXPECT_EQ(apply(Batch(1, {LeaseOp(2), FenceOp(1)})).results(0).lease().blocks_size(), 2) << "again";
  v1::StepRequest refused = Batch(0, {LeaseOp(1)});
  EXPECT_EQ(apply(refused).code(), kInvalidArgument);
}

// A stream writes one answer over another: nothing of the last one may show.
TEST_F(OnceTest, AnAnswerMayBeWrittenOverAnother) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  uint64_t sequence = 0;
  v1::StepResponse over;
  const auto apply = [&](std::vector<v1::Operation> operations) {
    v1::StepResponse left;
    left.mutable_results()->Swap(over.mutable_results());
    over.Clear();
    over.mutable_results()->Swap(left.mutable_results());
    daemon_->Apply(engine->member, Batch(++sequence, std::move(operations)), &over);
    return over;
  };
  const auto only_refused = [](const v1::OperationResult& result) {
    return result.code() != 0 && result.result_case() == v1::OperationResult::RESULT_NOT_SET;
  };
  const uint64_t stranger = BlockRef{BlockId{9}, 7}.Pack();
  const v1::StepResponse first =
      apply({LeaseOp(2), MatchOp(Keys("a", 2)), ReleaseOp({stranger}), LeaseOp(1)});
  const std::vector<uint64_t> blocks(first.results(0).lease().blocks().begin(),
                                     first.results(0).lease().blocks().end());
  EXPECT_EQ(first.results(2).release().refused_size(), 1);

  v1::Operation bad_match = MatchOp(Keys("a", 1));
  bad_match.mutable_match()->mutable_groups(0)->set_group(5);
  const v1::StepResponse second =
      apply({LeaseOp(0), bad_match, ReleaseOp({blocks[1]}), SealOp({blocks[0]}, Keys("a", 1)), FenceOp(1)});
  EXPECT_TRUE(only_refused(second.results(0))) << second.results(0).DebugString();
  EXPECT_TRUE(only_refused(second.results(1))) << second.results(1).DebugString();
  EXPECT_EQ(second.results(2).release().refused_size(), 0) << "refused before";
  EXPECT_EQ(second.results(3).seal().canonical(0), blocks[0]);

  const v1::StepResponse third =
      apply({LeaseOp(1), MatchOp(Keys("a", 2)), ReleaseOp({blocks[0]}, /*after=*/9), LeaseOp(1)});
  EXPECT_EQ(third.results_size(), 4);
  EXPECT_EQ(third.results(0).code(), 0);
  EXPECT_EQ(third.results(0).message(), "") << "refused before";
  EXPECT_EQ(third.results(0).lease().blocks_size(), 1);
  EXPECT_EQ(third.results(1).match().groups_size(), 1);
  EXPECT_EQ(third.results(1).match().groups(0).blocks_size(), 1);
  EXPECT_TRUE(third.results(2).parked());
  EXPECT_EQ(third.results(2).result_case(), v1::OperationResult::RESULT_NOT_SET) << "applied before";

  const v1::StepResponse fourth = apply({MatchOp(Keys("none", 1)), LeaseOp(1), ReleaseOp({blocks[0]})});
  EXPECT_EQ(fourth.results_size(), 3);
  EXPECT_EQ(fourth.results(0).match().groups(0).blocks_size(), 0);
  EXPECT_EQ(fourth.results(1).lease().blocks_size(), 1);

  daemon_->Apply(engine->member, Batch(0, {LeaseOp(1)}), &over);
  EXPECT_EQ(over.code(), kInvalidArgument);
  EXPECT_EQ(over.results_size(), 0) << "nothing of it was applied";
}

TEST(AnswerWindowTest, RepeatsResultsAndNothingElse) {
  v1::StepResponse first;
  first.set_sequence(1);
  first.add_results()->mutable_lease()->add_blocks(7);
  first.add_notices()->set_kind(v1::NOTICE_KIND_PRESSURE);
  first.add_completions()->set_sequence(1);
  first.set_free_blocks(3);
  AnswerWindow window;
  EXPECT_EQ(window.Remember(1, first), first.SerializeAsString());
  v1::StepResponse again;
  window.Replay(1, &again);
  first.clear_notices();
  first.clear_completions();
  first.clear_free_blocks();
  EXPECT_EQ(again.SerializeAsString(), first.SerializeAsString());
}

TEST(AnswerWindowTest, MemoryIsBounded) {
  AnswerWindow window;
  v1::StepResponse large;
  for (int i = 0; i < 65536; ++i) large.add_results()->mutable_lease()->add_blocks(UINT64_MAX);
  for (uint64_t i = 1; i <= 40; ++i) window.Remember(i, large);
  EXPECT_GT(window.floor(), 20) << "40 answers of a MiB do not fit";
  EXPECT_EQ(window.Look(40), AnswerWindow::Seen::kRemembered);
  v1::StepResponse answer;
  window.Replay(40, &answer);
  EXPECT_EQ(answer.results_size(), large.results_size());
  EXPECT_EQ(window.Look(1), AnswerWindow::Seen::kForgotten);
}

TEST(AnswerWindowTest, AJumpForgetsWhatIsFarBehind) {
  AnswerWindow window;
  window.Remember(1, {});
  window.Remember(UINT64_MAX, {});
  EXPECT_EQ(window.Look(1), AnswerWindow::Seen::kForgotten);
  EXPECT_EQ(window.floor(), UINT64_MAX - 64);
  EXPECT_EQ(window.Look(UINT64_MAX - 1), AnswerWindow::Seen::kNew);
  // The last sequence there is can be acknowledged too.
  window.Acknowledge(UINT64_MAX);
  EXPECT_EQ(window.Look(UINT64_MAX), AnswerWindow::Seen::kForgotten);
}

// Results of parked verbs are remembered with their batch. What a batch lets go can so push its own answer out of the
// window, if calls came out of order.
TEST_F(OnceTest, AnAnswerThatItsOwnCompletionsPushOutIsForgotten) {
  if (KVPOOL_SANITIZED) GTEST_SKIP() << "gigabytes of answers: minutes under two sanitizers";
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t stale = uint64_t{7} << 32 | 3;
  const std::vector<uint64_t> unknown(65530, stale);  // Each is refused: an answer of a MiB.
  engine->Step(Batch(2, {ReleaseOp(unknown, 1)}));
  for (uint64_t i = 3; i < 60; ++i) engine->Step(Batch(i, {ReleaseOp(unknown)}));
  const v1::StepResponse fenced = engine->Step(Batch(1, {FenceOp(1)}));
  EXPECT_TRUE(fenced.code() == kOutOfRange || fenced.results_size() == 1) << fenced.message();
  EXPECT_EQ(engine->Step(Batch(1, {FenceOp(1)})).code(), kOutOfRange);
  EXPECT_EQ(Unary(engine.get(), 60, LeaseOp(1)).lease().blocks_size(), 1) << "the daemon goes on";
}

TEST_F(OnceTest, AUnaryCallThatItsOwnCompletionsPushOutIsAnswered) {
  if (KVPOOL_SANITIZED) GTEST_SKIP() << "gigabytes of answers: minutes under two sanitizers";
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> unknown(65530, uint64_t{7} << 32 | 3);
  uint64_t last = 2;
  engine->Step(Batch(last, {ReleaseOp(unknown, 1)}));
  // Just below the bound, so that the completion of the first is what crosses it.
  while (engine->member->answers.floor() == 0) {
    engine->Step(Batch(++last, {ReleaseOp(unknown)}));
    ASSERT_LT(last, 60);
  }
  const uint64_t below = last - 1;
  const auto twin = OpenEngine(OpenRequest());
  twin->Step(Batch(2, {ReleaseOp(unknown, 1)}));
  for (uint64_t i = 3; i <= below; ++i) twin->Step(Batch(i, {ReleaseOp(unknown)}));
  ASSERT_EQ(twin->member->answers.floor(), 0);
  EXPECT_EQ(Unary(twin.get(), 1, FenceOp(1)).code(), 0);
  EXPECT_GT(twin->member->answers.floor(), 0) << "it was pushed out while it was applied";
  EXPECT_EQ(Unary(twin.get(), 1, FenceOp(1)).code(), kOutOfRange);
}

TEST_F(OnceTest, AllMembersTogetherHaveABound) {
  StartDaemon(4);
  Unacknowledged others;
  others.Add(Unacknowledged::kMaxBytesOfAll + 1);
  const auto late = OpenEngine(OpenRequest());
  const std::vector<uint64_t> unknown(65530, uint64_t{7} << 32 | 3);
  const size_t before = Unacknowledged::bytes_of_all();
  for (uint64_t i = 1; i <= 10; ++i) late->Step(Batch(i, {ReleaseOp(unknown)}));
  EXPECT_LT(Unacknowledged::bytes_of_all() - before, 4 << 20) << "it keeps its newest answers only";
  EXPECT_GT(late->member->answers.floor(), 5);
  EXPECT_EQ(late->Step(Batch(10, {ReleaseOp(unknown)})).results_size(), 1);
  others.Subtract(others.bytes());
  for (uint64_t i = 11; i <= 20; ++i) late->Step(Batch(i, {ReleaseOp(unknown)}));
  EXPECT_LE(late->member->answers.floor(), 10) << "there is room again";
}

}  // namespace
}  // namespace kvpool
