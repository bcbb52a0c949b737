// Verbs that take or answer more than they name: episodes, plans of budgets, refusals in words. They count as work, and
// answers have a bound.
#include <gmock/gmock.h>

#include <numeric>
#include <set>
#include <thread>

#include "server/space/answer_room.h"
#include "server/space/call_work.h"
#include "server/space/unacknowledged.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

// More than four parts, and the last is not whole.
constexpr uint32_t kBlocks = 4 * Turn::kNames + 100;
// Of an episode of so many blocks, as many choices fit into one answer.
constexpr int kChoicesOfAnswer = static_cast<int>(AnswerRoom::kMaxBytes / (kBlocks * sizeof(uint64_t)));
// gRPC's default, with which a client may read answers.
constexpr size_t kMostRead = 4 << 20;

v1::Operation PutOp(const std::string& name, const Refs& blocks, const std::vector<float>& centroid = {1}) {
  v1::Operation operation;
  v1::PutEpisode* put = operation.mutable_put_episode();
  put->set_name(name);
  if (blocks.empty()) return operation;
  put->mutable_centroid()->Add(centroid.begin(), centroid.end());
  put->add_sequences()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  return operation;
}

v1::Operation ChooseOp(const std::string& name, uint64_t after = 0) {
  v1::Operation operation;
  operation.set_after(after);
  operation.mutable_choose_episode()->set_name(name);
  return operation;
}

v1::Operation PlanOp(uint32_t layers, uint64_t after = 0) {
  v1::Operation operation;
  operation.set_after(after);
  operation.mutable_plan_budgets()->set_method(v1::BUDGET_METHOD_PYRAMID);
  operation.mutable_plan_budgets()->set_tokens_per_layer(uint64_t{1} << 39);
  operation.mutable_plan_budgets()->set_layers(layers);
  return operation;
}

class LargeAnswersTest : public ServiceTest {
 protected:
  void SetUp() override {
    options_.slab_bytes = 8192 * kBlockBytes;
    StartDaemon(8192 / kSlabBlocks);
    engine_ = OpenEngine(OpenRequest());
    blocks_ = engine_->Lease(kBlocks);
    ASSERT_EQ(blocks_.size(), kBlocks);
  }
  // How often the mutex of the space was taken.
  uint64_t Holds() {
    const std::vector<uint64_t> counts = daemon_->Snapshot().spaces.at(0).hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  }
  void Put(const std::string& name, const Refs& blocks) {
    const v1::OperationResult put = engine_->Do(PutOp(name, blocks));
    ASSERT_EQ(put.code(), 0) << put.message();
  }
  // So many holds on each block, and no more, which are given back.
  void ExpectHolds(int holds) {
    for (int i = 0; i < holds; ++i) EXPECT_EQ(engine_->Release(blocks_).refused_size(), 0) << i;
    EXPECT_EQ(engine_->Release(blocks_).refused_size(), static_cast<int>(kBlocks));
  }

  std::unique_ptr<Engine> engine_;
  Refs blocks_;
};

// ----------------------------------------------------------------------------------------------- episodes

TEST_F(LargeAnswersTest, AnEpisodeIsPutChosenAndReplacedInParts) {
  uint64_t before = Holds();
  Put("one", blocks_);
  EXPECT_GE(Holds() - before, 8u) << "its blocks are looked at, and then held";
  before = Holds();
  const v1::OperationResult chosen = engine_->Do(ChooseOp("one"));
  ASSERT_EQ(chosen.code(), 0) << chosen.message();
  EXPECT_GE(Holds() - before, 4u);
  const auto& table = chosen.choose_episode().sequences(0).blocks();
  EXPECT_EQ(Refs(table.begin(), table.end()), blocks_);
  before = Holds();
  const v1::OperationResult removed = engine_->Do(PutOp("one", {}));
  EXPECT_EQ(removed.put_episode().released(), kBlocks);
  EXPECT_GE(Holds() - before, 4u);
  ExpectHolds(2);
}

// Refused in its last part: what the first ones took is given back.
TEST_F(LargeAnswersTest, AnEpisodeIsHeldWholeOrNotAtAll) {
  Put("one", blocks_);
  const uint64_t last = blocks_.back();
  ASSERT_EQ(engine_->Do(RefOp(Refs(65535 - 2, last))).ref().refused_size(), 0);
  const v1::OperationResult chosen = engine_->Do(ChooseOp("one"));
  EXPECT_EQ(chosen.code(), kResourceExhausted);
  EXPECT_NE(chosen.message().find("is held 65535 times by session 1, the limit"), std::string::npos);
  const v1::OperationResult put = engine_->Do(PutOp("two", blocks_));
  EXPECT_EQ(put.code(), kResourceExhausted);
  EXPECT_EQ(engine_->Do(PutOp("one", {})).put_episode().released(), kBlocks);
  ASSERT_EQ(engine_->Release(Refs(65535 - 2, last)).refused_size(), 0);
  ExpectHolds(1);
}

TEST_F(LargeAnswersTest, ASessionEndsInTheMiddleOfAChoice) {
  for (int round = 0; round < 20; ++round) {
    const auto engine = OpenEngine(OpenRequest(), "other");
    const Refs blocks = engine->Lease(3000);
    ASSERT_EQ(blocks.size(), 3000u);
    ASSERT_EQ(engine->Do(PutOp("one", blocks)).code(), 0);
    std::vector<v1::Operation> operations;
    for (int i = 0; i < 4; ++i) {
      operations.push_back(ChooseOp("one"));
      operations.push_back(PutOp("one", blocks));
    }
    std::thread other([&] {
      for (int i = 0; i < round * 4; ++i) std::this_thread::yield();
      engine->Die();
    });
    const v1::StepResponse response = engine->Step(std::move(operations));
    other.join();
    for (const v1::OperationResult& result : response.results()) {
      EXPECT_TRUE(result.code() == 0 || result.code() == kAborted) << result.message();
    }
    for (int i = 0; i < 10; ++i) daemon_->HousekeepOnce();
    EXPECT_EQ(Blocks().leased(), kBlocks + 1) << "those of the first session and its sink";
    EXPECT_EQ(Blocks().quarantined(), 0);
  }
}

TEST_F(LargeAnswersTest, AChoiceThatTheAnswerHasNoRoomForIsRefused) {
  Put("one", blocks_);
  v1::StepRequest request;
  request.set_sequence(++engine_->sequence);
  constexpr int kChoices = 1000;
  for (int i = 0; i < kChoices; ++i) *request.add_operations() = ChooseOp("one");
  const v1::StepResponse response = engine_->Step(request);
  EXPECT_LT(response.ByteSizeLong(), AnswerRoom::kMaxBytes + kChoices * 200);
  for (int i = 0; i < kChoices; ++i) {
    ASSERT_EQ(response.results(i).code(), i < kChoicesOfAnswer ? 0 : kResourceExhausted) << i;
  }
  EXPECT_THAT(
      response.results(kChoicesOfAnswer).message(),
      testing::MatchesRegex("choose_episode: a result of [0-9]+ bytes beside [0-9]+ of others in the same "
                            "answer; limit 1048576"));
  v1::StepResponse again = engine_->Step(request);
  again.clear_notices();
  EXPECT_EQ(again.results_size(), kChoices);
  EXPECT_EQ(again.results(0).choose_episode().sequences(0).blocks_size(), static_cast<int>(kBlocks));
  EXPECT_EQ(again.results(kChoicesOfAnswer).code(), kResourceExhausted);
  EXPECT_EQ(engine_->Do(ChooseOp("one")).code(), 0) << "the next answer has room";
  ASSERT_EQ(engine_->Do(PutOp("one", {})).code(), 0);
  ExpectHolds(1 + kChoicesOfAnswer + 1);
}

// What was parked by a batch and is applied in it comes in its answer as far as there is room, and then as completions.
TEST_F(LargeAnswersTest, ParkedChoicesComeInSeveralAnswers) {
  Put("one", blocks_);
  constexpr int kChoices = 3 * kChoicesOfAnswer;
  v1::StepRequest request;
  request.set_sequence(++engine_->sequence);
  for (int i = 0; i < kChoices; ++i) *request.add_operations() = ChooseOp("one", /*after=*/1);
  *request.add_operations() = FenceOp(1);
  std::set<uint32_t> chosen;
  const auto take = [&](uint32_t index, const v1::OperationResult& result) {
    ASSERT_EQ(result.code(), 0) << result.message();
    EXPECT_EQ(result.choose_episode().sequences(0).blocks_size(), static_cast<int>(kBlocks));
    EXPECT_TRUE(chosen.insert(index).second) << "answered twice";
  };
  // The answer is lost, again and again, and then the stream.
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(engine_->member, listener);
  for (int time = 0; time < 3; ++time) {
    const v1::StepResponse lost = engine_->Step(request);
    EXPECT_LT(lost.ByteSizeLong(), kMostRead);
    EXPECT_FALSE(lost.results(0).parked());
    EXPECT_TRUE(lost.results(kChoices - 1).parked());
    daemon_->BindStream(engine_->member, std::make_shared<FakeListener>());
  }
  const v1::StepResponse response = engine_->Step(request);
  EXPECT_LT(response.ByteSizeLong(), kMostRead);
  for (int i = 0; i < kChoices; ++i) {
    if (!response.results(i).parked()) take(static_cast<uint32_t>(i), response.results(i));
  }
  v1::StepResponse part = response;
  do {
    for (const v1::Completion& completion : part.completions()) {
      EXPECT_EQ(completion.sequence(), request.sequence());
      take(completion.index(), completion.result());
    }
    part = engine_->Pending();
    EXPECT_LT(part.ByteSizeLong(), kMostRead);
  } while (part.completions_size() > 0);
  EXPECT_EQ(chosen.size(), static_cast<size_t>(kChoices));
  ASSERT_EQ(engine_->Do(PutOp("one", {})).code(), 0);
  ExpectHolds(1 + kChoices);
}

TEST_F(LargeAnswersTest, AParkedChoiceIsRefusedBeyondWhatMayBeUnacknowledged) {
  Put("one", blocks_);
  const std::vector<v1::Operation> choices(20, ChooseOp("one", /*after=*/1));
  const v1::StepResponse parked = engine_->Step(choices);
  for (const v1::OperationResult& result : parked.results()) ASSERT_TRUE(result.parked());
  Unacknowledged others;
  others.Add(Unacknowledged::kMaxBytesOfAll + 1);
  engine_->Step({FenceOp(1)});
  EXPECT_LE(engine_->member->completions.bytes().bytes(), Unacknowledged::kSmallBytes + 20 * 200);
  int taken = 0, refused = 0;
  const auto count = [&](const v1::StepResponse& response) {
    for (const v1::Completion& completion : response.completions()) {
      if (completion.result().code() == 0) {
        ++taken;
        continue;
      }
      ++refused;
      EXPECT_EQ(completion.result().code(), kResourceExhausted);
      EXPECT_THAT(
          completion.result().message(),
          testing::MatchesRegex("choose_episode: a result of [0-9]+ bytes beside [0-9]+ of completions that "
                                "have not been acknowledged; limit 262144"));
    }
    return response.completions_size() > 0;
  };
  daemon_->BindStream(engine_->member, std::make_shared<FakeListener>());
  while (count(engine_->Pending())) {
  }
  EXPECT_EQ(taken, static_cast<int>(Unacknowledged::kSmallBytes / (kBlocks * sizeof(uint64_t))));
  EXPECT_EQ(taken + refused, 20);
  ASSERT_EQ(engine_->Do(PutOp("one", {})).code(), 0);
  ExpectHolds(1 + taken);
}

TEST_F(LargeAnswersTest, CentroidsCountAsWork) {
  const std::vector<float> centroid(4096, 0.5f);
  std::vector<v1::Operation> puts;
  for (int i = 0; i < 64; ++i) puts.push_back(PutOp("episode" + std::to_string(i), {blocks_[0]}, centroid));
  uint64_t before = Holds();
  const v1::StepResponse put = engine_->Step(puts);
  for (const v1::OperationResult& result : put.results()) EXPECT_EQ(result.code(), 0);
  EXPECT_GE(Holds() - before, 64u);
  v1::Operation question;
  question.mutable_choose_episode()->mutable_embedding()->Add(centroid.begin(), centroid.end());
  before = Holds();
  engine_->Step(std::vector<v1::Operation>(16, question));
  EXPECT_GE(Holds() - before, 16u);
}

// --------------------------------------------------------------------------------------------------- plans

TEST_F(LargeAnswersTest, PlansCountAsWorkAndHaveABound) {
  const uint64_t before = Holds();
  constexpr int kPlans = 4096;
  const v1::StepResponse response = engine_->Step(std::vector<v1::Operation>(kPlans, PlanOp(1024)));
  EXPECT_GE(Holds() - before, static_cast<uint64_t>(kPlans));
  EXPECT_LT(response.ByteSizeLong(), kMostRead);
  ASSERT_EQ(response.results(0).code(), 0) << response.results(0).message();
  const size_t each = response.results(0).plan_budgets().ByteSizeLong();
  const int fit = static_cast<int>(AnswerRoom::kMaxBytes / each);
  EXPECT_EQ(response.results(fit - 1).plan_budgets().budget_tokens_size(), 1024);
  for (int i = fit; i < kPlans; ++i) {
    ASSERT_EQ(response.results(i).code(), kResourceExhausted);
    EXPECT_FALSE(response.results(i).has_plan_budgets());
  }
  EXPECT_THAT(response.results(fit).message(), testing::StartsWith("plan_budgets: a result of "));
}

TEST_F(LargeAnswersTest, ParkedPlansCountAsWork) {
  for (int i = 0; i < 4; ++i) {
    const v1::StepResponse parked = engine_->Step(std::vector<v1::Operation>(100, PlanOp(1024, /*after=*/1)));
    for (const v1::OperationResult& result : parked.results()) ASSERT_TRUE(result.parked());
  }
  const uint64_t before = Holds();
  engine_->Step({FenceOp(1)});
  EXPECT_GE(Holds() - before, 400u);
}

TEST_F(LargeAnswersTest, ParametersThatErrorsQuoteAreShort) {
  v1::Operation plan = PlanOp(4);
  (*plan.mutable_plan_budgets()->mutable_params())[std::string(257, 'x')] = "1";
  EXPECT_EQ(engine_->Do(plan).message(), "a name in plan_budgets.params has 257 bytes; must have 1 to 256");
  plan = PlanOp(4);
  (*plan.mutable_plan_budgets()->mutable_params())["beta"] = std::string(257, '1');
  EXPECT_EQ(engine_->Do(plan).message(), "a value in plan_budgets.params has 257 bytes; must have 0 to 256");
}

// ------------------------------------------------------------------------------------------------ refusals

TEST_F(LargeAnswersTest, RefusalsOfABatchInWordsHaveABound) {
  const Refs stale(64, BlockRef{BlockId{9}, 4000000000}.Pack());
  const v1::StepResponse response = engine_->Step(std::vector<v1::Operation>(1024, ReleaseOp(stale)));
  int explained = 0;
  for (const v1::OperationResult& result : response.results()) {
    ASSERT_EQ(result.release().refused_size(), 64);
    for (const v1::Refusal& refusal : result.release().refused()) {
      EXPECT_EQ(refusal.code(), kFailedPrecondition);
      explained += refusal.message().empty() ? 0 : 1;
    }
  }
  EXPECT_EQ(explained, 4096);
  EXPECT_LT(response.ByteSizeLong(), 2u << 20);
  EXPECT_NE(engine_->Release(stale).refused(0).message(), "") << "another batch has words of its own";
}

TEST_F(LargeAnswersTest, OperationsThatNameNothingCountAsWork) {
  const uint64_t before = Holds();
  engine_->Step(std::vector<v1::Operation>(4096, ChooseOp("none")));
  EXPECT_GE(Holds() - before, 15u);
}

// ------------------------------------------------------------------------------------- where it is applied

TEST_F(LargeAnswersTest, AnEpisodeIsAsMuchWorkAsItsBlocks) {
  const Session& session = *engine_->member->session;
  EXPECT_LT(WorkOf(session, ChooseOp("one")), 100u);
  Put("one", blocks_);
  Put("two", {blocks_[0]});
  EXPECT_GE(WorkOf(session, ChooseOp("two")), kBlocks) << "which one it will be is not known";
  EXPECT_GE(WorkOf(session, PutOp("one", {})), kBlocks);
  ASSERT_EQ(engine_->Do(PutOp("one", {})).code(), 0);
  EXPECT_LT(WorkOf(session, ChooseOp("one")), 100u);
  EXPECT_GE(WorkOf(session, PlanOp(1024)), 1024u);
  v1::StepRequest batch;
  for (int i = 0; i < 8; ++i) *batch.add_operations() = PlanOp(1024);
  EXPECT_GE(WorkOf(session, batch), 8 * 1024u);
}

}  // namespace
}  // namespace kvpool
