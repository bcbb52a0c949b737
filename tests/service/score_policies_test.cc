// Every policy of the registry through the verbs, with whatever an engine may tell.
#include <random>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cuda/scorers/policies/registry.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

std::string Name(const scorers::PolicyFacts& facts) { return std::string(facts.name); }

class ScorePoliciesTest : public ScoreTest {
 protected:
  void SetUp() override {
    StartScoring(1);
    engine_ = OpenScored();
    blocks_ = engine_->Lease(6);
    for (const uint64_t block : blocks_) {
      for (uint32_t i = 0; i < 2 * kLayers * kTokens * kHeads * kDim; ++i) {
        Element(block, false, 0, 0, 0, 0)[i] = Uniform() * 2 - 1;
      }
    }
  }
  float Uniform() { return static_cast<float>(random_() % 1000) / 1000; }

  // All that a policy could ask for, for so many tokens.
  v1::Signals Everything(uint32_t tokens) {
    v1::Signals signals;
    for (const scorers::SignalFacts& facts : scorers::kSignals) {
      if (facts.shape != scorers::SignalShape::kToken) continue;
      const bool per_layer = random_() % 2 == 0, per_head = random_() % 2 == 0;
      std::vector<float> values(size_t{tokens} * (per_layer ? kLayers : 1) * (per_head ? kHeads : 1));
      for (float& value : values) value = Uniform();
      v1::Signal& signal = *signals.add_signals() =
          InlinedSignal(static_cast<v1::SignalKind>(facts.kind), values);
      signal.set_per_layer(per_layer);
      signal.set_per_head(per_head);
    }
    v1::QueryWindow* window = signals.mutable_window();
    window->set_queries(random_() % tokens + 1);
    window->set_q_heads(2 * kHeads);
    std::vector<float> queries(size_t{kLayers} * window->queries() * 2 * kHeads * kDim);
    for (float& value : queries) value = Uniform() * 4 - 2;
    window->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
    signals.set_now(static_cast<float>(tokens));
    return signals;
  }

  std::minstd_rand random_{11};
  std::unique_ptr<Engine> engine_;
  Refs blocks_;
};

// By default it reads hidden states, with weights.
bool IsLearned(const scorers::PolicyFacts& facts) {
  return (scorers::BindPolicy(Name(facts), {})->needs() & scorers::kNeedWeights) != 0;
}

TEST(SignalsTest, TheTableHasEveryKindByItsName) {
  for (const scorers::SignalFacts& facts : scorers::kSignals) {
    EXPECT_EQ(v1::SignalKind_Name(static_cast<v1::SignalKind>(facts.kind)),
              absl::StrCat("SIGNAL_KIND_", absl::AsciiStrToUpper(facts.name)));
  }
}

TEST_F(ScorePoliciesTest, EachScoresPrunesAndCompacts) {
  for (const scorers::PolicyFacts* facts : scorers::Policies()) {
    if (IsLearned(*facts)) continue;  // They have a test of their own.
    SCOPED_TRACE(Name(*facts));
    for (uint32_t last = 1; last <= kTokens; ++last) {
      const uint32_t tokens = 5 * kTokens + last;
      v1::Operation score = ScoreOp(blocks_, last);
      score.mutable_score()->mutable_policy()->set_name(Name(*facts));
      *score.mutable_score()->mutable_signals() = Everything(tokens);
      score.mutable_score()->set_budget_tokens(2 * kTokens);
      score.mutable_score()->set_scope(static_cast<v1::Scope>(last % 4));
      const v1::OperationResult scored = Run(engine_.get(), score);
      ASSERT_EQ(scored.code(), 0) << scored.message();
      EXPECT_EQ(scored.score().token_scores_size(), static_cast<int>(tokens * scored.score().rows()));

      v1::Operation prune = PruneOp(blocks_, 3 * kTokens);
      *prune.mutable_prune()->mutable_policy() = score.score().policy();
      *prune.mutable_prune()->mutable_signals() = score.score().signals();
      prune.mutable_prune()->mutable_sequence()->set_last_block_tokens(last);
      prune.mutable_prune()->mutable_protection();
      prune.mutable_prune()->set_dry_run(true);
      const v1::OperationResult pruned = Run(engine_.get(), prune);
      ASSERT_EQ(pruned.code(), 0) << pruned.message();
      EXPECT_EQ(pruned.prune().victims_size(), last == kTokens ? 3 : 2);

      v1::Operation compact = CompactOp(blocks_, 2 * kTokens + 1);
      *compact.mutable_compact()->mutable_policy() = score.score().policy();
      *compact.mutable_compact()->mutable_signals() = score.score().signals();
      compact.mutable_compact()->mutable_sequence()->set_last_block_tokens(last);
      compact.mutable_compact()->mutable_protection();
      compact.mutable_compact()->set_scope(static_cast<v1::Scope>(last % 4));
      compact.mutable_compact()->set_keep_sources(true);
      const v1::OperationResult compacted = Run(engine_.get(), compact);
      ASSERT_EQ(compacted.code(), 0) << compacted.message();
      const v1::CompactResult& result = compacted.compact();
      EXPECT_GE(result.kept_positions_size(), static_cast<int>(result.rows() * (2 * kTokens + 1)));
      EXPECT_EQ(engine_->Release(TableOf(result)).refused_size(), 0);
    }
  }
  EXPECT_EQ(engine_->Release(blocks_).refused_size(), 0);
}

TEST_F(ScorePoliciesTest, LearnedOnesSayHowManyWeightsTheyTake) {
  for (const scorers::PolicyFacts* facts : scorers::Policies()) {
    if (!IsLearned(*facts)) continue;
    SCOPED_TRACE(Name(*facts));
    v1::Operation score = ScoreOp(blocks_);
    score.mutable_score()->mutable_policy()->set_name(Name(*facts));
    v1::Signals* signals = score.mutable_score()->mutable_signals();
    *signals = Everything(6 * kTokens);
    signals->set_hidden_dim(3);
    *signals->add_signals() = InlinedSignal(v1::SIGNAL_KIND_HIDDEN, std::vector<float>(6 * kTokens * 3, 0.5));
    *signals->add_signals() = InlinedSignal(v1::SIGNAL_KIND_WEIGHTS, {1});
    const v1::OperationResult answer = Run(engine_.get(), score);
    EXPECT_EQ(answer.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition)) << answer.message();
    EXPECT_NE(answer.message().find("1 weights given, this shape needs"), std::string::npos)
        << answer.message();
    const int wanted = std::atoi(answer.message().substr(answer.message().find("needs ") + 6).c_str());
    *signals->mutable_signals(signals->signals_size() - 1) =
        InlinedSignal(v1::SIGNAL_KIND_WEIGHTS, std::vector<float>(wanted, 0.25));
    const v1::OperationResult scored = Run(engine_.get(), score);
    EXPECT_EQ(scored.code(), 0) << scored.message();
  }
}

// Covariances are not taken for means of many heads, nor one array for the weights of two policies.
TEST_F(ScorePoliciesTest, WeightsOfAnotherKindAreRefused) {
  v1::Operation score = ScoreOp(blocks_);
  v1::Policy* policy = score.mutable_score()->mutable_policy();
  policy->set_name("expected_attention");
  const auto answer_to = [&](size_t weights) {
    v1::Signals* signals = score.mutable_score()->mutable_signals();
    signals->clear_signals();
    *signals->add_signals() =
        InlinedSignal(v1::SIGNAL_KIND_WEIGHTS, std::vector<float>(weights, 1.0f / 1024));
    return Run(engine_.get(), score);
  };
  const auto wanted = [&] {
    const std::string message = answer_to(1).message();
    return static_cast<size_t>(std::atoi(message.substr(message.find("needs ") + 6).c_str()));
  };
  const size_t both = wanted();
  EXPECT_EQ(answer_to(2 * both).code(), 0);
  (*policy->mutable_params())["use_covariance"] = "false";
  const size_t means = wanted();
  EXPECT_LT(means, both);
  EXPECT_EQ(answer_to(2 * means).code(), 0);
  for (const size_t weights : {both, 2 * both, 129 * means}) {
    const v1::OperationResult refused = answer_to(weights);
    EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition)) << weights;
    EXPECT_NE(refused.message().find(absl::StrCat(weights, " weights given, this shape needs ")),
              std::string::npos)
        << refused.message();
  }
  policy->set_name("criticalkv");
  *policy->mutable_params() = {};
  (*policy->mutable_params())["host"] = "qfilters";
  const v1::OperationResult two = answer_to(both);
  EXPECT_EQ(two.code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(two.message(),
            "policy criticalkv over qfilters: both read weights, and a request has one array of them");
}

TEST_F(ScorePoliciesTest, EachNamesWhatItLacks) {
  for (const scorers::PolicyFacts* facts : scorers::Policies()) {
    SCOPED_TRACE(Name(*facts));
    v1::Operation score = ScoreOp(blocks_);
    score.mutable_score()->mutable_policy()->set_name(Name(*facts));
    score.mutable_score()->set_budget_tokens(2 * kTokens);
    const v1::OperationResult answer = Run(engine_.get(), score);
    if (answer.code() == 0) continue;
    EXPECT_EQ(answer.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
    EXPECT_NE(answer.message().find("policy " + Name(*facts) + " needs "), std::string::npos)
        << answer.message();
    EXPECT_NE(answer.message().find(", not given"), std::string::npos) << answer.message();
  }
}

}  // namespace
}  // namespace kvpool
