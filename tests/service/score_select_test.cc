// Select: the blocks that it answers, against Quest's formula in doubles, and what it refuses.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;

constexpr uint32_t kSequenceBlocks = 6;

class SelectTest : public ScoreTest {
 protected:
  void SetUp() override {
    StartScoring(1);
    engine_ = OpenScored();
    blocks_ = engine_->Lease(kSequenceBlocks);
    for (const uint64_t block : blocks_) {
      for (uint32_t i = 0; i < 2 * kLayers * kTokens * kHeads * kDim; ++i) {
        Element(block, false, 0, 0, 0, 0)[i] = Uniform();
      }
    }
    queries_.resize(size_t{kLayers} * kQueries * kQueryHeads * kDim);
    for (float& x : queries_) x = 3 * Uniform();
  }
  // From -1 to 1.
  float Uniform() { return static_cast<float>(random_() % 2001) / 1000 - 1; }

  v1::Operation SelectOp(const Refs& blocks, uint32_t budget_blocks, uint32_t last_block_tokens = 0) {
    v1::Operation operation;
    v1::Select* select = operation.mutable_select();
    select->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
    select->mutable_sequence()->set_last_block_tokens(last_block_tokens);
    select->mutable_window()->set_queries(kQueries);
    select->mutable_window()->set_q_heads(kQueryHeads);
    select->mutable_window()->mutable_data()->set_inlined(queries_.data(), queries_.size() * sizeof(float));
    select->set_budget_blocks(budget_blocks);
    select->set_bounds(true);
    return operation;
  }
  v1::SelectResult Select(const v1::Operation& operation) {
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), 0) << answer.message();
    return answer.select();
  }
  void Refused(const v1::Operation& operation, int code, const std::string& words) {
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), code) << words << ": " << answer.message();
    EXPECT_NE(answer.message().find(words), std::string::npos) << answer.message();
  }
  static std::vector<uint32_t> Row(const v1::SelectResult& result, uint32_t row) {
    const auto first = result.positions().begin() + row * result.selected();
    return {first, first + result.selected()};
  }

  // The bound of a block by the paper's formula for the mean of the heads that share a kv head, the greatest over the queries.
  double BoundOf(uint32_t layer, uint32_t head, uint32_t block, uint32_t tokens) {
    double greatest = -INFINITY;
    for (uint32_t query = 0; query < kQueries; ++query) {
      const float* const q = &queries_[((layer * kQueries + query) * kQueryHeads + head * kGroup) * kDim];
      double bound = 0;
      for (uint32_t dim = 0; dim < kDim; ++dim) {
        double mean = 0, low = INFINITY, high = -INFINITY;
        for (uint32_t in_group = 0; in_group < kGroup; ++in_group) {
          mean += double{q[in_group * kDim + dim]} / kGroup;
        }
        for (uint32_t token = 0; token < tokens; ++token) {
          const double k = *Element(blocks_[block], false, layer, token, head, dim);
          low = std::min(low, k);
          high = std::max(high, k);
        }
        bound += std::max(mean * low, mean * high);
      }
      greatest = std::max(greatest, bound / std::sqrt(double{kDim}));
    }
    return greatest;
  }

  std::minstd_rand random_{17};
  std::unique_ptr<Engine> engine_;
  Refs blocks_;
  std::vector<float> queries_;
};

TEST_F(SelectTest, AnswersTheGreatestBoundsOfEachPlaneBestFirst) {
  for (uint32_t last = 1; last <= kTokens; ++last) {
    const v1::SelectResult result = Select(SelectOp(blocks_, 4, last));
    ASSERT_EQ(result.rows(), kLayers * kHeads);
    ASSERT_EQ(result.selected(), 4);
    ASSERT_EQ(result.positions_size(), 16);
    ASSERT_EQ(result.bounds_size(), 16);
    for (uint32_t row = 0; row < result.rows(); ++row) {
      std::vector<double> bounds;
      for (uint32_t block = 0; block < kSequenceBlocks; ++block) {
        bounds.push_back(
            BoundOf(row / kHeads, row % kHeads, block, block + 1 < kSequenceBlocks ? kTokens : last));
      }
      std::vector<uint32_t> best(kSequenceBlocks);
      std::iota(best.begin(), best.end(), 0);
      std::sort(best.begin(), best.end(), [&](uint32_t a, uint32_t b) { return bounds[a] > bounds[b]; });
      best.resize(4);
      EXPECT_EQ(Row(result, row), best) << "row " << row;
      for (uint32_t i = 0; i < 4; ++i) {
        EXPECT_NEAR(result.bounds(static_cast<int>(row * 4 + i)), bounds[best[i]], 1e-5) << "row " << row;
      }
    }
  }
}

TEST_F(SelectTest, ReadsAFullBlockOnceAndDropsNothing) {
  const std::string before = Blocks().SerializeAsString();
  EXPECT_EQ(Select(SelectOp(blocks_, 2, 1)).blocks_read(), kSequenceBlocks);
  EXPECT_EQ(Select(SelectOp(blocks_, 2, 2)).blocks_read(), 1) << "the one that is not full";
  EXPECT_EQ(Select(SelectOp(blocks_, 2)).blocks_read(), 1);
  EXPECT_EQ(Select(SelectOp(blocks_, 2)).blocks_read(), 0);
  v1::Operation fresh = SelectOp(blocks_, 2);
  fresh.mutable_select()->mutable_sequence()->set_fresh(true);
  EXPECT_EQ(Select(fresh).blocks_read(), kSequenceBlocks);
  EXPECT_EQ(Blocks().SerializeAsString(), before);
  EXPECT_EQ(engine_->Release(blocks_).refused_size(), 0);
}

TEST_F(SelectTest, BoundsOfKeysAreSharedWithMpcache) {
  Select(SelectOp(blocks_, 2));
  v1::Operation score = ScoreOp(blocks_);
  score.mutable_score()->mutable_policy()->set_name("mpcache");
  (*score.mutable_score()->mutable_policy()->mutable_params())["stage"] = "dynamic";
  *score.mutable_score()->mutable_signals()->mutable_window() = SelectOp(blocks_, 2).select().window();
  const v1::OperationResult answer = Run(engine_.get(), score);
  EXPECT_EQ(answer.code(), 0) << answer.message();
  EXPECT_EQ(answer.score().blocks_read(), 0);
}

TEST_F(SelectTest, SinksAndTheBlockBeingWrittenAreAlwaysIn) {
  v1::Operation operation = SelectOp(blocks_, 4, 1);
  operation.mutable_select()->set_first_blocks(1);
  operation.mutable_select()->set_last_blocks(2);
  const v1::SelectResult some = Select(operation);
  operation.mutable_select()->set_budget_blocks(5);
  const v1::SelectResult more = Select(operation);
  for (uint32_t row = 0; row < some.rows(); ++row) {
    const std::vector<uint32_t> selected = Row(some, row);
    EXPECT_EQ(std::vector<uint32_t>(selected.begin(), selected.begin() + 3),
              (std::vector<uint32_t>{0, 4, 5}));
    double best = 0;
    for (const uint32_t block : {1u, 2u, 3u}) {
      best = std::max(best, BoundOf(row / kHeads, row % kHeads, block, kTokens));
    }
    EXPECT_NEAR(some.bounds(static_cast<int>(row * 4 + 3)), best, 1e-5);
    const std::vector<uint32_t> of_more = Row(more, row);
    EXPECT_EQ(std::vector<uint32_t>(of_more.begin(), of_more.begin() + 4), selected);
  }
}

TEST_F(SelectTest, ABudgetIsInBlocksOrInWholeBlocksOfTokens) {
  v1::Operation operation = SelectOp(blocks_, 3);
  operation.mutable_select()->set_bounds(false);
  const v1::SelectResult blocks = Select(operation);
  EXPECT_EQ(blocks.bounds_size(), 0);
  for (const uint32_t tokens : {3 * kTokens, 4 * kTokens - 1}) {
    operation.mutable_select()->set_budget_tokens(tokens);
    const v1::SelectResult of_tokens = Select(operation);
    EXPECT_EQ(Row(of_tokens, 1), Row(blocks, 1)) << tokens;
    EXPECT_EQ(of_tokens.selected(), 3);
  }
  operation.mutable_select()->set_budget_blocks(65536);
  operation.mutable_select()->set_first_blocks(65536);
  operation.mutable_select()->set_last_blocks(65536);
  const v1::SelectResult whole = Select(operation);
  EXPECT_EQ(Row(whole, 3), (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
  operation = SelectOp({blocks_[2]}, 1, 1);  // One token.
  operation.mutable_select()->mutable_window()->set_behind(true);
  EXPECT_EQ(Row(Select(operation), 0), std::vector<uint32_t>{0});
}

TEST_F(SelectTest, EqualBoundsGoToTheLatestAndWhatIsNoNumberComesLast) {
  for (const uint64_t block : blocks_) Write(block, {1, 1, 1, 1});
  EXPECT_EQ(Row(Select(SelectOp(blocks_, 6)), 0), (std::vector<uint32_t>{5, 4, 3, 2, 1, 0}));
  *Element(blocks_[4], false, 0, 2, 0, 1) = NAN;
  v1::Operation operation = SelectOp(blocks_, 6);
  operation.mutable_select()->mutable_sequence()->set_fresh(true);
  const v1::SelectResult result = Select(operation);
  EXPECT_EQ(Row(result, 0), (std::vector<uint32_t>{5, 3, 2, 1, 0, 4}));
  EXPECT_TRUE(std::isnan(result.bounds(5)));
  EXPECT_EQ(Row(result, 1), (std::vector<uint32_t>{5, 4, 3, 2, 1, 0})) << "the other head has its numbers";
}

TEST_F(SelectTest, QueriesMayLieInBlocksAndComeWithTheStepThatWritesThem) {
  const v1::Operation inlined = SelectOp(blocks_, 3);
  const v1::SelectResult expected = Select(inlined);
  const Refs scratch = engine_->Lease(1);
  v1::Operation operation = inlined;
  v1::Data* data = operation.mutable_select()->mutable_window()->mutable_data();
  data->clear_inlined();
  data->add_blocks(scratch[0]);
  data->set_offset_bytes(16);
  operation.set_after(3);
  const auto select = Begin(engine_.get(), operation);
  const auto release = Begin(engine_.get(), ReleaseOp({blocks_[0], scratch[0]}, 2));
  engine_->Fence(2);
  EXPECT_FALSE(select->there());
  EXPECT_FALSE(release->there()) << "behind the select, which waits for step 3";
  std::copy(queries_.begin(), queries_.end(), Element(scratch[0], false, 0, 0, 1, 0));
  engine_->Fence(3);
  EXPECT_EQ(select->Await().code(), 0) << select->Await().message();
  EXPECT_EQ(Row(select->Await().select(), 2), Row(expected, 2));
  EXPECT_EQ(release->Await().release().refused_size(), 0);
}

TEST_F(SelectTest, PositionsAreWrittenToBlocksWhereAsked) {
  const Refs into = engine_->Lease(3);
  // They begin so near the end of a block that the rest is in the next one.
  constexpr uint64_t kBegin = kScoredBlockBytes - 5 * sizeof(int32_t);
  v1::Operation operation = SelectOp(blocks_, 3);
  v1::Data* data = operation.mutable_select()->mutable_into();
  data->mutable_blocks()->Add(into.begin(), into.end());
  data->set_offset_bytes(kScoredBlockBytes + kBegin);
  const auto at = [&](uint32_t i) {
    const uint64_t byte = kBegin + i * sizeof(int32_t);
    char* const block =
        reinterpret_cast<char*>(Element(into[1 + byte / kScoredBlockBytes], false, 0, 0, 0, 0));
    return reinterpret_cast<int32_t*>(block + byte % kScoredBlockBytes);
  };
  const uint32_t count = kLayers * kHeads * 3;
  for (uint32_t i = 0; i <= count; ++i) *at(i) = -1;
  *(at(0) - 1) = -1;
  const v1::SelectResult result = Select(operation);
  ASSERT_EQ(result.positions_size(), static_cast<int>(count));
  for (uint32_t i = 0; i < count; ++i) {
    EXPECT_EQ(*at(i), static_cast<int32_t>(result.positions(static_cast<int>(i)))) << i;
  }
  EXPECT_EQ(*at(count), -1);
  EXPECT_EQ(*(at(0) - 1), -1);
}

TEST_F(SelectTest, RefusesBlocksThatPositionsCanNotBeWrittenTo) {
  v1::Operation operation = SelectOp(blocks_, 3);
  const Refs into = engine_->Lease(1);
  const auto refused = [&](const v1::Data& data, int code, const std::string& words) {
    *operation.mutable_select()->mutable_into() = data;
    Refused(operation, code, words);
  };
  v1::Data data;
  refused(data, kInvalidArgument, "select.into.blocks is 0; must be 1 to 65536");
  data.add_blocks(into[0]);
  data.set_inlined("1234");
  refused(data, kInvalidArgument, "select.into.inlined has 4 bytes; must have 0");
  data.clear_inlined();
  data.set_bytes(48);
  refused(data, kInvalidArgument, "select.into.bytes is 48; must be 0");
  data.clear_bytes();
  data.set_offset_bytes(6);
  refused(data, kInvalidArgument, "select.into.offset_bytes is 6; must be a multiple of 4");
  data.set_offset_bytes(kScoredBlockBytes - 44);
  refused(data, kInvalidArgument, "select.into: 1 blocks of 65536 bytes do not hold the 48 bytes");
  data.set_offset_bytes(~uint64_t{3});
  refused(data, kInvalidArgument, "do not hold");
  data.set_offset_bytes(0);
  data.set_blocks(0, blocks_[1]);
  refused(data, kInvalidArgument, "select.into.blocks names block");
  engine_->Seal({into[0]}, {Key("sealed")});
  data.set_blocks(0, into[0]);
  refused(data, kFailedPrecondition, "must be leased");
  const Refs stale = engine_->Lease(1);
  engine_->Release(stale);
  data.set_blocks(0, stale[0]);
  refused(data, kFailedPrecondition, "is stale");
}

TEST_F(SelectTest, RefusesWhatItCanNotAnswer) {
  v1::Operation operation = SelectOp(blocks_, 3);
  v1::Select* select = operation.mutable_select();
  select->clear_budget_blocks();
  Refused(operation, kInvalidArgument, "select has no budget");
  select->set_budget_blocks(0);
  Refused(operation, kInvalidArgument, "select.budget_blocks is 0; must be 1 to 65536");
  select->set_budget_tokens(kTokens - 1);
  Refused(operation, kInvalidArgument,
          "select.budget_tokens is 3; must be at least the tokens of a block, 4");
  select->set_budget_blocks(2);
  select->set_first_blocks(1);
  select->set_last_blocks(2);
  Refused(operation, kInvalidArgument,
          "first_blocks and last_blocks are 3 blocks of this sequence; the budget is 2");
  select->set_first_blocks(65537);
  Refused(operation, kInvalidArgument, "select.first_blocks is 65537; must be 0 to 65536");
  operation = SelectOp(blocks_, 3);
  operation.mutable_select()->clear_window();
  Refused(operation, kInvalidArgument, "select has no window");
  operation = SelectOp(blocks_, 3);
  operation.mutable_select()->mutable_window()->set_q_heads(3);
  Refused(operation, kInvalidArgument, "window.data.inlined has");
  operation = SelectOp({blocks_[0]}, 1, 1);
  Refused(operation, kInvalidArgument, "queries is 2, must be 1 to 1");
  operation = SelectOp({blocks_[0], blocks_[0]}, 1);
  Refused(operation, kInvalidArgument, "sequence.blocks names block");
  const Refs stale = engine_->Lease(1);
  engine_->Release(stale);
  Refused(SelectOp(stale, 1), kFailedPrecondition, "is stale");
  const auto other = OpenScored("other");
  Refused(SelectOp({other->Lease(1)[0]}, 1), kFailedPrecondition, "not held by session");
}

// 1,024 layers of 16 heads, whose keys have one element: as many rows as fit into a block.
TEST_F(ScoreTest, ASelectionBeyondTheLimitOfAnswersIsRefusedWithIt) {
  StartScoring(1);
  v1::OpenSession request = ScoredRequest();
  v1::LayerGroup* group = request.mutable_layout()->mutable_groups(0);
  constexpr uint32_t kManyLayers = 1024, kManyHeads = 16;
  group->clear_layers();
  for (uint32_t layer = 0; layer < kManyLayers; ++layer) group->add_layers(layer);
  group->set_tokens_per_block(1);
  group->set_kv_heads(kManyHeads);
  group->set_k_head_dim(1);
  group->set_v_head_dim(0);
  group->clear_v();
  v1::Plane* k = group->mutable_k();
  k->set_dim_stride_bytes(sizeof(float));
  k->set_head_stride_bytes(sizeof(float));
  k->set_token_stride_bytes(kManyHeads * sizeof(float));
  k->set_layer_stride_bytes(kManyHeads * sizeof(float));
  const auto engine = OpenEngine(request);
  Settle({engine.get()});
  const Refs blocks = engine->Lease(9);
  const std::vector<float> queries(size_t{kManyLayers} * kManyHeads, 1);
  v1::Operation operation;
  v1::Select* select = operation.mutable_select();
  select->mutable_sequence()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  select->mutable_window()->set_queries(1);
  select->mutable_window()->set_q_heads(kManyHeads);
  select->mutable_window()->mutable_data()->set_inlined(queries.data(), queries.size() * sizeof(float));
  select->set_budget_blocks(9);
  select->set_bounds(true);
  const v1::OperationResult refused = Run(engine.get(), operation);
  EXPECT_EQ(refused.code(), kInvalidArgument);
  EXPECT_EQ(refused.message(), "select: the answer would have 294912 numbers; the limit is 262144");
  select->set_budget_blocks(8);
  const v1::OperationResult fits = Run(engine.get(), operation);
  EXPECT_EQ(fits.code(), 0) << fits.message();
  EXPECT_EQ(fits.select().bounds_size(), 131072);
}

}  // namespace
}  // namespace kvpool
