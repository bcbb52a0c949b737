// Compact with HEADS_ADA and HEADS_GIVEN: what each head keeps, where padding is and that nothing counts it, once and again.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <tuple>

#include "cuda/scorers/select.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;
using Tokens = std::vector<uint32_t>;
using Rows = std::vector<Tokens>;  // One for each plane.

constexpr uint32_t kPlanes = kLayers * kHeads;

class HeadsTest : public ScoreTest {
 protected:
  ~HeadsTest() override { daemon_.reset(); }

  void SetUp() override {
    StartScoring(2);
    engine_ = OpenScored();
    blocks_ = engine_->Lease(6);
    last_tokens_ = kTokens - 1;
    for (uint32_t token = 0; token < tokens(); ++token) Fill(token);
  }

  uint32_t tokens() const {
    return static_cast<uint32_t>((blocks_.size() - 1) * kTokens +
                                 (last_tokens_ == 0 ? kTokens : last_tokens_));
  }
  float* At(const Refs& blocks, bool value, uint32_t plane, uint32_t token, uint32_t dim) {
    return Element(blocks[token / kTokens], value, plane / kHeads, token % kTokens, plane % kHeads, dim);
  }
  // Heads differ in how far their keys are apart, and so in their scores.
  void Fill(uint32_t token) {
    for (uint32_t plane = 0; plane < kPlanes; ++plane) {
      for (uint32_t dim = 0; dim < kDim; ++dim) {
        const float x = static_cast<float>(random_() % 2000) / 1000 - 1;
        *At(blocks_, false, plane, token, dim) = plane % kHeads == 0 ? 2 + x / 2 : x;
        *At(blocks_, true, plane, token, dim) = static_cast<float>(random_() % 2000) / 1000 - 1;
      }
    }
  }
  std::vector<float> RowOf(const Refs& blocks, uint32_t plane, uint32_t token) {
    std::vector<float> row;
    for (const bool value : {false, true})
      for (uint32_t dim = 0; dim < kDim; ++dim) row.push_back(*At(blocks, value, plane, token, dim));
    return row;
  }

  // KeyDiff of one plane's tokens: minus the cosine of a key and the mean of all keys of length 1.
  std::vector<double> KeyDiff(uint32_t plane, const Tokens& of) {
    std::vector<std::vector<double>> units;
    std::vector<double> anchor(kDim), scores;
    double square = 0;
    for (const uint32_t token : of) {
      std::vector<double> unit;
      double norm = 0;
      for (uint32_t dim = 0; dim < kDim; ++dim) unit.push_back(*At(blocks_, false, plane, token, dim));
      for (const double x : unit) norm += x * x;
      for (uint32_t dim = 0; dim < kDim; ++dim) anchor[dim] += unit[dim] /= std::sqrt(norm);
      units.push_back(unit);
    }
    for (const double x : anchor) square += x * x;
    for (const std::vector<double>& unit : units) {
      double dot = 0;
      for (uint32_t dim = 0; dim < kDim; ++dim) dot += unit[dim] * anchor[dim];
      scores.push_back(-dot / std::sqrt(square));
    }
    return scores;
  }

  // SnapKV of a window of the newest query alone: its attention.
  std::vector<double> Attention(uint32_t plane, const Tokens& of) {
    std::vector<double> scores;
    double sum = 0;
    for (const uint32_t token : of) {
      double logit = 0;
      for (uint32_t dim = 0; dim < kDim; ++dim)
        logit += double{*At(blocks_, false, plane, token, dim)} * query_[plane * kDim + dim];
      scores.push_back(std::exp(logit / std::sqrt(kDim)));
      sum += scores.back();
    }
    for (double& score : scores) score /= sum;
    return scores;
  }

  // What heads keep of `rows`: first their own best, then the best of the layer one by one.
  Rows Share(const Rows& rows, uint32_t budget, uint32_t least, uint32_t most) {
    Rows kept(kPlanes);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<std::tuple<double, uint32_t, uint32_t>> best;  // (minus the score, plane, token)
      for (uint32_t plane = layer * kHeads; plane < (layer + 1) * kHeads; ++plane) {
        const std::vector<double> scores =
            query_.empty() ? KeyDiff(plane, rows[plane]) : Attention(plane, rows[plane]);
        for (size_t i = 0; i < scores.size(); ++i) best.emplace_back(-scores[i], plane, rows[plane][i]);
      }
      std::sort(best.begin(), best.end());
      uint32_t in_all = 0;
      for (const bool safe : {true, false}) {
        for (const auto& [score, plane, token] : best) {
          Tokens& own = kept[plane];
          if (std::count(own.begin(), own.end(), token) != 0) continue;
          if (safe ? own.size() >= least : own.size() >= most || in_all >= kHeads * budget) continue;
          own.push_back(token);
          ++in_all;
        }
      }
    }
    for (Tokens& own : kept) std::sort(own.begin(), own.end());
    return kept;
  }

  v1::Operation AdaOp(uint32_t budget) {
    v1::Operation operation = CompactOp(blocks_, budget);
    v1::Compact* const compact = operation.mutable_compact();
    compact->mutable_sequence()->set_last_block_tokens(last_tokens_);
    compact->mutable_policy()->set_name("keydiff");
    if (!query_.empty()) {
      compact->mutable_policy()->set_name("snapkv");
      (*compact->mutable_policy()->mutable_params())["pool"] = "none";
      v1::QueryWindow* const window = compact->mutable_signals()->mutable_window();
      window->set_queries(1);
      window->set_q_heads(kHeads);
      window->mutable_data()->set_inlined(query_.data(), query_.size() * sizeof(float));
    }
    compact->mutable_protection();
    compact->set_scope(v1::SCOPE_HEAD);
    compact->set_heads(v1::HEADS_ADA);
    return operation;
  }
  v1::Operation GivenOp(uint32_t budget, const Tokens& tokens) {
    v1::Operation operation = AdaOp(budget);
    operation.mutable_compact()->set_heads(v1::HEADS_GIVEN);
    operation.mutable_compact()->mutable_ada()->mutable_tokens()->Assign(tokens.begin(), tokens.end());
    return operation;
  }
  // So many of each row by its plane's own scores.
  Rows BestOf(const Rows& rows, const Tokens& given) {
    Rows kept;
    for (uint32_t plane = 0; plane < kPlanes; ++plane) {
      const std::vector<double> scores = KeyDiff(plane, rows[plane]);
      Tokens order(rows[plane].size());
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
      order.resize(std::min<size_t>(order.size(), given[plane]));
      Tokens& own = kept.emplace_back();
      for (const uint32_t i : order) own.push_back(rows[plane][i]);
      std::sort(own.begin(), own.end());
    }
    return kept;
  }
  // The answer has these rows, and its table their bytes and zeros.
  void Expect(const v1::CompactResult& result, const Rows& rows) {
    uint32_t length = 0;
    Tokens counts, positions;
    for (const Tokens& row : rows) {
      counts.push_back(static_cast<uint32_t>(row.size()));
      positions.insert(positions.end(), row.begin(), row.end());
      length = std::max(length, counts.back());
    }
    EXPECT_EQ(Tokens(result.counts().begin(), result.counts().end()), counts);
    EXPECT_EQ(Tokens(result.kept_positions().begin(), result.kept_positions().end()), positions);
    EXPECT_EQ(result.rows(), kPlanes);
    ASSERT_EQ(result.table_size(), (length + kTokens - 1) / kTokens);
    EXPECT_EQ(result.last_block_tokens(), (length - 1) % kTokens + 1);
    EXPECT_EQ(result.kept_digest().size(), 32u);
    const Refs table = TableOf(result);
    for (uint32_t plane = 0; plane < kPlanes; ++plane) {
      for (uint32_t i = 0; i < length; ++i) {
        const bool is_padding = i >= rows[plane].size();
        EXPECT_EQ(RowOf(table, plane, i),
                  is_padding ? std::vector<float>(2 * kDim) : RowOf(blocks_, plane, rows[plane][i]))
            << "plane " << plane << ", place " << i;
      }
    }
  }
  // Takes the new table, with so many tokens more behind it. Returns each plane's tokens.
  Rows GoOn(const v1::CompactResult& result, uint32_t more) {
    const uint32_t length = (result.table_size() - 1) * kTokens + result.last_block_tokens();
    blocks_ = TableOf(result);
    while (blocks_.size() * kTokens < length + more) blocks_.push_back(engine_->Lease(1)[0]);
    last_tokens_ = (length + more) % kTokens;
    Rows rows;
    for (const uint32_t count : result.counts()) {
      Tokens& row = rows.emplace_back(count);
      for (uint32_t i = 0; i < count; ++i) row[i] = i;
      for (uint32_t i = length; i < length + more; ++i) row.push_back(i);
    }
    for (uint32_t i = length; i < length + more; ++i) Fill(i);
    return rows;
  }
  void Tell(const v1::CompactResult& before, v1::Operation* operation) {
    v1::AdaTerms* const terms = operation->mutable_compact()->mutable_ada();
    *terms->mutable_counts() = before.counts();
    terms->set_counted_tokens((before.table_size() - 1) * kTokens + before.last_block_tokens());
  }

  v1::CompactResult Compact(const v1::Operation& operation) {
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), 0) << answer.message();
    return answer.compact();
  }
  void Refused(const v1::Operation& operation, int code, const std::string& words) {
    const v1::StateCounts before = Blocks();
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), code) << words;
    EXPECT_NE(answer.message().find(words), std::string::npos) << answer.message();
    EXPECT_EQ(Blocks().SerializeAsString(), before.SerializeAsString());
  }
  Rows All() const {
    Rows rows(kPlanes, Tokens(tokens()));
    for (Tokens& row : rows)
      for (uint32_t i = 0; i < tokens(); ++i) row[i] = i;
    return rows;
  }

  std::minstd_rand random_{7};
  std::unique_ptr<Engine> engine_;
  Refs blocks_;
  uint32_t last_tokens_ = 0;
  std::vector<float> query_;  // [planes][dim], if scores are its attention.
};

TEST_F(HeadsTest, ALayersHeadsShareItsBudgetAndShorterOnesArePadded) {
  v1::Operation operation = AdaOp(9);
  operation.mutable_compact()->mutable_ada()->set_least_share(0.3);
  operation.mutable_compact()->mutable_ada()->set_most_tokens(14);
  operation.mutable_compact()->set_keep_sources(true);
  const Rows expected = Share(All(), 9, /*least=*/2, /*most=*/14);
  EXPECT_NE(expected[0].size(), expected[1].size());
  const v1::CompactResult result = Compact(operation);
  Expect(result, expected);
  EXPECT_EQ(result.kept_positions_size(), static_cast<int>(kPlanes * 9));
  EXPECT_EQ(result.released(), 0);
  EXPECT_EQ(Blocks().leased(), 6 + result.table_size() + 1u)
      << "the sink, and no destination that is not used";
  // The sequence as a whole, by its defaults: a fifth, and twice the budget.
  EXPECT_EQ(engine_->Release(TableOf(result)).refused_size(), 0);
  operation = AdaOp(5);
  operation.mutable_compact()->set_keep_sources(true);
  Expect(Compact(operation), Share(All(), 5, /*least=*/1, /*most=*/10));
}

TEST_F(HeadsTest, WithinItsBudgetNothingMovesAndSourcesAreReleasedOtherwise) {
  v1::CompactResult result = Compact(AdaOp(23));
  EXPECT_EQ(TableOf(result), blocks_);
  EXPECT_EQ(result.counts_size(), 0);
  EXPECT_TRUE(result.kept_digest().empty());
  // The longest list may be as long as the sequence: it lost tokens all the same.
  v1::Operation operation = AdaOp(21);
  const Rows expected = Share(All(), 21, /*least=*/4, /*most=*/23);
  ASSERT_EQ(std::max({expected[0].size(), expected[1].size(), expected[2].size(), expected[3].size()}), 23u);
  operation.mutable_compact()->set_keep_sources(true);
  Expect(result = Compact(operation), expected);
  engine_->Release(TableOf(result));
  operation.mutable_compact()->set_keep_sources(false);
  result = Compact(operation);
  EXPECT_EQ(result.released(), 6 - result.moved_from_block());
  EXPECT_EQ(Blocks().leased(), result.table_size() + 1u);
  EXPECT_EQ(engine_->Release(TableOf(result)).refused_size(), 0);
}

TEST_F(HeadsTest, PaddingIsNeitherScoredNorKeptWhenTheSequenceGoesOn) {
  v1::Operation operation = AdaOp(9);
  v1::CompactResult before = Compact(operation);
  for (int round = 0; round < 4; ++round) {
    const Rows rows = GoOn(before, 5);
    operation = AdaOp(9);
    Tell(before, &operation);
    operation.mutable_compact()->set_keep_sources(true);
    const v1::CompactResult result = Compact(operation);
    Expect(result, Share(rows, 9, /*least=*/1, /*most=*/18));
    EXPECT_EQ(result.kept_positions_size(), static_cast<int>(kPlanes * 9)) << "round " << round;
    engine_->Release(blocks_);
    before = result;
  }
  // Fewer tokens are there than there is room for: all stay, though the sequence is longer than its budget.
  const Rows rows = GoOn(before, 1);
  ASSERT_GT(tokens(), 11u);
  operation = AdaOp(11);
  Tell(before, &operation);
  operation.mutable_compact()->set_keep_sources(true);
  Expect(Compact(operation), rows);
}

// Had it a share of the softmax, heads with much of it would lose tokens to others.
TEST_F(HeadsTest, PaddingIsNotAttended) {
  for (uint32_t i = 0; i < kPlanes * kDim; ++i)
    query_.push_back(static_cast<float>(random_() % 2000) / 1000 - (i / kDim % kHeads == 0 ? 2 : 1));
  v1::Operation operation = AdaOp(7);
  v1::CompactResult before = Compact(operation);
  for (int round = 0; round < 4; ++round) {
    const Rows rows = GoOn(before, 5);
    operation = AdaOp(7);
    Tell(before, &operation);
    operation.mutable_compact()->set_keep_sources(true);
    const v1::CompactResult result = Compact(operation);
    Expect(result, Share(rows, 7, /*least=*/1, /*most=*/14));
    engine_->Release(blocks_);
    before = result;
  }
}

TEST_F(HeadsTest, WhatIsDiscardedLeavesAndWhatIsProtectedStays) {
  v1::Operation operation = AdaOp(9);
  v1::Compact* const compact = operation.mutable_compact();
  v1::TokenRange* range = compact->add_discard();
  range->set_begin(4);
  range->set_end(9);
  range = compact->add_protect();
  range->set_begin(0);
  range->set_end(2);
  const v1::CompactResult result = Compact(operation);
  EXPECT_EQ(result.kept_positions_size(), static_cast<int>(kPlanes * 9));
  int first = 0;
  for (const uint32_t count : result.counts()) {
    const Tokens row(result.kept_positions().begin() + first,
                     result.kept_positions().begin() + first + count);
    first += static_cast<int>(count);
    ASSERT_GE(row.size(), 2u);
    EXPECT_EQ(row[0], 0u);
    EXPECT_EQ(row[1], 1u);
    for (const uint32_t token : row) EXPECT_TRUE(token < 4 || token >= 9) << token;
  }
}

// Then nothing is scored.
TEST_F(HeadsTest, WhatIsDiscardedMayBeEnough) {
  v1::Operation operation = AdaOp(9);
  operation.mutable_compact()->set_keep_sources(true);
  v1::TokenRange* const range = operation.mutable_compact()->add_discard();
  range->set_begin(9);
  range->set_end(tokens());
  Tokens first(9);
  for (uint32_t i = 0; i < 9; ++i) first[i] = i;
  Expect(Compact(operation), Rows(kPlanes, first));
}

// A policy of whole blocks keeps the part of a block behind them, too: most_tokens is not below that.
TEST_F(HeadsTest, APolicyMayKeepMoreThanTheBudget) {
  v1::Operation operation = AdaOp(8);
  v1::Compact* const compact = operation.mutable_compact();
  compact->mutable_policy()->set_name("paged_eviction");
  compact->mutable_ada()->set_most_tokens(8);
  compact->set_keep_sources(true);
  v1::TokenRange* const range = compact->add_protect();
  range->set_begin(6);
  range->set_end(6 + 8 + last_tokens_);
  Tokens kept(8 + last_tokens_);
  for (uint32_t i = 0; i < kept.size(); ++i) kept[i] = 6 + i;
  Expect(Compact(operation), Rows(kPlanes, kept));
}

TEST_F(HeadsTest, ADeviceErrorGivesDestinationsBack) {
  const v1::CompactResult before = Compact(AdaOp(9));
  GoOn(before, 5);
  v1::Operation operation = AdaOp(9);
  Tell(before, &operation);
  hold_.FailWith(absl::ResourceExhaustedError("out of memory"));
  Refused(operation, kResourceExhausted, "out of memory");
  hold_.FailWith(absl::OkStatus());
  EXPECT_EQ(engine_->Release(blocks_).refused_size(), 0);
}

TEST_F(HeadsTest, WhatCanNotBeIsRefused) {
  v1::Operation operation = AdaOp(9);
  v1::Compact* const compact = operation.mutable_compact();
  v1::AdaTerms* const terms = compact->mutable_ada();
  compact->set_heads(static_cast<v1::Heads>(4));
  Refused(operation, kInvalidArgument, "compact.heads is 4, which is none of its values");
  compact->set_heads(v1::HEADS_EQUAL);
  Refused(operation, kInvalidArgument,
          "compact.ada goes with HEADS_ADA and HEADS_GIVEN; heads is HEADS_EQUAL");
  compact->set_heads(v1::HEADS_ADA);
  compact->set_scope(v1::SCOPE_LAYER);
  Refused(operation, kInvalidArgument, "scope is SCOPE_LAYER, disposition DISPOSITION_UNSPECIFIED");
  compact->set_scope(v1::SCOPE_HEAD);
  compact->set_disposition(v1::DISPOSITION_MERGE);
  Refused(operation, kInvalidArgument, "scope is SCOPE_HEAD, disposition DISPOSITION_MERGE");
  compact->set_disposition(v1::DISPOSITION_DROP);
  for (const double share : {-0.1, 1.1, static_cast<double>(NAN)}) {
    terms->set_least_share(share);
    Refused(operation, kInvalidArgument, "; must be 0 to 1");
  }
  terms->set_least_share(1);
  terms->set_most_tokens(8);
  Refused(operation, kInvalidArgument, "compact.ada.most_tokens is 8; must be 9 to 16777216");
  terms->set_most_tokens(0);
  terms->set_counted_tokens(12);
  Refused(operation, kInvalidArgument, "compact.ada.counted_tokens is 12; must be 0 without counts");
  for (const uint32_t count : {4u, 13u, 12u}) terms->add_counts(count);
  Refused(operation, kInvalidArgument, "compact.ada.counts has 13; must be at most counted_tokens, 12");
  terms->set_counts(1, 12);
  Refused(operation, kInvalidArgument, "counts has 3 numbers; must have none, or one for each of 4 planes");
  terms->add_counts(0);
  terms->set_counted_tokens(24);
  Refused(operation, kInvalidArgument, "compact.ada.counted_tokens is 24; the sequence has 23 tokens");
  terms->set_counted_tokens(23);
  for (uint32_t& count : *terms->mutable_counts()) count = 0;
  Refused(operation, kInvalidArgument, "no token would stay");
  compact->clear_ada();
  v1::TokenRange* const range = compact->add_protect();
  range->set_end(10);
  Refused(operation, kInvalidArgument, "14 of 23 must leave for the budget, but 10 are protected");
  operation = CompactOp(blocks_, 9);
  operation.mutable_compact()->mutable_keep()->add_positions(3);
  operation.mutable_compact()->set_heads(v1::HEADS_ADA);
  Refused(operation, kInvalidArgument, "disposition DISPOSITION_UNSPECIFIED, and keep is set");
  operation = AdaOp(9);
  EXPECT_EQ(Run(engine_.get(), operation).code(), 0);
}

TEST_F(HeadsTest, EachHeadKeepsWhatItIsGivenOnceAndAgain) {
  const Tokens given = {3, 17, 1, 13};  // 34 of 4 * 9 at most
  v1::CompactResult before;
  for (int round = 0; round < 4; ++round) {
    // Behind the padding of a head are tokens that came since.
    const Rows rows = round == 0 ? All() : GoOn(before, 5);
    v1::Operation operation = GivenOp(9, given);
    if (round > 0) Tell(before, &operation);
    operation.mutable_compact()->set_keep_sources(true);
    const v1::CompactResult result = Compact(operation);
    Expect(result, BestOf(rows, given));
    engine_->Release(blocks_);
    before = result;
  }
}

TEST_F(HeadsTest, WhatIsProtectedStaysAlsoWhereItIsMoreThanIsGiven) {
  v1::Operation operation = GivenOp(9, {2, 16, 9, 9});
  operation.mutable_compact()->mutable_protection()->set_first_tokens(3);
  const v1::CompactResult result = Compact(operation);
  ASSERT_EQ(Tokens(result.counts().begin(), result.counts().end()), (Tokens{3, 16, 9, 9}));
  EXPECT_EQ(Tokens(result.kept_positions().begin(), result.kept_positions().begin() + 3), (Tokens{0, 1, 2}));
}

TEST_F(HeadsTest, WhereNothingHasToLeaveNoHeadLosesWhatItIsNotGiven) {
  const v1::CompactResult result = Compact(GivenOp(23, {1, 1, 1, 1}));
  EXPECT_EQ(TableOf(result), blocks_);
  EXPECT_EQ(result.counts_size(), 0);
}

TEST_F(HeadsTest, WhatCanNotBeGivenIsRefused) {
  Refused(GivenOp(9, {}), kInvalidArgument, "compact.ada.tokens is 0; must be 1 to 262144");
  Refused(GivenOp(9, {9, 9, 9}), kInvalidArgument,
          "compact.ada.tokens has 3 numbers, in sum 27; must have one for each of 4 planes");
  Refused(GivenOp(9, {9, 9, 9, 10}), kInvalidArgument,
          "in sum 37; must have one for each of 4 planes, in sum at most");
  Refused(GivenOp(9, {9, 9, 0, 9}), kInvalidArgument, "compact.ada.tokens is 0; must be 1 to 16777216");
  v1::Operation operation = GivenOp(9, {9, 9, 9, 9});
  operation.mutable_compact()->mutable_ada()->set_least_share(0.5);
  Refused(operation, kInvalidArgument,
          "compact.ada.least_share is 0.5 and most_tokens 0; must be 0 with HEADS_GIVEN");
  operation.mutable_compact()->mutable_ada()->set_least_share(0);
  operation.mutable_compact()->set_heads(v1::HEADS_ADA);
  Refused(operation, kInvalidArgument, "compact.ada.tokens is 4; must be 0 to 0");
  EXPECT_EQ(Compact(GivenOp(9, {9, 9, 9, 9})).counts_size(), 4);
}

class ShortTimeTest : public ScoreTest {
 protected:
  ~ShortTimeTest() override { daemon_.reset(); }
};

// 1500 blocks of 4 tokens, 4 heads.
TEST_F(ShortTimeTest, RankingTakesTime) {
  options_.score_time_ms = 1;
  slab_blocks_ = 96;
  StartScoring(1);
  v1::OpenSession request = ScoredRequest();
  request.mutable_layout()->set_block_bytes(512);
  const auto engine = OpenEngine(request, "engine");
  Settle({engine.get()});
  v1::Operation operation = CompactOp(engine->Lease(1500), 9);
  v1::Compact* const compact = operation.mutable_compact();
  compact->mutable_policy()->set_name("recency");
  compact->set_scope(v1::SCOPE_HEAD);
  EXPECT_EQ(Run(engine.get(),
                [&] {
                  v1::Operation alone = operation;
                  alone.mutable_compact()->set_keep_sources(true);
                  return alone;
                }())
                .code(),
            0)
      << "heads of equal lengths";
  compact->set_heads(v1::HEADS_ADA);
  const v1::OperationResult answer = Run(engine.get(), operation);
  EXPECT_EQ(answer.code(), kResourceExhausted);
  EXPECT_NE(answer.message().find(", and ranks 24000 scores of heads, about "), std::string::npos)
      << answer.message();
}

class SmallWorkspaceTest : public HeadsTest {
 protected:
  void SetUp() override {
    options_.score_workspace_bytes = 100'000;
    HeadsTest::SetUp();
  }
};

TEST_F(SmallWorkspaceTest, CopiesOfBlocksWithPaddingCount) {
  const v1::CompactResult before = Compact(AdaOp(9));
  GoOn(before, 5);
  v1::Operation operation = AdaOp(9);
  Tell(before, &operation);
  Refused(operation, kResourceExhausted, " of copies of blocks with padding; the limit is 100000");
}

}  // namespace
}  // namespace kvpool
