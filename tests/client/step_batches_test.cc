#include "client/session/step_batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/session/refusals.h"

namespace kvpool {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

BlockRef Block(uint32_t id) { return {BlockId{id}, 1}; }

// A StepBatches whose daemon is the test. The magazine keeps nothing, so that batches hold only what the test
// puts in.
class StepBatchesTest : public ::testing::Test {
 protected:
  void SetUp() override { batches_.StartStream(); }

  std::shared_ptr<AnswerState> Say(Command::Verb verb, std::vector<BlockRef> blocks, uint64_t after = 0,
                                   const ReleaseHint& hint = {}) {
    Command* command = commands_.Vacant();
    EXPECT_NE(command, nullptr);
    command->verb = verb;
    command->after = after;
    command->hint = hint;
    command->blocks = std::move(blocks);
    command->groups.clear();
    command->keys.clear();
    if (verb == Command::Verb::kMatch || verb == Command::Verb::kSeal) {
      command->groups.push_back({.group = 0, .key_bytes = 4, .count = 1});
      command->keys = "key1";
    }
    auto answer = std::make_shared<AnswerState>();
    answer->sealed = command->blocks;
    command->answer = answer;
    commands_.Publish();
    return answer;
  }
  static v1::StepResponse Answer(const v1::StepRequest& request) {
    v1::StepResponse response;
    response.set_sequence(request.sequence());
    for (int i = 0; i < request.operations_size(); ++i) response.add_results();
    return response;
  }
  v1::StepRequest Next() {
    const v1::StepRequest* request = batches_.Next();
    EXPECT_NE(request, nullptr);
    return request == nullptr ? v1::StepRequest() : *request;
  }
  // Skips the batch that introduces the member.
  void Introduce() {
    v1::StepResponse response = Answer(Next());
    batches_.OnResponse(&response);
  }

  CommandRing commands_;
  Magazine magazine_{1000, 0};
  SessionState state_;
  StepBatches batches_{{.commands = &commands_,
                        .magazine = &magazine_,
                        .state = &state_,
                        .on_notice = {},
                        .member_token = "token"}};
};

TEST_F(StepBatchesTest, TheFirstBatchNamesTheMember) {
  const v1::StepRequest first = Next();
  EXPECT_EQ(first.member_token(), "token");
  EXPECT_EQ(first.sequence(), 1u);
  EXPECT_EQ(first.operations_size(), 0);
  EXPECT_FALSE(batches_.HasWork());
  EXPECT_EQ(batches_.Next(), nullptr);
  Say(Command::Verb::kTouch, {Block(1)});
  EXPECT_EQ(Next().member_token(), "");
}

// A daemon that knows nothing of reports would refuse the batch.
TEST_F(StepBatchesTest, ReportsGoToWhoTakesThem) {
  Introduce();
  state_.prefills.Add(10, 5, 99);
  Say(Command::Verb::kTouch, {Block(1)});
  EXPECT_EQ(Next().prefills_size(), 0);
  v1::StepResponse said;
  said.set_takes_prefills(true);
  batches_.OnResponse(&said);
  EXPECT_FALSE(batches_.HasWork()) << "they travel with others";
  Say(Command::Verb::kTouch, {Block(1)});
  const v1::StepRequest told = Next();
  ASSERT_EQ(told.prefills_size(), 1);
  EXPECT_EQ(told.prefills(0).tokens(), 10u);
  EXPECT_EQ(told.prefills(0).tokens_before(), 5u);
  EXPECT_EQ(told.prefills(0).microseconds(), 99u);
  Say(Command::Verb::kTouch, {Block(1)});
  EXPECT_EQ(Next().prefills_size(), 0) << "once";
  // The next daemon may be an older one, and gets the same batches.
  batches_.StartStream();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Next().prefills_size(), 0) << i;
  state_.prefills.Add(10, 5, 99);
  Say(Command::Verb::kTouch, {Block(1)});
  EXPECT_EQ(Next().prefills_size(), 0);
}

TEST_F(StepBatchesTest, OfManyReportsTheLastAreTold) {
  Introduce();
  v1::StepResponse said;
  said.set_takes_prefills(true);
  batches_.OnResponse(&said);
  for (uint64_t i = 1; i <= 100; ++i) state_.prefills.Add(i, 0, 1);
  Say(Command::Verb::kTouch, {Block(1)});
  const v1::StepRequest told = Next();
  ASSERT_EQ(told.prefills_size(), 64);
  EXPECT_EQ(told.prefills(0).tokens(), 37u);
  EXPECT_EQ(told.prefills(63).tokens(), 100u);
}

TEST_F(StepBatchesTest, NeighbouringReleasesAreOneOperation) {
  Introduce();
  Say(Command::Verb::kRelease, {Block(1), Block(2)});
  Say(Command::Verb::kRelease, {Block(3)});
  Say(Command::Verb::kRelease, {Block(4)}, /*after=*/7);
  const v1::StepRequest request = Next();
  ASSERT_EQ(request.operations_size(), 2);
  EXPECT_THAT(request.operations(0).release().blocks(),
              ElementsAre(Block(1).Pack(), Block(2).Pack(), Block(3).Pack()));
  EXPECT_EQ(request.operations(1).after(), 7u);
}

TEST_F(StepBatchesTest, ReleasesWithOtherHintsAreNot) {
  Introduce();
  const ReleaseHint hints[] = {
      {}, {.category = 3}, {.category = 3}, {.reuse = v1::REUSE_NEVER, .category = 3}, {}};
  for (uint32_t i = 0; i < 5; ++i) Say(Command::Verb::kRelease, {Block(i + 1)}, /*after=*/0, hints[i]);
  const v1::StepRequest request = Next();
  ASSERT_EQ(request.operations_size(), 4);
  EXPECT_EQ(request.operations(0).release().category(), 0u);
  EXPECT_EQ(request.operations(1).release().category(), 3u);
  EXPECT_EQ(request.operations(1).release().reuse(), v1::REUSE_UNSPECIFIED);
  EXPECT_THAT(request.operations(1).release().blocks(), ElementsAre(Block(2).Pack(), Block(3).Pack()));
  EXPECT_EQ(request.operations(2).release().reuse(), v1::REUSE_NEVER);
  EXPECT_EQ(request.operations(3).release().reuse(), v1::REUSE_UNSPECIFIED);
}

TEST_F(StepBatchesTest, AFenceGoesFirst) {
  Introduce();
  Say(Command::Verb::kRelease, {Block(1)}, /*after=*/3);
  state_.completed_step = 3;
  const v1::StepRequest request = Next();
  ASSERT_EQ(request.operations_size(), 2);
  EXPECT_EQ(request.operations(0).fence().step(), 3u);
  v1::StepResponse response = Answer(request);
  response.mutable_results(0)->mutable_fence()->set_passed(2);
  batches_.OnResponse(&response);
  EXPECT_EQ(state_.passed_step, 2u);
}

TEST_F(StepBatchesTest, SixteenBatchesAtMostAreUnanswered) {
  for (size_t i = 0; i < StepBatches::kUnansweredBatches; ++i) {
    Say(Command::Verb::kTouch, {Block(1)});
    Next();
  }
  Say(Command::Verb::kTouch, {Block(1)});
  EXPECT_FALSE(batches_.HasWork());
  EXPECT_EQ(batches_.Next(), nullptr);
  v1::StepResponse response;
  response.set_sequence(1);
  batches_.OnResponse(&response);
  EXPECT_EQ(Next().sequence(), 17u);
}

TEST_F(StepBatchesTest, ABrokenStreamIsToldAgainWithTheSameNumbers) {
  Introduce();
  const auto lost = Say(Command::Verb::kMatch, {});
  const v1::StepRequest first = Next();
  Say(Command::Verb::kTouch, {Block(5)});
  const v1::StepRequest second = Next();
  Say(Command::Verb::kTouch, {Block(6)});

  batches_.StartStream();
  const v1::StepRequest again = Next();
  EXPECT_EQ(again.sequence(), first.sequence());
  EXPECT_EQ(again.member_token(), "token");
  EXPECT_EQ(again.operations(0).match().groups(0).keys(), "key1");
  EXPECT_EQ(Next().sequence(), second.sequence());
  EXPECT_EQ(Next().operations(0).touch().blocks(0), Block(6).Pack());
  EXPECT_EQ(lost->phase, AnswerState::kWaiting);
  v1::StepResponse response = Answer(again);
  response.mutable_results(0)->mutable_match()->set_tokens(16);
  batches_.OnResponse(&response);
  EXPECT_EQ(lost->phase, AnswerState::kReady);
  EXPECT_EQ(lost->result.match().tokens(), 16u);
}

TEST_F(StepBatchesTest, HoldsOfAnAbandonedMatchGoBack) {
  Introduce();
  const auto answer = Say(Command::Verb::kMatch, {});
  v1::StepResponse response = Answer(Next());
  answer->phase = AnswerState::kAbandoned;
  v1::GroupHit& hit = *response.mutable_results(0)->mutable_match()->add_groups();
  hit.add_blocks(0);
  hit.add_blocks(Block(9).Pack());
  batches_.OnResponse(&response);
  EXPECT_THAT(Next().operations(0).release().blocks(), ElementsAre(Block(9).Pack()));
}

TEST_F(StepBatchesTest, AnAbandonedSealReturnsOnlyTheDuplicates) {
  Introduce();
  const auto answer = Say(Command::Verb::kSeal, {Block(1), Block(2)});
  v1::StepResponse response = Answer(Next());
  answer->phase = AnswerState::kAbandoned;
  response.mutable_results(0)->mutable_seal()->add_canonical(Block(1).Pack());
  response.mutable_results(0)->mutable_seal()->add_canonical(Block(77).Pack());
  batches_.OnResponse(&response);
  EXPECT_THAT(Next().operations(0).release().blocks(), ElementsAre(Block(77).Pack()));
}

TEST_F(StepBatchesTest, AParkedVerbIsAnsweredByItsCompletion) {
  Introduce();
  const auto answer = Say(Command::Verb::kSeal, {Block(1)}, /*after=*/4);
  const v1::StepRequest request = Next();
  v1::StepResponse response = Answer(request);
  response.mutable_results(0)->set_parked(true);
  batches_.OnResponse(&response);
  EXPECT_EQ(answer->phase, AnswerState::kWaiting);
  v1::StepResponse later;
  v1::Completion& completion = *later.add_completions();
  completion.set_sequence(request.sequence());
  completion.mutable_result()->mutable_seal()->add_canonical(Block(1).Pack());
  batches_.OnResponse(&later);
  EXPECT_EQ(answer->phase, AnswerState::kReady);
  EXPECT_THAT(answer->result.seal().canonical(), SizeIs(1));
}

// The batch's answer was lost with the stream; by the time it is sent again its parked verb has been applied.
TEST_F(StepBatchesTest, ACompletionMayComeBeforeTheRepeatedAnswer) {
  Introduce();
  const auto answer = Say(Command::Verb::kSeal, {Block(1)}, /*after=*/4);
  Next();
  batches_.StartStream();
  const v1::StepRequest again = Next();
  v1::StepResponse response = Answer(again);
  response.mutable_results(0)->set_parked(true);
  v1::Completion& completion = *response.add_completions();
  completion.set_sequence(again.sequence());
  completion.mutable_result()->mutable_seal()->add_canonical(Block(1).Pack());
  completion.mutable_result()->mutable_seal()->add_refused()->set_message("stale");
  // A daemon that is asked again says again what it has said.
  v1::StepResponse more;
  *more.add_completions() = completion;
  *response.add_completions() = completion;
  batches_.OnResponse(&response);
  EXPECT_EQ(answer->phase, AnswerState::kReady);
  EXPECT_THAT(answer->result.seal().canonical(), SizeIs(1));
  const uint64_t refused = state_.refused;
  EXPECT_EQ(refused, 1u);
  // Nothing waits for it any more.
  batches_.OnResponse(&more);
  EXPECT_EQ(state_.refused, refused);
}

TEST_F(StepBatchesTest, ARefusedBatchAnswersAllItsOperations) {
  Introduce();
  const auto answer = Say(Command::Verb::kMatch, {});
  v1::StepResponse response;
  response.set_sequence(Next().sequence());
  response.set_code(3);
  response.set_message("no");
  batches_.OnResponse(&response);
  EXPECT_EQ(answer->phase, AnswerState::kReady);
  EXPECT_EQ(answer->status, absl::InvalidArgumentError("no"));
}

// The daemon may have applied the batch and forgotten it: what this end knows about blocks may be wrong.
TEST_F(StepBatchesTest, ABatchWhoseAnswerIsLostDetaches) {
  Introduce();
  const auto lost = Say(Command::Verb::kSeal, {Block(1)});
  Next();
  const auto later = Say(Command::Verb::kMatch, {});
  batches_.StartStream();
  v1::StepResponse response;
  response.set_sequence(Next().sequence());
  response.set_code(static_cast<int>(absl::StatusCode::kOutOfRange));
  response.set_message("sequence 2 is forgotten: answers through 66 are gone");
  batches_.OnResponse(&response);
  EXPECT_EQ(lost->phase, AnswerState::kReady);
  EXPECT_EQ(lost->status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_FALSE(state_.open);
  const absl::Status detached = state_.status();
  EXPECT_EQ(detached, absl::UnavailableError(
                          "detached: the daemon has lost the answer to batch 2, and what became of it is not "
                          "known (sequence 2 is forgotten: answers through 66 are gone)"));
  batches_.Abort(detached);
  EXPECT_EQ(later->status, detached);
}

TEST_F(StepBatchesTest, AbortAnswersAllThatWaits) {
  Introduce();
  const auto sent = Say(Command::Verb::kMatch, {});
  const auto parked = Say(Command::Verb::kSeal, {Block(1)}, /*after=*/4);
  v1::StepResponse response = Answer(Next());
  response.mutable_results(1)->set_parked(true);
  response.mutable_results(0)->mutable_match();
  batches_.OnResponse(&response);
  const auto flying = Say(Command::Verb::kMatch, {});
  Next();
  const auto queued = Say(Command::Verb::kFlush, {});
  batches_.Abort(absl::UnavailableError("gone"));
  EXPECT_TRUE(sent->status.ok());
  for (const auto& answer : {parked, flying, queued}) {
    EXPECT_EQ(answer->phase, AnswerState::kReady);
    EXPECT_EQ(answer->status, absl::UnavailableError("gone"));
  }
}

// A match that was sent is sent again, and what it finds goes back; one that was not sent never is.
TEST_F(StepBatchesTest, MatchesThatAreLetGoFindNothingWhetherSentOrNot) {
  Introduce();
  const auto sent = Say(Command::Verb::kMatch, {});
  const v1::StepRequest request = Next();
  state_.match_keys_pending = 3;
  const auto first = Say(Command::Verb::kMatch, {});
  const auto seal = Say(Command::Verb::kSeal, {Block(1)});
  const auto second = Say(Command::Verb::kMatch, {});
  batches_.LetMatchesGo();
  for (const auto& match : {sent, first, second}) {
    EXPECT_EQ(match->phase, AnswerState::kReady);
    EXPECT_TRUE(match->status.ok());
    ASSERT_THAT(match->result.match().groups(), SizeIs(1));
    EXPECT_THAT(match->result.match().groups(0).blocks(), SizeIs(0));
    EXPECT_EQ(match->result.match().miss(), v1::MISS_REASON_GROWING);
  }
  EXPECT_EQ(seal->phase, AnswerState::kWaiting);
  EXPECT_EQ(state_.match_keys_pending, 1u) << "that of the one that was sent";

  batches_.StartStream();
  EXPECT_EQ(Next().sequence(), request.sequence());
  const v1::StepRequest next = Next();
  ASSERT_EQ(next.operations_size(), 1);
  EXPECT_TRUE(next.operations(0).has_seal());
  v1::StepResponse response = Answer(request);
  response.mutable_results(0)->mutable_match()->add_groups()->add_blocks(Block(9).Pack());
  batches_.OnResponse(&response);
  EXPECT_EQ(state_.match_keys_pending, 0u);
  EXPECT_THAT(Next().operations(0).release().blocks(), ElementsAre(Block(9).Pack()));
}

TEST_F(StepBatchesTest, NoticesMoveTheState) {
  v1::StepResponse response;
  v1::Notice& pressure = *response.add_notices();
  pressure.set_kind(v1::NOTICE_KIND_PRESSURE);
  pressure.set_on(true);
  v1::Notice& ended = *response.add_notices();
  ended.set_kind(v1::NOTICE_KIND_ENDED);
  ended.set_on(true);
  ended.set_detail("an operator said so");
  batches_.OnResponse(&response);
  EXPECT_TRUE(state_.pressure);
  EXPECT_EQ(state_.status(), absl::AbortedError("an operator said so"));
}

// Large commands split over batches, each within what the daemon takes.
TEST_F(StepBatchesTest, BatchesStayWithinTheDaemonsLimits) {
  Introduce();
  const std::vector<BlockRef> many(StepBatches::kBatchNames / 2, Block(1));
  Say(Command::Verb::kTouch, many);
  Say(Command::Verb::kTouch, many);
  EXPECT_EQ(Next().operations_size(), 1);
  EXPECT_EQ(Next().operations_size(), 1);
}

// ---- Refusals: each is heard by the caller, recorded, or ends the session.

v1::OperationResult RefusedAsAWhole() {
  v1::OperationResult result;
  result.set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  result.set_message("too much is parked");
  return result;
}

using Verb = v1::Operation::VerbCase;

// One operation of the verb, as a session sends it. The sessions of several tell one state what became of them.
class OneOperation {
 public:
  static constexpr uint64_t kBlocks = 3;

  OneOperation(const google::protobuf::FieldDescriptor& verb, SessionState* state)
      : magazine_(1000, verb.number() == v1::Operation::kLease ? 4 : 0),
        batches_({.commands = &commands_,
                  .magazine = &magazine_,
                  .state = state,
                  .on_notice = {},
                  .member_token = "token"}) {
    batches_.StartStream();
    if (verb.number() == v1::Operation::kFence) ++state->completed_step;
    if (verb.number() != v1::Operation::kFence && verb.number() != v1::Operation::kLease) Say(verb, state);
    response_.set_sequence(batches_.Next()->sequence());
    response_.add_results();
  }

  v1::OperationResult* result() { return response_.mutable_results(0); }
  // The daemon answers: `later`, that the operation is parked, and its result as a completion.
  void Answer(bool later) {
    if (later) {
      v1::Completion* completion = completions_.add_completions();
      completion->set_sequence(response_.sequence());
      completion->mutable_result()->Swap(result());
      result()->set_parked(true);
    }
    batches_.OnResponse(&response_);
    if (later) batches_.OnResponse(&completions_);
  }
  v1::StepResponse* response() { return &response_; }
  // Null: no call waits.
  const AnswerState* answer() const { return answer_.get(); }
  StepBatches& batches() { return batches_; }

 private:
  void Say(const google::protobuf::FieldDescriptor& verb, SessionState* state) {
    static constexpr std::pair<Verb, Command::Verb> kCommands[] = {
        {v1::Operation::kSeal, Command::Verb::kSeal},
        {v1::Operation::kMatch, Command::Verb::kMatch},
        {v1::Operation::kRelease, Command::Verb::kRelease},
        {v1::Operation::kRef, Command::Verb::kRef},
        {v1::Operation::kTouch, Command::Verb::kTouch},
        {v1::Operation::kPin, Command::Verb::kPin},
        {v1::Operation::kUnpin, Command::Verb::kUnpin},
        {v1::Operation::kSetRetention, Command::Verb::kSetRetention},
        {v1::Operation::kWarmupDone, Command::Verb::kWarmupDone},
        {v1::Operation::kCloseSession, Command::Verb::kClose}};
    static const std::set<Verb> nobody_waits = {v1::Operation::kRelease, v1::Operation::kRef,
                                                v1::Operation::kTouch,   v1::Operation::kPin,
                                                v1::Operation::kUnpin,   v1::Operation::kSetRetention};
    const auto number = static_cast<Verb>(verb.number());
    const auto* const known = std::find_if(std::begin(kCommands), std::end(kCommands),
                                           [number](const auto& command) { return command.first == number; });
    Command* command = commands_.Vacant();
    command->groups = {{.group = 0, .key_bytes = 4, .count = 1}};
    command->keys = "key1";
    if (known != std::end(kCommands)) {
      command->verb = known->second;
      for (uint32_t i = 1; i <= kBlocks; ++i) command->blocks.push_back(Block(i));
    } else {
      command->verb = Command::Verb::kOnDevice;
      command->operation = std::make_unique<v1::Operation>();
      command->operation->GetReflection()->MutableMessage(command->operation.get(), &verb);
    }
    if (!nobody_waits.contains(number)) {
      answer_ = std::make_shared<AnswerState>();
      command->answer = answer_;
    }
    commands_.Publish();
  }

  CommandRing commands_;
  Magazine magazine_;
  std::shared_ptr<AnswerState> answer_;
  StepBatches batches_;
  v1::StepResponse response_, completions_;
};

// Calls `f` with each verb of the stream, and with whether its result comes at once or later.
template <typename F>
void ForEachVerb(F f) {
  const auto* fields = v1::Operation::descriptor()->FindOneofByName("verb");
  for (int i = 0; i < fields->field_count(); ++i) {
    const int number = fields->field(i)->number();
    if (number == v1::Operation::kOpenSession || number == v1::Operation::kAddMember) continue;
    for (const bool later : {false, true}) {
      SCOPED_TRACE(testing::Message() << fields->field(i)->name() << (later ? ", parked" : ""));
      f(*fields->field(i), later);
    }
  }
}

// That nobody heard of it but those whom `fate` names. `blocks` were refused, `code` and `words` say why.
void ExpectFate(RefusalFate fate, const std::string& verb, uint64_t blocks, const std::string& words,
                const OneOperation& operation, SessionState* state) {
  const std::vector<Refusal> recorded = state->refusals.Take();
  EXPECT_EQ(recorded.size(), fate == RefusalFate::kRecorded ? 1 : 0);
  for (const Refusal& refusal : recorded) {
    EXPECT_EQ(refusal.verb, verb);
    EXPECT_EQ(refusal.blocks, blocks);
    EXPECT_EQ(refusal.status, absl::ResourceExhaustedError(words));
  }
  EXPECT_EQ(state->status().ok(), fate != RefusalFate::kEndsSession) << state->status();
  if (fate == RefusalFate::kEndsSession) {
    EXPECT_EQ(state->status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(state->status().message()), HasSubstr("refused " + verb + " of 3 blocks"));
    EXPECT_THAT(std::string(state->status().message()), HasSubstr(words));
  }
  EXPECT_EQ(operation.answer() != nullptr, fate == RefusalFate::kCaller) << "does a call wait?";
  if (operation.answer() != nullptr) EXPECT_EQ(operation.answer()->phase, AnswerState::kReady);
}

TEST_F(StepBatchesTest, WhatIsRefusedAsAWholeMeetsTheFateThatTheTableSays) {
  ForEachVerb([](const google::protobuf::FieldDescriptor& verb, bool later) {
    const RefusalRule& rule = RefusalRuleOf(static_cast<Verb>(verb.number()));
    EXPECT_EQ(rule.verb, verb.name());
    EXPECT_FALSE(rule.why.empty());
    EXPECT_EQ(rule.whole == RefusalFate::kHarmless, verb.number() == v1::Operation::kTouch)
        << "only advice may be lost";
    EXPECT_EQ(rule.whole == RefusalFate::kEndsSession,
              verb.number() == v1::Operation::kRelease || verb.number() == v1::Operation::kRef)
        << "after these both ends have other books";
    SessionState state;
    OneOperation operation(verb, &state);
    *operation.result() = RefusedAsAWhole();
    operation.Answer(later);
    const bool names_none = verb.number() == v1::Operation::kLease || verb.number() == v1::Operation::kFence;
    ExpectFate(rule.whole, verb.name(), names_none ? 0 : OneOperation::kBlocks, "too much is parked",
               operation, &state);
    if (rule.whole == RefusalFate::kCaller) {
      EXPECT_EQ(operation.answer()->status, absl::ResourceExhaustedError("too much is parked"));
      EXPECT_EQ(state.refused, 0u);
    } else {
      EXPECT_EQ(state.refused, names_none ? 1 : OneOperation::kBlocks);
    }
    // What the session goes on with is as if it had never been asked for.
    EXPECT_EQ(state.passed_step, 0u);
    EXPECT_EQ(state.leased, 0u);
    if (verb.number() == v1::Operation::kLease) {
      EXPECT_EQ(state.refills_answered, 1u);
      if (!later) EXPECT_EQ(state.shortfall, v1::SHORTFALL_PRESSURE) << "who waits for blocks hears of it";
    } else {
      EXPECT_FALSE(operation.batches().HasWork());
    }
  });
}

TEST_F(StepBatchesTest, OneBlockThatIsRefusedMeetsTheFateThatTheTableSays) {
  ForEachVerb([](const google::protobuf::FieldDescriptor& verb, bool later) {
    const RefusalRule& rule = RefusalRuleOf(static_cast<Verb>(verb.number()));
    SessionState state;
    OneOperation operation(verb, &state);
    const auto* result = v1::OperationResult::descriptor()->FindFieldByName(verb.name());
    ASSERT_NE(result, nullptr);
    const auto* refused = result->message_type()->FindFieldByName("refused");
    if (refused == nullptr) {
      EXPECT_EQ(rule.blocks, RefusalFate::kHarmless) << "the daemon can't refuse a block of it";
      return;
    }
    EXPECT_NE(rule.blocks, RefusalFate::kHarmless) << "somebody hears of it";
    EXPECT_EQ(rule.blocks == RefusalFate::kEndsSession, verb.number() == v1::Operation::kRef);
    google::protobuf::Message* answer =
        operation.result()->GetReflection()->MutableMessage(operation.result(), result);
    for (uint32_t index = 0; index < OneOperation::kBlocks; ++index) {
      auto* refusal = static_cast<v1::Refusal*>(answer->GetReflection()->AddMessage(answer, refused));
      refusal->set_index(index);
      refusal->set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
      refusal->set_message("block " + std::to_string(index + 1) + " is cached");
    }
    operation.Answer(later);
    ExpectFate(rule.blocks, verb.name(), OneOperation::kBlocks, "block 1 is cached", operation, &state);
    EXPECT_EQ(state.refused, OneOperation::kBlocks);
    if (rule.blocks == RefusalFate::kCaller) {
      EXPECT_TRUE(operation.answer()->status.ok());
      EXPECT_EQ(RefusedBlocks(operation.answer()->result), OneOperation::kBlocks);
    }
  });
}

// The daemon says ABORTED of an operation that the end of the session was before, and tells of the end first. Of a session that
// goes on nothing is lost, whatever the code.
TEST_F(StepBatchesTest, OnlyWhatTheEndOfTheSessionTookIsNoRefusal) {
  for (const auto code :
       {absl::StatusCode::kAborted, absl::StatusCode::kUnauthenticated, absl::StatusCode::kOutOfRange}) {
    ForEachVerb([code](const google::protobuf::FieldDescriptor& verb, bool later) {
      const RefusalRule& rule = RefusalRuleOf(static_cast<Verb>(verb.number()));
      for (const bool ended : {false, true}) {
        SessionState state;
        OneOperation operation(verb, &state);
        operation.result()->set_code(static_cast<int>(code));
        if (ended) {
          v1::Notice* notice = operation.response()->add_notices();
          notice->set_kind(v1::NOTICE_KIND_ENDED);
          notice->set_detail("an operator said so");
        }
        operation.Answer(later);
        const bool taken = ended && code == absl::StatusCode::kAborted;
        if (ended) EXPECT_EQ(state.status(), absl::AbortedError("an operator said so"));
        if (!ended) EXPECT_EQ(state.status().ok(), rule.whole != RefusalFate::kEndsSession);
        EXPECT_EQ(state.refusals.Take().size(), !taken && rule.whole == RefusalFate::kRecorded ? 1 : 0);
        EXPECT_EQ(state.refused == 0, taken || rule.whole == RefusalFate::kCaller);
      }
    });
  }
}

// A batch that the end of the session was before, or whose answer is lost, ends the session: that is all that is told.
TEST_F(StepBatchesTest, ABatchThatEndsTheSessionIsNoRefusalOfItsOperations) {
  for (const auto code :
       {absl::StatusCode::kAborted, absl::StatusCode::kUnauthenticated, absl::StatusCode::kOutOfRange}) {
    ForEachVerb([code](const google::protobuf::FieldDescriptor& verb, bool later) {
      if (later) return;
      SessionState state;
      OneOperation operation(verb, &state);
      operation.response()->clear_results();
      operation.response()->set_code(static_cast<int>(code));
      operation.response()->set_message("no more");
      operation.Answer(false);
      EXPECT_EQ(state.refused, 0u);
      EXPECT_THAT(state.refusals.Take(), SizeIs(0));
      const bool lost = code == absl::StatusCode::kOutOfRange;
      EXPECT_EQ(state.status().code(), lost ? absl::StatusCode::kUnavailable : absl::StatusCode::kAborted);
      EXPECT_THAT(std::string(state.status().message()), HasSubstr("no more"));
    });
  }
}

TEST_F(StepBatchesTest, WhatNobodyWaitsForIsRecorded) {
  Introduce();
  for (const auto verb : {Command::Verb::kPin, Command::Verb::kUnpin, Command::Verb::kSetRetention}) {
    Command* command = commands_.Vacant();
    command->verb = verb;
    command->blocks = {Block(1), Block(2), Block(3)};
    commands_.Publish();
  }
  v1::StepResponse response = Answer(Next());
  // One of its blocks; as a whole; later, as it was parked.
  v1::Refusal* over = response.mutable_results(0)->mutable_pin()->add_refused();
  over->set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  over->set_message("beyond the budget");
  *response.mutable_results(1) = RefusedAsAWhole();
  response.mutable_results(2)->set_parked(true);
  v1::StepResponse later;
  v1::Completion* completion = later.add_completions();
  completion->set_sequence(response.sequence());
  completion->set_index(2);
  completion->mutable_result()->mutable_set_retention()->add_refused()->set_message("stale");
  batches_.OnResponse(&response);
  batches_.OnResponse(&later);
  EXPECT_TRUE(state_.status().ok());
  EXPECT_EQ(state_.refused.load(), 5u);
  const std::vector<Refusal> refusals = state_.refusals.Take();
  ASSERT_THAT(refusals, SizeIs(3));
  EXPECT_EQ(refusals[0].verb, "pin");
  EXPECT_EQ(refusals[0].blocks, 1u);
  EXPECT_EQ(refusals[0].status.message(), "beyond the budget");
  EXPECT_EQ(refusals[1].verb, "unpin");
  EXPECT_EQ(refusals[1].blocks, 3u);
  EXPECT_EQ(refusals[2].verb, "set_retention");
  EXPECT_THAT(state_.refusals.Take(), SizeIs(0));
}

TEST_F(StepBatchesTest, TheRecordIsBounded) {
  for (size_t i = 0; i < 3 * RefusalRecord::kKept; ++i) {
    state_.refusals.Add({.verb = "pin", .blocks = i, .status = absl::InternalError("x")});
  }
  const std::vector<Refusal> refusals = state_.refusals.Take();
  ASSERT_THAT(refusals, SizeIs(RefusalRecord::kKept));
  EXPECT_EQ(refusals.back().blocks, 3 * RefusalRecord::kKept - 1) << "the newest are kept";
}

}  // namespace
}  // namespace kvpool
