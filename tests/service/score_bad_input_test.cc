// Device operations that are refused, with the words, and change nothing.
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

class ScoreBadInputTest : public ScoreTest {
 protected:
  void SetUp() override {
    StartScoring(2);
    engine_ = OpenScored();
    blocks_ = LeaseWith(engine_.get(), {1, 5, 2, 3, 1});
  }
  void Refused(const v1::Operation& operation, int code, const std::string& words) {
    const v1::StateCounts before = Blocks();
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), code) << words << ": " << answer.message();
    EXPECT_NE(answer.message().find(words), std::string::npos) << answer.message();
    EXPECT_EQ(Blocks().SerializeAsString(), before.SerializeAsString());
  }

  std::unique_ptr<Engine> engine_;
  Refs blocks_;
};

TEST_F(ScoreBadInputTest, Sequences) {
  v1::Operation none = PruneOp({}, 8);
  Refused(none, kInvalidArgument, "sequence.blocks is 0; must be 1 to 65536");
  Refused(PruneOp({blocks_[0], blocks_[1], blocks_[0]}, 8), kInvalidArgument, "sequence.blocks names block");
  v1::Operation group = PruneOp(blocks_, 8);
  group.mutable_prune()->mutable_sequence()->set_group(1);
  Refused(group, kInvalidArgument, "sequence.group is 1; the layout has 1 groups");
  v1::Operation tokens = PruneOp(blocks_, 8);
  tokens.mutable_prune()->mutable_sequence()->set_last_block_tokens(5);
  Refused(tokens, kInvalidArgument, "sequence.last_block_tokens is 5; must be 0 to 4");
  const BlockRef beyond{.id = BlockId{100000}, .generation = 1};
  Refused(PruneOp({blocks_[0], beyond.Pack()}, 1), kNotFound,
          "sequence.blocks[1]: block 100000 does not exist");
  Refused(PruneOp({blocks_[0], 0}, 1), kNotFound, "sequence.blocks[1]: block 0 is the null block");
  Refused(PruneOp({engine_->LeaseAsked(1, 0).sink_block(), blocks_[0]}, 1), kFailedPrecondition,
          "is the sink of session");
}

TEST_F(ScoreBadInputTest, BlocksOfOthersAndOfOtherTimes) {
  const Refs stale = engine_->Lease(1);
  engine_->Release(stale);
  Refused(ScoreOp({stale[0]}), kFailedPrecondition, "is stale");
  const auto other = OpenScored("other");
  const Refs foreign = LeaseWith(other.get(), {1});
  Refused(ScoreOp({blocks_[0], foreign[0]}), kFailedPrecondition, "not held by session");
  engine_->Seal({blocks_[4]}, {Key("a")});
  engine_->Release({blocks_[4]});
  Refused(ScoreOp(blocks_), kFailedPrecondition, "sequence.blocks[4]: block");
  EXPECT_EQ(Run(engine_.get(), ScoreOp({blocks_[3]})).code(), 0);
}

TEST_F(ScoreBadInputTest, PoliciesAndParameters) {
  const auto with = [&](const std::string& policy, const std::string& name, const std::string& value) {
    v1::Operation operation = ScoreOp(blocks_);
    operation.mutable_score()->mutable_policy()->set_name(policy);
    if (!name.empty()) (*operation.mutable_score()->mutable_policy()->mutable_params())[name] = value;
    return operation;
  };
  Refused(with("nonsense", "", ""), kInvalidArgument,
          "policy \"nonsense\" is unknown; there are: paged_eviction");
  Refused(with("paged_eviction", "epsilon", "1"), kInvalidArgument, "has no parameter \"epsilon\"");
  Refused(with("paged_eviction", "eps", "wide"), kInvalidArgument,
          "parameter eps of policy paged_eviction: \"wide\"");
  Refused(with("paged_eviction", "eps", "-1"), kInvalidArgument,
          "parameter eps of policy paged_eviction: \"-1\"");
  Refused(with("paged_eviction", "eps", std::string(257, '1')), kInvalidArgument, "must have 0 to 256");
  Refused(with(std::string(300, 'p'), "", ""), kInvalidArgument, "policy.name has 300 bytes");
  v1::Operation many = ScoreOp(blocks_);
  for (int i = 0; i < 33; ++i) {
    (*many.mutable_score()->mutable_policy()->mutable_params())["p" + std::to_string(i)] = "1";
  }
  Refused(many, kInvalidArgument, "policy.params is 33; must be 0 to 32");
}

TEST_F(ScoreBadInputTest, Budgets) {
  Refused(PruneOp(blocks_, 0), kInvalidArgument, "prune.budget_tokens is 0; must be 1 to 16777216");
  v1::Operation none = PruneOp(blocks_, 1);
  none.mutable_prune()->clear_budget();
  Refused(none, kInvalidArgument, "prune has no budget");
  Refused(PruneOp(blocks_, 4), kInvalidArgument, "4 of 5 must leave for the budget, but 2 are");
  v1::Operation all = PruneOp(blocks_, 16);
  all.mutable_prune()->add_protect()->set_end(20);
  Refused(all, kInvalidArgument, "protected");
  v1::Operation blocks = PruneOp(blocks_, 16);
  blocks.mutable_prune()->set_budget_blocks(0);
  Refused(blocks, kInvalidArgument, "prune.budget_blocks is 0");
  Refused(CompactOp(blocks_, 0), kInvalidArgument, "compact.budget_tokens is 0");
  Refused(CompactOp(blocks_, 3), kInvalidArgument, "protected");
}

TEST_F(ScoreBadInputTest, RangesAndPositions) {
  v1::Operation operation = PruneOp(blocks_, 16);
  v1::TokenRange* range = operation.mutable_prune()->add_protect();
  range->set_begin(3);
  range->set_end(3);
  Refused(operation, kInvalidArgument, "prune.protect begins at 3; must be below its end, 3");
  range->set_end(21);
  Refused(operation, kInvalidArgument, "prune.protect ends at 21; the sequence has 20 tokens");
  operation = CompactOp(blocks_, 1);
  v1::KeptTokens* keep = operation.mutable_compact()->mutable_keep();
  Refused(operation, kInvalidArgument, "compact.keep.positions is 0; must be 1 to");
  keep->add_positions(7);
  keep->add_positions(7);
  Refused(operation, kInvalidArgument, "has 7 behind 7; must be ascending");
  keep->set_positions(1, 20);
  Refused(operation, kInvalidArgument, "ends with 20; the sequence has 20 tokens");
  keep->set_positions(1, 8);
  operation.mutable_compact()->mutable_policy();
  Refused(operation, kInvalidArgument, "compact has keep");
  operation = CompactOp(blocks_, 16);
  v1::Compact* const compact = operation.mutable_compact();
  compact->set_disposition(static_cast<v1::Disposition>(7));
  Refused(operation, kInvalidArgument, "compact.disposition is 7, which is none of its values");
  compact->set_disposition(v1::DISPOSITION_DROP);
  compact->mutable_merge();
  Refused(operation, kInvalidArgument, "goes with DISPOSITION_MERGE; disposition is DISPOSITION_DROP");
  compact->set_disposition(v1::DISPOSITION_MERGE);
  compact->mutable_merge()->set_smoothing(0.5);
  Refused(operation, kInvalidArgument, "compact.merge.smoothing is 0.5; must be 0 without thresholds");
  compact->mutable_merge()->add_thresholds(0.5);
  compact->mutable_merge()->add_thresholds(0.5);
  Refused(operation, kInvalidArgument, "has 2 numbers; must have none, 1, or one for each of 4 planes");
  compact->mutable_merge()->set_smoothing(1.5);
  Refused(operation, kInvalidArgument, "compact.merge.smoothing is 1.5; must be 0 to 1");
  compact->mutable_merge()->set_smoothing(NAN);
  Refused(operation, kInvalidArgument, "compact.merge.smoothing is nan; must be 0 to 1");
  compact->mutable_merge()->set_thresholds(1, INFINITY);
  Refused(operation, kInvalidArgument, "compact.merge.thresholds has inf; must be finite");
  operation = ScoreOp(blocks_);
  operation.mutable_score()->set_block_scores(false);
  operation.mutable_score()->set_token_scores(false);
  Refused(operation, kInvalidArgument, "neither token_scores nor block_scores");
}

TEST_F(ScoreBadInputTest, States) {
  const std::vector<uint64_t> states = engine_->Lease(2);
  v1::Operation operation = CompactOp(blocks_, 16);
  v1::Compact* const compact = operation.mutable_compact();
  compact->set_disposition(v1::DISPOSITION_LESS);
  Refused(operation, kInvalidArgument, "disposition is DISPOSITION_LESS, and less is absent");
  v1::LessTerms* const terms = compact->mutable_less();
  compact->set_disposition(v1::DISPOSITION_DROP);
  Refused(operation, kInvalidArgument, "disposition is DISPOSITION_DROP, and less is there");
  compact->set_disposition(v1::DISPOSITION_LESS);
  Refused(operation, kInvalidArgument, "compact.less.rank is 0; must be 1 to 64");
  terms->set_rank(65);
  Refused(operation, kInvalidArgument, "compact.less.rank is 65; must be 1 to 64");
  terms->set_rank(2);
  terms->set_hidden(513);
  Refused(operation, kInvalidArgument, "compact.less.hidden is 513; must be 1 to 512");
  terms->set_hidden(3);
  Refused(operation, kInvalidArgument, "compact.less.weights_name has 0 bytes; must have 1 to 64");
  terms->set_weights_name(std::string(65, 'a'));
  Refused(operation, kInvalidArgument, "compact.less.weights_name has 65 bytes");
  terms->set_weights_name("a");
  Refused(operation, kInvalidArgument, "compact.less.weights has 0 bytes inlined and 0 blocks");
  // 4 planes of 4 * 3 + 3 * 2 + 2 * 2 floats.
  terms->mutable_weights()->set_inlined(std::string(348, 0));
  Refused(operation, kInvalidArgument, "compact.less.state.blocks is 0; must be 1 to");
  terms->mutable_state()->add_blocks(states[0]);
  Refused(operation, kInvalidArgument, "compact.less.weights.inlined has 348 bytes; this sequence needs 352");
  terms->mutable_weights()->set_inlined(std::string(352, 0));
  terms->mutable_previous()->set_inlined(std::string(156, 0));
  Refused(operation, kInvalidArgument,
          "compact.less.previous.inlined has 156 bytes; this sequence needs 160");
  terms->clear_previous();
  // 4 planes of 2 * (4 + 1) floats.
  terms->mutable_state()->set_offset_bytes(kScoredBlockBytes - 156);
  Refused(operation, kInvalidArgument,
          "compact.less.state: 1 blocks of 65536 bytes do not hold the 160 bytes");
  terms->mutable_state()->set_offset_bytes(2);
  Refused(operation, kInvalidArgument, "compact.less.state.offset_bytes is 2; must be a multiple of 4");
  terms->mutable_state()->set_offset_bytes(0);
  terms->mutable_state()->set_bytes(160);
  Refused(operation, kInvalidArgument, "compact.less.state.bytes is 160; must be 0");
  terms->mutable_state()->clear_bytes();
  terms->mutable_state()->add_blocks(states[0]);
  Refused(operation, kInvalidArgument, "compact.less.state.blocks names block");
  terms->mutable_state()->mutable_blocks()->Truncate(1);
  terms->mutable_previous()->add_blocks(states[0]);
  Refused(operation, kInvalidArgument, "twice, or one that something else is read from");
  terms->mutable_previous()->set_blocks(0, states[1]);
  terms->mutable_weights()->clear_inlined();
  terms->mutable_weights()->add_blocks(states[1]);  // What is only read may be read twice.
  terms->mutable_state()->set_blocks(0, blocks_[0]);
  Refused(operation, kInvalidArgument, "compact.less.state.blocks names block");
  engine_->Release({states[0]});
  terms->mutable_state()->set_blocks(0, states[0]);
  EXPECT_NE(Run(engine_.get(), operation).code(), 0) << "the block is not held";
  EXPECT_NE(Run(engine_.get(), operation).message().find("compact.less.state.blocks[0]"), std::string::npos);
}

// 20 tokens, 2 layers of 2 KV heads.
TEST_F(ScoreBadInputTest, HiddenStates) {
  v1::Operation operation = ScoreOp(blocks_);
  v1::Signals* const signals = operation.mutable_score()->mutable_signals();
  operation.mutable_score()->mutable_policy()->set_name("kvzap");
  v1::Signal* const hidden = signals->add_signals();
  *hidden = InlinedSignal(v1::SIGNAL_KIND_HIDDEN, std::vector<float>(60));
  Refused(operation, kInvalidArgument, "signals.hidden_dim is 0; must be 1 to 65536");
  signals->set_hidden_dim(65537);
  Refused(operation, kInvalidArgument, "signals.hidden_dim is 65537; must be 1 to 65536");
  signals->set_hidden_dim(3);
  hidden->set_per_layer(true);
  Refused(operation, kInvalidArgument, "HIDDEN.data.inlined has 240 bytes; this sequence needs 480");
  hidden->set_per_head(true);
  Refused(operation, kInvalidArgument, "HIDDEN.data.inlined has 240 bytes; this sequence needs 960");
  *hidden = InlinedSignal(v1::SIGNAL_KIND_HIDDEN, std::vector<float>(240));
  hidden->set_per_layer(true);
  hidden->set_per_head(true);
  v1::Signal* const weights = signals->add_signals();
  // 2 layers of a unit of 3 + 1 + 2 floats, and of 2 more.
  *weights = InlinedSignal(v1::SIGNAL_KIND_WEIGHTS, std::vector<float>(16));
  EXPECT_EQ(Run(engine_.get(), operation).code(), 0);
  weights->set_per_head(true);
  Refused(operation, kInvalidArgument, "SIGNAL_KIND_WEIGHTS.per_head must not be set");
  weights->set_per_head(false);
  weights->set_per_layer(true);
  Refused(operation, kInvalidArgument, "SIGNAL_KIND_WEIGHTS.per_layer must not be set");
}

TEST_F(ScoreBadInputTest, Signals) {
  v1::Operation operation = ScoreOp(blocks_);
  v1::Signals* signals = operation.mutable_score()->mutable_signals();
  operation.mutable_score()->mutable_policy()->set_name("h2o");
  v1::Signal* mass = signals->add_signals();
  *mass = InlinedSignal(v1::SIGNAL_KIND_MASS, std::vector<float>(19));
  Refused(operation, kInvalidArgument, "SIGNAL_KIND_MASS.data.inlined has 76 bytes; this sequence needs 80");
  mass->set_per_layer(true);
  Refused(operation, kInvalidArgument, "this sequence needs 160");
  mass->set_per_layer(false);
  *signals->add_signals() = *mass;
  Refused(operation, kInvalidArgument, "signals has SIGNAL_KIND_MASS twice");
  signals->mutable_signals()->RemoveLast();
  mass->set_kind(v1::SIGNAL_KIND_UNSPECIFIED);
  Refused(operation, kInvalidArgument, "signals.kind is 0");
  mass->set_kind(v1::SIGNAL_KIND_MASS);
  v1::Data* data = mass->mutable_data();
  data->clear_inlined();
  Refused(operation, kInvalidArgument, "must have one of the two");
  data->add_blocks(blocks_[1]);
  Refused(operation, kInvalidArgument, "something else is read from");
  const Refs statistics = engine_->Lease(2);
  data->set_blocks(0, statistics[0]);
  data->set_offset_bytes(2);
  Refused(operation, kInvalidArgument, "offset_bytes is 2; must be a multiple of 4");
  data->set_offset_bytes(kScoredBlockBytes - 76);
  Refused(operation, kInvalidArgument, "do not hold the 80 bytes");
  data->set_offset_bytes(std::numeric_limits<uint64_t>::max() - 3);
  Refused(operation, kInvalidArgument, "do not hold the 80 bytes");
  data->set_offset_bytes(0);
  EXPECT_EQ(Run(engine_.get(), operation).code(), 0);
  engine_->Seal({statistics[0]}, {Key("s")});
  Refused(operation, kFailedPrecondition, "is sealed; must be leased");
  engine_->Release({statistics[1]});
  data->set_blocks(0, statistics[1]);
  Refused(operation, kFailedPrecondition, "SIGNAL_KIND_MASS.data.blocks[0]: block");
}

TEST_F(ScoreBadInputTest, Windows) {
  v1::Operation operation = ScoreOp(blocks_);
  operation.mutable_score()->mutable_policy()->set_name("tova");
  v1::QueryWindow* window = operation.mutable_score()->mutable_signals()->mutable_window();
  window->mutable_data()->set_inlined(std::string(64, '\0'));
  Refused(operation, kInvalidArgument, "window.queries is 0; must be 1 to 1024");
  window->set_queries(21);
  Refused(operation, kInvalidArgument, "window.q_heads is 0");
  window->set_q_heads(3);
  Refused(operation, kInvalidArgument, "window.data.inlined has 64 bytes");
  window->set_queries(1);
  window->mutable_data()->set_inlined(std::string(2 * 3 * kDim * 4, '\0'));
  Refused(operation, kInvalidArgument, "q_heads is 3, no multiple of 2 kv heads");
  window->set_q_heads(2);
  window->mutable_data()->set_inlined(std::string(21 * 2 * 2 * kDim * 4, '\0'));
  window->set_queries(21);
  Refused(operation, kInvalidArgument, "queries is 21, must be 1 to 20");
  window->set_queries(1);
  window->set_scale(-1);
  Refused(operation, kInvalidArgument, "window.scale is -1");
}

TEST_F(ScoreBadInputTest, UnknownFieldsAndEnums) {
  v1::Operation operation = ScoreOp(blocks_);
  v1::Sequence* sequence = operation.mutable_score()->mutable_sequence();
  sequence->GetReflection()->MutableUnknownFields(sequence)->AddVarint(1999, 1);
  Refused(operation, kInvalidArgument, "sequence has unknown field 1999");
  operation = ScoreOp(blocks_);
  operation.mutable_score()->set_scope(static_cast<v1::Scope>(9));
  Refused(operation, kInvalidArgument, "score.scope is 9");
  operation = ScoreOp(blocks_);
  operation.mutable_score()->mutable_reductions()->set_over_tokens(static_cast<v1::TokenReduction>(9));
  Refused(operation, kInvalidArgument, "reductions.over_tokens is 9");
}

TEST_F(ScoreBadInputTest, NumbersThatAreNoneLeaveFirst) {
  *Element(blocks_[1], true, 0, 1, 0, 0) = NAN;
  *Element(blocks_[2], false, 1, 3, 1, 2) = NAN;
  *Element(blocks_[3], true, 0, 0, 0, 0) = INFINITY;
  v1::Operation operation = PruneOp(blocks_, 3 * kTokens);
  const v1::PruneResult result = Prune(engine_.get(), operation);
  ASSERT_EQ(result.victims_size(), 2);
  EXPECT_EQ(result.victims(0), 1);
  EXPECT_EQ(result.victims(1), 2) << "not the one that is infinite";
}

TEST_F(ScoreBadInputTest, LayoutsThatNobodyCanRead) {
  v1::OpenSession opaque = OpenRequest("opaque");
  opaque.mutable_layout()->set_block_bytes(kScoredBlockBytes);
  engine_->Do(CloseOp());
  const auto engine = OpenEngine(opaque);
  Settle({engine.get()});
  const v1::OperationResult answer = Run(engine.get(), PruneOp(engine->Lease(2), 1));
  EXPECT_EQ(answer.code(), kFailedPrecondition);
  EXPECT_NE(answer.message().find("the layout is opaque"), std::string::npos) << answer.message();
}

TEST_F(ScoreBadInputTest, AnOperationBeyondTheWorkspaceSaysWhatItNeeds) {
  options_.score_workspace_bytes = 100;
  daemon_.reset();
  hold_.Forget();
  StartScoring(1);
  engine_ = OpenScored();
  blocks_ = LeaseWith(engine_.get(), {1, 2});
  Refused(ScoreOp(blocks_), kResourceExhausted, "the limit is 100 (--score-workspace)");
  v1::Operation merge = CompactOp(blocks_, 1);
  merge.mutable_compact()->mutable_keep()->add_positions(5);
  merge.mutable_compact()->set_disposition(v1::DISPOSITION_MERGE);
  Refused(merge, kResourceExhausted, "merging needs 512 bytes of workspace on the device; the limit is 100");
  merge.mutable_compact()->set_disposition(v1::DISPOSITION_LESS);
  v1::LessTerms* const terms = merge.mutable_compact()->mutable_less();
  terms->set_rank(1);
  terms->set_hidden(1);
  terms->set_weights_name("a");
  terms->mutable_weights()->set_inlined(std::string(4 * 6 * sizeof(float), 0));
  terms->mutable_state()->add_blocks(engine_->Lease(1)[0]);
  Refused(merge, kResourceExhausted,
          "adding tokens to a state needs 316 bytes on the device, 96 of them for weights; the limit is 100");
}

// What others would wait for is refused before it begins.
TEST_F(ScoreBadInputTest, AnOperationThatWouldMultiplyForLongIsRefused) {
  options_.score_time_ms = 1;
  daemon_.reset();
  hold_.Forget();
  StartScoring(1);
  engine_ = OpenScored();
  const std::vector<uint64_t> many = LeaseWith(engine_.get(), std::vector<float>(30, 1));
  const auto with_units = [&](size_t units) {
    v1::Operation operation = ScoreOp(many);
    operation.mutable_score()->mutable_policy()->set_name("learned_mlp");
    v1::Signals* const signals = operation.mutable_score()->mutable_signals();
    signals->set_hidden_dim(1);
    v1::Signal* const hidden = signals->add_signals();
    hidden->set_kind(v1::SIGNAL_KIND_HIDDEN);
    hidden->mutable_data()->set_inlined(std::string(many.size() * kTokens * sizeof(float), 0));
    v1::Signal* const weights = signals->add_signals();
    weights->set_kind(v1::SIGNAL_KIND_WEIGHTS);
    weights->mutable_data()->set_inlined(std::string((3 * units + 1) * sizeof(float), 0));
    return operation;
  };
  EXPECT_EQ(Run(engine_.get(), with_units(1)).code(), 0);
  // 262,144 weights, 120 tokens, 4 planes
  Refused(with_units(87381), kResourceExhausted, "1.25829e+08 numbers of queries, weights or other tokens");
  EXPECT_EQ(Run(engine_.get(), with_units(1)).code(), 0);
  if (std::getenv("KVPOOL_TEST_DEVICE") != nullptr)
    return;  // A GPU does more in a millisecond than a request here can ask for.
  // 79 tokens that leave 4 planes, with 512 * (4 + 64) + 64 * 64 weights each.
  engine_->Release({many.begin() + 20, many.end()});
  v1::Operation less = CompactOp({many.begin(), many.begin() + 20}, 0);
  less.mutable_compact()->mutable_keep()->add_positions(5);
  less.mutable_compact()->set_disposition(v1::DISPOSITION_LESS);
  v1::LessTerms* const terms = less.mutable_compact()->mutable_less();
  terms->set_rank(64);
  terms->set_hidden(512);
  terms->set_weights_name("zeros");
  terms->mutable_weights()->set_inlined(std::string(4 * (512 * (4 + 64) + 64 * 64) * sizeof(float), 0));
  terms->mutable_state()->add_blocks(engine_->Lease(1)[0]);
  Refused(less, kResourceExhausted, "1.23973e+07 numbers of queries, weights or other tokens");
}

TEST_F(ServiceTest, ADeviceThatCannotScoreSaysSo) {
  StartDaemon(1);
  v1::OpenSession request = ScoredRequest();
  request.mutable_layout()->set_block_bytes(1024);
  const auto engine = OpenEngine(request);
  const v1::OperationResult answer = engine->Do(ScoreOp(engine->Lease(1)));
  EXPECT_EQ(answer.code(), kUnimplemented);
  EXPECT_NE(answer.message().find("mem0 maps no memory"), std::string::npos) << answer.message();
}

}  // namespace
}  // namespace kvpool
