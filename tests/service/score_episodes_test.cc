// Block sets under names (EpiCache), queries of a prompt behind the sequence, and hints of what nothing will
// read again.
#include <cmath>
#include <limits>

#include "server/space/session.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

v1::Operation PutOp(const std::string& name, const std::vector<float>& centroid, const Refs& blocks,
                    uint32_t last_block_tokens = 0) {
  v1::Operation operation;
  v1::PutEpisode* put = operation.mutable_put_episode();
  put->set_name(name);
  put->mutable_centroid()->Add(centroid.begin(), centroid.end());
  if (blocks.empty()) return operation;
  v1::Sequence* sequence = put->add_sequences();
  sequence->mutable_blocks()->Add(blocks.begin(), blocks.end());
  sequence->set_last_block_tokens(last_block_tokens);
  return operation;
}

v1::Operation ChooseOp(const std::vector<float>& embedding) {
  v1::Operation operation;
  operation.mutable_choose_episode()->mutable_embedding()->Add(embedding.begin(), embedding.end());
  return operation;
}

Refs BlocksOf(const v1::ChooseEpisodeResult& result) {
  return {result.sequences(0).blocks().begin(), result.sequences(0).blocks().end()};
}

class EpisodesTest : public ScoreTest {
 protected:
  void SetUp() override {
    StartScoring(1);
    engine_ = OpenScored();
  }
  v1::PutEpisodeResult Put(const v1::Operation& operation) {
    const v1::OperationResult result = engine_->Do(operation);
    EXPECT_EQ(result.code(), 0) << result.message();
    return result.put_episode();
  }
  v1::ChooseEpisodeResult Choose(const std::vector<float>& embedding) {
    const v1::OperationResult result = engine_->Do(ChooseOp(embedding));
    EXPECT_EQ(result.code(), 0) << result.message();
    return result.choose_episode();
  }
  std::string Refused(const v1::Operation& operation, int code) {
    const v1::OperationResult result = engine_->Do(operation);
    EXPECT_EQ(result.code(), code) << result.message();
    return result.message();
  }

  std::unique_ptr<Engine> engine_;
};

TEST_F(EpisodesTest, AQuestionIsAnsweredFromTheNearestSet) {
  const Refs travel = engine_->Lease(2), food = engine_->Lease(3);
  EXPECT_EQ(Put(PutOp("travel", {1, 0, 0}, travel)).episodes(), 1);
  EXPECT_EQ(Put(PutOp("food", {0, 2, 0}, food, 1)).episodes(), 2);
  const v1::ChooseEpisodeResult chosen = Choose({0.1f, 1, 0.2f});
  EXPECT_EQ(chosen.name(), "food");
  EXPECT_NEAR(chosen.similarity(), 1 / std::sqrt(1.05), 1e-6);
  EXPECT_EQ(BlocksOf(chosen), food);
  EXPECT_EQ(chosen.sequences(0).last_block_tokens(), 1);
  EXPECT_EQ(Choose({3, -1, 0}).name(), "travel");
  EXPECT_EQ(Choose({0, 0, 0}).name(), "food") << "of equal ones the first by name";
  v1::Operation by_name;
  by_name.mutable_choose_episode()->set_name("travel");
  EXPECT_EQ(BlocksOf(engine_->Do(by_name).choose_episode()), travel);
}

TEST_F(EpisodesTest, ASetAndEachChoiceHoldTheBlocksByThemselves) {
  const Refs blocks = engine_->Lease(2);
  Put(PutOp("one", {1}, blocks));
  EXPECT_EQ(engine_->Release(blocks).refused_size(), 0);
  EXPECT_EQ(Blocks().leased(), 3) << "two and the sink: the set holds them";
  Choose({1});
  EXPECT_EQ(Put(PutOp("one", {}, {})).released(), 2);
  EXPECT_EQ(Blocks().leased(), 3) << "the choice holds them";
  EXPECT_EQ(engine_->Release(blocks).refused_size(), 0);
  EXPECT_EQ(Blocks().leased(), 1);
  EXPECT_EQ(engine_->Release(blocks).refused_size(), 2);
}

TEST_F(EpisodesTest, PuttingANameAgainReplacesTheSet) {
  const Refs blocks = engine_->Lease(3);
  Put(PutOp("one", {1, 0}, {blocks[0], blocks[1]}));
  const v1::PutEpisodeResult replaced = Put(PutOp("one", {0, 1, 5}, {blocks[1], blocks[2]}));
  EXPECT_EQ(replaced.episodes(), 1);
  EXPECT_EQ(replaced.released(), 2);
  engine_->Release(blocks);
  EXPECT_EQ(Blocks().leased(), 3);
  EXPECT_EQ(BlocksOf(Choose({0, 1, 0})), (Refs{blocks[1], blocks[2]}));
}

TEST_F(EpisodesTest, ASetOfBlocksThatAreNotHeldIsRefusedWhole) {
  const Refs blocks = engine_->Lease(2);
  engine_->Release({blocks[1]});
  EXPECT_EQ(Refused(PutOp("one", {1}, blocks), kFailedPrecondition).find("sequence.blocks[1]: block"), 0u);
  EXPECT_EQ(engine_->Release({blocks[0]}).refused_size(), 0);
  EXPECT_EQ(Blocks().leased(), 1) << "no hold was left behind";
  const uint64_t sink = engine_->LeaseAsked(1, 1).sink_block();
  EXPECT_NE(Refused(PutOp("one", {1}, {sink}), kFailedPrecondition).find("is the sink"), std::string::npos);
}

TEST_F(EpisodesTest, BadSetsAndQuestionsAreRefused) {
  const Refs blocks = engine_->Lease(2);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Refused(PutOp("", {1}, blocks), kInvalidArgument),
            "put_episode.name has 0 bytes; must have 1 to 128");
  EXPECT_EQ(Refused(PutOp("a", {}, blocks), kInvalidArgument),
            "put_episode.centroid is 0; must be 1 to 4096");
  EXPECT_EQ(Refused(PutOp("a", {1, nan}, blocks), kInvalidArgument),
            "put_episode.centroid has nan; must be finite");
  EXPECT_EQ(Refused(PutOp("a", {1}, {}), kInvalidArgument),
            "put_episode removes a set: centroid must be empty");
  EXPECT_EQ(Refused(PutOp("a", {1}, blocks, 5), kInvalidArgument),
            "sequence.last_block_tokens is 5; must be 0 to 4");
  EXPECT_NE(Refused(PutOp("a", {1}, {blocks[0], blocks[0]}), kInvalidArgument).find("twice"),
            std::string::npos);
  EXPECT_EQ(Refused(ChooseOp({1}), kNotFound), "session 1 has no episodes");
  Put(PutOp("a", {1, 0}, blocks));
  EXPECT_EQ(Refused(PutOp("b", {1}, blocks), kInvalidArgument),
            "put_episode.centroid has 1 numbers; the session's others have 2");
  EXPECT_EQ(Refused(ChooseOp({1}), kInvalidArgument),
            "choose_episode.embedding has 1 numbers; the session's centroids have 2");
  EXPECT_NE(Refused(ChooseOp({}), kInvalidArgument).find("must have one of the two"), std::string::npos);
  v1::Operation other;
  other.mutable_choose_episode()->set_name("b");
  EXPECT_NE(Refused(other, kNotFound).find("none of this name"), std::string::npos);
}

TEST_F(EpisodesTest, AreBoundedAndGoWithTheSession) {
  const Refs blocks = engine_->Lease(1);
  for (int i = 0; i < 64; ++i) Put(PutOp("episode" + std::to_string(i), {1}, blocks));
  EXPECT_EQ(Refused(PutOp("one more", {1}, blocks), kResourceExhausted),
            "session 1 has 64 episodes; the limit is 64");
  EXPECT_EQ(Put(PutOp("episode7", {2}, blocks)).episodes(), 64) << "one of them is replaced";
  v1::ListSessionsResponse sessions;
  EXPECT_TRUE(daemon_->ListSessions({}, &sessions).ok());
  EXPECT_EQ(sessions.sessions(0).episodes(), 64);
  engine_->Do(CloseOp());
  EXPECT_EQ(Blocks().leased(), 0);
  EXPECT_EQ(engine_->member->session->episodes.size(), 0)
      << "an engine that keeps its stream open keeps the session";
}

// Of two blocks the second is held as often as one can be.
TEST_F(EpisodesTest, ASetIsHeldWholeOrNotAtAll) {
  const Refs blocks = engine_->Lease(2);
  Put(PutOp("one", {1}, blocks));
  ASSERT_EQ(engine_->Do(RefOp(Refs(65535 - 2, blocks[1]))).ref().refused_size(), 0);
  EXPECT_NE(Refused(ChooseOp({1}), kResourceExhausted).find("is held 65535 times by session 1, the limit"),
            std::string::npos);
  Refused(PutOp("two", {1}, blocks), kResourceExhausted);
  Put(PutOp("one", {}, {}));
  EXPECT_EQ(engine_->Release({blocks[0]}).refused_size(), 0);
  EXPECT_EQ(engine_->Release({blocks[0]}).refused_size(), 1) << "no hold was left behind";
}

TEST_F(EpisodesTest, ASetWaitsBehindWhatIsParkedOnItsBlocks) {
  const Refs blocks = engine_->Lease(2);
  std::optional<v1::OperationResult> released, put;
  engine_->Send(ReleaseOp({blocks[1]}, /*after=*/1), &released);
  engine_->Send(PutOp("one", {1}, blocks), &put);
  EXPECT_FALSE(put.has_value());
  engine_->Fence(1);
  ASSERT_TRUE(put.has_value());
  EXPECT_EQ(put->code(), kFailedPrecondition) << "block 1 was released first";
}

TEST_F(EpisodesTest, ASetThatADeviceOperationReadsIsNotLetGo) {
  const Refs blocks = LeaseWith(engine_.get(), {1, 5, 2, 3, 1});
  Put(PutOp("one", {1}, blocks));
  engine_->Do(ReleaseOp(blocks));  // The set alone holds them.
  hold_.Hold();
  const auto prune = Begin(engine_.get(), PruneOp(blocks, 3 * kTokens));
  hold_.AwaitCalls(1);
  const std::string in_use = "are in use by a device operation that is not over";
  EXPECT_NE(Refused(PutOp("one", {}, {}), kFailedPrecondition).find(in_use), std::string::npos);
  EXPECT_NE(Refused(PutOp("one", {1}, engine_->Lease(1)), kFailedPrecondition).find(in_use),
            std::string::npos);
  EXPECT_EQ(engine_->Do(PutOp("two", {1}, engine_->Lease(1))).code(), 0) << "another set is not held up";
  hold_.Release();
  EXPECT_EQ(prune->Await().prune().released(), 2);
  EXPECT_EQ(Put(PutOp("one", {}, {})).released(), 3);
}

// The whole way of EpiCache: history, compacted for an episode by its patched prompt, put, and found by a
// question.
TEST_F(EpisodesTest, ASetIsMadeByAPatchedPromptAndFoundByAQuestion) {
  const Refs history = LeaseWith(engine_.get(), {1, 2, 3});
  // Key d of token t points along dim d in block d alone.
  for (uint32_t block = 0; block < 3; ++block) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t token = 0; token < kTokens; ++token) {
        for (uint32_t head = 0; head < kHeads; ++head) {
          for (uint32_t dim = 0; dim < kDim; ++dim) {
            *Element(history[block], false, layer, token, head, dim) = dim == block ? 1 : 0;
          }
        }
      }
    }
  }
  Refs tables[3];
  for (uint32_t topic = 0; topic < 3; ++topic) {
    v1::Operation compact = CompactOp(history, kTokens);
    compact.mutable_compact()->mutable_policy()->set_name("epicache");
    compact.mutable_compact()->set_keep_sources(true);
    v1::QueryWindow* prompt = compact.mutable_compact()->mutable_signals()->mutable_window();
    // More queries than the sequence has tokens: they are not its own.
    prompt->set_behind(true);
    prompt->set_queries(20);
    prompt->set_q_heads(kHeads);
    std::vector<float> queries(size_t{kLayers} * 20 * kHeads * kDim);
    for (size_t i = 0; i < queries.size(); ++i) queries[i] = i % kDim == topic ? 8 : 0;
    prompt->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
    const v1::OperationResult result = Run(engine_.get(), compact);
    ASSERT_EQ(result.code(), 0) << result.message();
    tables[topic] = TableOf(result.compact());
    ASSERT_EQ(tables[topic].size(), 1u);
    EXPECT_EQ(ValueAt(tables[topic][0], 0), static_cast<float>(topic + 1));
    std::vector<float> centroid(3);
    centroid[topic] = 1;
    Put(PutOp("topic" + std::to_string(topic), centroid, tables[topic]));
    engine_->Release(tables[topic]);
  }
  engine_->Release(history);
  EXPECT_EQ(Blocks().leased(), 4) << "a block for each topic, and the sink";
  EXPECT_EQ(BlocksOf(Choose({0.2f, 0.9f, 0.1f})), tables[1]);
}

TEST_F(EpisodesTest, QueriesBehindTheSequenceSeeAllOfIt) {
  const Refs blocks = LeaseWith(engine_.get(), {1});
  v1::Operation operation = ScoreOp(blocks);
  operation.mutable_score()->mutable_policy()->set_name("epicache");
  v1::QueryWindow* window = operation.mutable_score()->mutable_signals()->mutable_window();
  window->set_queries(4);
  window->set_q_heads(kHeads);
  const std::vector<float> queries(size_t{kLayers} * 4 * kHeads * kDim, 1);
  window->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
  // Equal keys share attention equally: the first query of the sequence's own sees one key.
  EXPECT_NEAR(Run(engine_.get(), operation).score().token_scores(0), 1, 1e-5);
  window->set_behind(true);
  const v1::ScoreResult behind = Run(engine_.get(), operation).score();
  for (int token = 0; token < 4; ++token) EXPECT_NEAR(behind.token_scores(token), 0.25, 1e-5);
}

// ------------------------------------------------------------------------------------------------- hints

v1::TokenRange Range(uint32_t begin, uint32_t end) {
  v1::TokenRange range;
  range.set_begin(begin);
  range.set_end(end);
  return range;
}

TEST_F(EpisodesTest, WhatIsNotReadAgainLeavesFirst) {
  const Refs blocks = LeaseWith(engine_.get(), {1, 9, 2, 8, 3});
  const auto victims = [&](uint32_t budget, const std::vector<v1::TokenRange>& discard) {
    v1::Operation operation = PruneOp(blocks, budget * kTokens);
    operation.mutable_prune()->set_dry_run(true);
    operation.mutable_prune()->mutable_protection();
    for (const v1::TokenRange& range : discard) *operation.mutable_prune()->add_discard() = range;
    const v1::PruneResult result = Prune(engine_.get(), operation);
    return std::vector<uint32_t>(result.victims().begin(), result.victims().end());
  };
  using Indices = std::vector<uint32_t>;
  EXPECT_EQ(victims(4, {}), Indices{0});
  EXPECT_EQ(victims(4, {Range(4, 8)}), Indices{1}) << "whatever its score";
  EXPECT_EQ(victims(3, {Range(4, 8)}), (Indices{0, 1})) << "and then by score";
  EXPECT_EQ(victims(4, {Range(4, 8), Range(12, 16)}), Indices{3}) << "of several the lowest";
  EXPECT_EQ(victims(4, {Range(4, 6), Range(6, 8)}), Indices{1}) << "together they are the block";
  EXPECT_EQ(victims(4, {Range(5, 8)}), Indices{0}) << "a token of the block may be read";
  EXPECT_EQ(victims(5, {Range(0, 20)}), Indices{}) << "within the budget nothing leaves";
  v1::Operation beyond = PruneOp(blocks, kTokens);
  *beyond.mutable_prune()->add_discard() = Range(4, 21);
  EXPECT_EQ(Run(engine_.get(), beyond).message(), "prune.discard ends at 21; the sequence has 20 tokens");
}

TEST_F(EpisodesTest, WhatIsProtectedStaysThoughNothingReadsIt) {
  const Refs blocks = LeaseWith(engine_.get(), {1, 9, 2});
  v1::Operation operation = PruneOp(blocks, 2 * kTokens);
  *operation.mutable_prune()->add_discard() = Range(0, 4);
  const v1::PruneResult result = Prune(engine_.get(), operation);
  ASSERT_EQ(result.victims_size(), 1);
  EXPECT_EQ(result.victims(0), 1) << "paged_eviction protects the first and the newest block";
}

TEST_F(EpisodesTest, CompactLeavesOutTokensThatNothingReads) {
  const Refs blocks = engine_->Lease(2);
  Write(blocks[0], {9, 8, 7, 6});
  Write(blocks[1], {1, 2, 3, 4});
  for (const v1::Scope scope : {v1::SCOPE_SEQUENCE, v1::SCOPE_HEAD}) {
    v1::Operation operation = CompactOp(blocks, 4);
    v1::Compact* compact = operation.mutable_compact();
    compact->mutable_protection();
    compact->set_scope(scope);
    compact->set_keep_sources(true);
    *compact->add_discard() = Range(0, 2);
    const v1::OperationResult result = Run(engine_.get(), operation);
    ASSERT_EQ(result.code(), 0) << result.message();
    const auto& kept = result.compact().kept_positions();
    ASSERT_EQ(kept.size(), static_cast<int>(4 * result.compact().rows()));
    for (int i = 0; i < kept.size(); ++i) {
      EXPECT_EQ(kept[i], (std::vector<uint32_t>{2, 3, 6, 7}[i % 4])) << i;
    }
  }
}

}  // namespace
}  // namespace kvpool
