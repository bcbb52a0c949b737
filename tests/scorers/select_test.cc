#include "cuda/scorers/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cuda/scorers/gather.h"
#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/parts/reduce.h"
#include "cuda/scorers/parts/team.h"
#include "tests/scorers/sequence.h"

namespace kvpool::scorers {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kNoScore = std::numeric_limits<float>::quiet_NaN();

absl::StatusOr<std::vector<uint32_t>> Victims(const std::vector<float>& scores, uint32_t count,
                                              std::vector<uint8_t> marks = {}) {
  marks.resize(scores.size());
  std::vector<uint64_t> keys(scores.size());
  std::vector<uint32_t> victims(count);
  const absl::Status status =
      SelectVictims(scores, marks, count, absl::MakeSpan(keys), absl::MakeSpan(victims));
  if (!status.ok()) return status;
  return victims;
}

TEST(SelectTest, NotANumberFirstThenAscending) {
  const std::vector<float> scores = {1, INFINITY, kNoScore, -INFINITY, -1, -kNoScore, 0};
  EXPECT_THAT(Victims(scores, 2).value(), ElementsAre(2, 5));
  EXPECT_THAT(Victims(scores, 3).value(), ElementsAre(2, 3, 5));
  EXPECT_THAT(Victims(scores, 5).value(), ElementsAre(2, 3, 4, 5, 6));
  EXPECT_THAT(Victims(scores, 7).value(), ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(Victims(scores, 0).value(), ElementsAre());
}

TEST(SelectTest, TiesLeaveOldestFirst) {
  EXPECT_THAT(Victims({5, 1, 1, 1, 0}, 3).value(), ElementsAre(1, 2, 4));
  EXPECT_THAT(Victims({0.0f, -0.0f, 0.0f}, 2).value(), ElementsAre(0, 1));
}

TEST(SelectTest, WhatIsProtectedStays) {
  EXPECT_THAT(Victims({0, 1, 2, 3}, 2, {1, 0, 0, 0}).value(), ElementsAre(1, 2));
  const auto none = Victims({0, 1, 2, 3}, 2, {1, 1, 1, 0});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(none.status().message(), HasSubstr("2 of 4 must leave for the budget, but 3 are protected"));
}

// What SelectShared does, by taking the best of all there is one by one.
std::vector<std::vector<uint32_t>> SharedOneByOne(const std::vector<float>& scores,
                                                  const SharedChoice& choice,
                                                  const std::vector<uint8_t>& marks) {
  const uint32_t items = static_cast<uint32_t>(marks.size()), rows = choice.rows;
  const uint32_t kept = items - choice.count - static_cast<uint32_t>(choice.discarded.size());
  const uint32_t least = LeastKept(kept, choice.safeguard);
  std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> all;  // (order of the score, item, row)
  std::vector<uint32_t> stay(rows);
  uint32_t in_all = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t i = 0; i < items; ++i) {
      const bool is_absent =
          !choice.absent.empty() && i >= choice.absent[row].begin && i < choice.absent[row].end;
      if (is_absent) continue;
      if (marks[i] == 0) {
        all.emplace_back(OrderOf(scores[row * items + i]), i, row);
      } else if (std::count(choice.discarded.begin(), choice.discarded.end(), i) == 0) {
        ++stay[row];
      }
    }
    in_all += stay[row];
  }
  std::sort(all.rbegin(), all.rend());
  std::vector<std::vector<uint32_t>> victims(rows);
  for (const bool safe : {true, false}) {
    std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> rest;
    for (const auto& [order, item, row] : all) {
      const bool stays = safe ? stay[row] < least : stay[row] < choice.most && in_all < rows * kept;
      if (stays) {
        ++stay[row];
        ++in_all;
      } else if (safe) {
        rest.emplace_back(order, item, row);
      } else {
        victims[row].push_back(item);
      }
    }
    all = rest;
  }
  for (auto& of : victims) std::sort(of.begin(), of.end());
  return victims;
}

TEST(SelectSharedTest, SameAsOneByOne) {
  Random random(8);
  for (int round = 0; round < 1000; ++round) {
    const uint32_t rows = 1 + random.Below(5), items = 1 + random.Below(60);
    std::vector<float> scores(size_t{rows} * items);
    for (float& x : scores)
      x = round % 2 == 0 ? static_cast<float>(random.Below(5)) : static_cast<float>(random.Normal());
    if (random.Below(3) == 0) scores[random.Below(scores.size())] = kNoScore;
    std::vector<uint8_t> marks(items);
    for (uint8_t& mark : marks) mark = random.Below(5) == 0;
    const uint32_t candidates = static_cast<uint32_t>(std::count(marks.begin(), marks.end(), 0));
    SharedChoice choice = {.rows = rows,
                           .count = static_cast<uint32_t>(random.Below(candidates + 1)),
                           .safeguard = std::vector<double>{0, 0.2, 0.7, 1}[random.Below(4)]};
    std::vector<uint32_t> discarded;
    for (uint32_t i = 0; i < items && round % 3 == 1; ++i)
      if (marks[i] != 0 && random.Below(2) == 0) discarded.push_back(i);
    choice.discarded = discarded;
    const uint32_t kept = items - choice.count - static_cast<uint32_t>(discarded.size());
    if (random.Below(2) == 0) choice.most = kept + static_cast<uint32_t>(random.Below(items));
    std::vector<IndexRange> absent(rows);
    const auto counted = static_cast<uint32_t>(random.Below(items + 1));
    for (IndexRange& range : absent)
      range = {.begin = static_cast<uint32_t>(random.Below(counted + 1)), .end = counted};
    if (round % 4 > 1) choice.absent = absent;
    const auto victims = SelectShared(scores.data(), choice, marks);
    ASSERT_TRUE(victims.ok()) << victims.status();
    EXPECT_EQ(*victims, SharedOneByOne(scores, choice, marks)) << "round " << round;
    size_t leaving = 0;
    for (const auto& of : *victims) leaving += of.size();
    if (choice.absent.empty()) EXPECT_EQ(leaving, size_t{choice.count} * rows);
  }
}

TEST(SelectSharedTest, ARowOfHighScoresKeepsMoreAndTheOtherItsSafeguard) {
  const std::vector<float> scores = {10, 11, 12, 13, 14, 1, 2, 3, 4, 5};
  const std::vector<uint8_t> none(5), first = {1, 0, 0, 0, 0};
  const auto victims = [&](double safeguard, const std::vector<uint8_t>& marks) {
    return SelectShared(scores.data(), {.rows = 2, .count = 2, .safeguard = safeguard}, marks).value();
  };
  EXPECT_THAT(victims(0.2, none), ElementsAre(ElementsAre(), ElementsAre(0, 1, 2, 3)));
  EXPECT_THAT(victims(0, none), ElementsAre(ElementsAre(), ElementsAre(0, 1, 2, 3)));
  EXPECT_THAT(victims(0.7, none), ElementsAre(ElementsAre(0), ElementsAre(0, 1, 2)));
  EXPECT_THAT(victims(1, none), ElementsAre(ElementsAre(0, 1), ElementsAre(0, 1)));
  EXPECT_THAT(victims(0.7, first), ElementsAre(ElementsAre(1), ElementsAre(1, 2, 3)));
  const auto too_few = SelectShared(scores.data(), {.rows = 2, .count = 5}, first);
  EXPECT_THAT(too_few.status().message(), HasSubstr("5 of 5 must leave for the budget, but 1 are protected"));
  EXPECT_EQ(LeastKept(10, 0.7), 7u);
  EXPECT_EQ(LeastKept(3, 0.2), 1u);
  EXPECT_EQ(LeastKept(0, 0.2), 0u);
}

TEST(SelectTest, SameAsSorting) {
  Random random(7);
  for (int round = 0; round < 200; ++round) {
    const uint32_t n = 1 + random.Below(300);
    std::vector<float> scores(n);
    for (float& score : scores) score = static_cast<float>(random.Below(20)) - 10;
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return scores[a] < scores[b]; });
    const uint32_t count = random.Below(n + 1);
    order.resize(count);
    std::sort(order.begin(), order.end());
    EXPECT_EQ(Victims(scores, count).value(), order);
    const auto key = [&](uint32_t i) { return OrderOf(scores[i], i); };
    const uint32_t k = random.Below(n);
    std::vector<uint64_t> keys;
    for (uint32_t i = 0; i < n; ++i) keys.push_back(key(i));
    std::sort(keys.begin(), keys.end());
    EXPECT_EQ(KthLowest(OneLane(), n, k, key), keys[k]);
  }
}

TEST(SelectTest, ProtectionInTokensAndBlocks) {
  const KvShape shape = {.layers = 1, .kv_heads = 1, .tokens_per_block = 4, .tokens = 18, .k_head_dim = 1};
  std::vector<uint8_t> tokens(18), blocks(5);
  const Protection paged = {.first_blocks = 1, .last_blocks = 1};
  MarkProtectedTokens(paged, {}, shape, absl::MakeSpan(tokens));
  EXPECT_THAT(tokens, ElementsAre(1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1));
  MarkProtectedBlocks(paged, {}, shape, absl::MakeSpan(blocks));
  EXPECT_THAT(blocks, ElementsAre(1, 0, 0, 1, 1));
  MarkProtectedBlocks({.first_tokens = 5, .last_tokens = 3}, {{{9, 10}}}, shape, absl::MakeSpan(blocks));
  EXPECT_THAT(blocks, ElementsAre(1, 1, 1, 1, 1));
  MarkProtectedBlocks({}, {{{9, 10}, {7, 7}}}, shape, absl::MakeSpan(blocks));
  EXPECT_THAT(blocks, ElementsAre(0, 0, 1, 0, 1)) << "a block that is being filled never leaves";
}

TEST(SelectTest, DecodingStaysWithinABlockOfTheBudget) {
  for (const uint32_t per_block : {1u, 4u, 16u}) {
    for (const uint32_t budget : {16u, 48u, 50u}) {
      KvShape shape = {
          .layers = 1, .kv_heads = 1, .tokens_per_block = per_block, .tokens = 1, .k_head_dim = 1};
      uint32_t left = 0;
      for (int step = 0; step < 500; ++step, ++shape.tokens) {
        const uint32_t victims = BlocksOverBudget(shape, budget);
        EXPECT_LE(victims, 1u);
        if (victims > 0) {
          EXPECT_EQ(shape.tokens % per_block, 0u) << "only when the newest block has just filled";
        }
        shape.tokens -= victims * per_block;
        left += victims;
        EXPECT_LT(shape.tokens, budget + per_block);
      }
      EXPECT_GT(left, 0u);
    }
  }
}

TEST(ReduceTest, TokensOfABlock) {
  const KvShape shape = {.layers = 1, .kv_heads = 1, .tokens_per_block = 4, .tokens = 6, .k_head_dim = 1};
  const float scores[6] = {1, 2, 3, 10, -5, kNoScore};
  float blocks[2];
  const auto reduce = [&](TokenReduction how) { ReduceTokens(OneLane(), shape, how, scores, blocks); };
  reduce(TokenReduction::kMean);
  EXPECT_EQ(blocks[0], 4);
  EXPECT_TRUE(std::isnan(blocks[1])) << "not a number is not lost";
  reduce(TokenReduction::kSum);
  EXPECT_EQ(blocks[0], 16);
  reduce(TokenReduction::kMax);
  EXPECT_EQ(blocks[0], 10);
  EXPECT_TRUE(std::isnan(blocks[1]));
  reduce(TokenReduction::kP90);
  EXPECT_FLOAT_EQ(blocks[0], 7.9f) << "numpy.percentile([1, 2, 3, 10], 90)";
  EXPECT_TRUE(std::isnan(blocks[1]));
}

class GatherTest : public testing::TestWithParam<Arrangement> {};

// A row without a token is zeros, or no numbers.
TEST_P(GatherTest, RowsWithoutATokenAreFilled) {
  for (const KvDtype dtype :
       {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3, KvDtype::kFp8E5m2}) {
    for (const Filler filler : {Filler::kZero, Filler::kNan}) {
      const SequenceOptions options = {.k_dim = 256, .v_dim = 1, .dtype = dtype, .arrangement = GetParam()};
      const Sequence from(options);
      const uint32_t planes = options.layers * options.heads, kept_tokens = 9;
      std::vector<uint32_t> kept(size_t{planes} * kept_tokens, kNoToken);
      for (uint32_t plane = 0; plane < planes; ++plane)
        for (uint32_t i = 0; i < std::min(plane, kept_tokens); ++i) kept[plane * kept_tokens + i] = 2 * i;
      SequenceOptions to_options = options;
      to_options.tokens = kept_tokens;
      const Sequence to(to_options, [](bool, uint32_t, uint32_t, uint32_t, uint32_t) { return 1.0; });
      HostWorkers workers(2);
      Gather({.from = from.kv(),
              .to_blocks = to.kv().blocks,
              .kept = kept.data(),
              .kept_layer_stride = uint64_t{options.heads} * kept_tokens,
              .kept_head_stride = kept_tokens,
              .kept_tokens = kept_tokens,
              .filler = filler},
             &workers);
      const auto is_filled = [&](float x) { return filler == Filler::kNan ? std::isnan(x) : x == 0; };
      for (uint32_t plane = 0; plane < planes; ++plane) {
        const uint32_t l = plane / options.heads, h = plane % options.heads;
        for (uint32_t i = 0; i < kept_tokens; ++i) {
          const uint32_t source = kept[plane * kept_tokens + i];
          for (uint32_t d = 0; d < 256; ++d) {
            if (source == kNoToken) {
              ASSERT_TRUE(is_filled(static_cast<float>(to.K(l, i, h, d))));
              ASSERT_TRUE(is_filled(static_cast<float>(to.V(l, i, h, 0))));
            } else {
              ASSERT_EQ(to.K(l, i, h, d), from.K(l, source, h, d));
            }
          }
        }
      }
    }
  }
}

TEST_P(GatherTest, BytesOfWhatStaysInOrder) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kF16, KvDtype::kFp8E4m3}) {
    const SequenceOptions options = {.k_dim = 16, .v_dim = 12, .dtype = dtype, .arrangement = GetParam()};
    const Sequence from(options);
    // Each plane keeps tokens of its own.
    const uint32_t planes = options.layers * options.heads, kept_tokens = 19;
    std::vector<uint32_t> kept;
    Random random(3);
    for (uint32_t plane = 0; plane < planes; ++plane) {
      std::vector<uint32_t> tokens(options.tokens);
      for (uint32_t t = 0; t < options.tokens; ++t) tokens[t] = t;
      while (tokens.size() > kept_tokens)
        tokens.erase(tokens.begin() + random.Below(static_cast<uint32_t>(tokens.size())));
      kept.insert(kept.end(), tokens.begin(), tokens.end());
    }
    SequenceOptions to_options = options;
    to_options.tokens = kept_tokens;
    const Sequence to(to_options, [](bool, uint32_t, uint32_t, uint32_t, uint32_t) { return 0.0; });
    HostWorkers workers(2);
    Gather({.from = from.kv(),
            .to_blocks = to.kv().blocks,
            .kept = kept.data(),
            .kept_layer_stride = uint64_t{options.heads} * kept_tokens,
            .kept_head_stride = kept_tokens,
            .kept_tokens = kept_tokens},
           &workers);
    for (uint32_t l = 0; l < options.layers; ++l)
      for (uint32_t h = 0; h < options.heads; ++h)
        for (uint32_t i = 0; i < kept_tokens; ++i) {
          const uint32_t source = kept[(l * options.heads + h) * kept_tokens + i];
          for (uint32_t d = 0; d < 16; ++d) ASSERT_EQ(to.K(l, i, h, d), from.K(l, source, h, d));
          for (uint32_t d = 0; d < 12; ++d) ASSERT_EQ(to.V(l, i, h, d), from.V(l, source, h, d));
        }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, GatherTest,
                         testing::Values(Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                         Arrangement::kColumnMajorKeys, Arrangement::kScattered));

}  // namespace
}  // namespace kvpool::scorers
