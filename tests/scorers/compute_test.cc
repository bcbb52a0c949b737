// The contract of every KvCompute (cuda/kv_compute.h), tested on the device that this run is about against
// the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/order.h"
#include "cuda/scorers/policies/fast_kvzip.h"
#include "cuda/scorers/select.h"
#include "proto/support/status_macros.h"
#include "tests/scorers/sequence.h"
#include "tests/scorers/test_compute.h"

namespace kvpool::scorers {
namespace {

using lab::ScoredSequence;
using lab::StagedSequence;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class ComputeTest : public testing::Test {
 protected:
  ComputeTest() : host_(MakeHostKvCompute({.host_threads = 3})) {}
  KvCompute& compute() { return TestCompute() != nullptr ? *TestCompute() : *host_; }
  KvCompute& host() { return *host_; }

  static absl::StatusOr<ScoredSequence> ScoreOn(KvCompute* compute, const KvView& kv, const Signals& signals,
                                                const std::string& policy, const TestSettings& settings,
                                                ScoreRequest request) {
    ASSIGN_OR_RETURN(request.policy, BindPolicy(policy, settings));
    request.shape = kv.shape;
    ASSIGN_OR_RETURN(const StagedSequence staged, StagedSequence::Make(compute, kv, signals));
    return lab::ScoreStaged(compute, staged, request);
  }

  // Both sides agree up to the rounding of sums of floats.
  void ExpectSame(const KvView& kv, const Signals& signals, const std::string& policy,
                  const TestSettings& settings = {}, const ScoreRequest& request = {}) {
    const auto expected = ScoreOn(&host(), kv, signals, policy, settings, request);
    const auto actual = ScoreOn(&compute(), kv, signals, policy, settings, request);
    ASSERT_TRUE(expected.ok()) << policy << ": " << expected.status();
    ASSERT_TRUE(actual.ok()) << policy << ": " << actual.status();
    ExpectNear(actual->tokens, expected->tokens, policy + " tokens");
    ExpectNear(actual->blocks, expected->blocks, policy + " blocks");
    ASSERT_EQ(actual->spreads.size(), expected->spreads.size());
    for (size_t i = 0; i < expected->spreads.size(); ++i) {
      EXPECT_NEAR(actual->spreads[i].entropy, expected->spreads[i].entropy,
                  1e-4 * std::abs(expected->spreads[i].entropy));
      EXPECT_NEAR(actual->spreads[i].variance, expected->spreads[i].variance,
                  1e-3 * expected->spreads[i].variance + 1e-12);
    }
  }

 private:
  static void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected,
                         const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    // Scores brought to mean 0 and deviation 1 are differences of larger numbers.
    const double least = what.starts_with("leverage") || what.starts_with("compactor") ? 0.1 : 0.01;
    double scale = 0;
    for (const float x : expected) scale = std::isfinite(x) ? std::max(scale, double{std::abs(x)}) : scale;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!std::isfinite(expected[i])) {
        ASSERT_EQ(OrderOf(actual[i]), OrderOf(expected[i])) << what << " at " << i;
      } else {
        ASSERT_NEAR(actual[i], expected[i], 2e-5 * std::max(double{std::abs(expected[i])}, scale * least))
            << what << " at " << i;
      }
    }
  }
  const std::unique_ptr<KvCompute> host_;
};

// A window of queries of `group` query heads for each kv head, an engine's own importance, and a matrix of three rows
// over V for each plane.
struct SomeSignals {
  SomeSignals(const KvShape& shape, uint64_t seed, uint32_t window = 3, uint32_t group = 2) {
    Random random(seed);
    const uint32_t heads = shape.kv_heads * group;
    queries.resize(size_t{shape.layers} * window * heads * shape.k_head_dim);
    for (float& x : queries) x = static_cast<float>(random.Normal());
    importance.resize(size_t{shape.planes()} * shape.tokens);
    for (float& x : importance) x = static_cast<float>(random.Uniform());
    s.window = {.data = queries.data(),
                .queries = window,
                .q_heads = heads,
                .layer_stride_bytes = window * heads * shape.k_head_dim * sizeof(float),
                .query_stride_bytes = heads * shape.k_head_dim * sizeof(float),
                .head_stride_bytes = shape.k_head_dim * sizeof(float)};
    s.importance = {importance.data(), uint64_t{shape.kv_heads} * shape.tokens, shape.tokens};
    s.mass = s.importance;
    weights.resize(size_t{3} * shape.planes() * shape.v_head_dim);
    for (float& x : weights) x = static_cast<float>(random.Normal());
    s.weights = {.values = weights.data()};
    s.weight_count = weights.size();
  }
  // Small weights, as many as the policy takes, which keep softmax's logits small too.
  void Weigh(const std::string& policy, const KvShape& shape) {
    const auto bound = BindPolicy(policy, {});
    ASSERT_TRUE(bound.ok()) << bound.status();
    const PolicyFacts& facts = bound->facts();
    s.weight_count =
        facts.weight_count == nullptr
            ? 0
            : facts.weight_count(bound->params, shape, 0, uint64_t{3} * shape.planes() * shape.v_head_dim);
    Random random(s.weight_count);
    weights.resize(s.weight_count);
    for (float& x : weights) x = static_cast<float>(random.Normal() / 8);
    s.weights = {.values = weights.empty() ? nullptr : weights.data()};
  }
  std::vector<float> queries, importance, weights;
  Signals s;
};

// A warp has 16 queries of a head at once, and a team 16 warps.
TEST_F(ComputeTest, WindowsAndGroupsOfAllSizes) {
  for (const uint32_t window : {1u, 8u, 32u, 33u, 64u}) {
    for (const uint32_t group : {1u, 3u, 4u}) {
      SCOPED_TRACE(testing::Message() << window << " queries, group of " << group);
      const Sequence sequence({.layers = 1,
                               .tokens = 70,
                               .heads = 2,
                               .k_dim = window == 8 ? 260u : 128u,
                               .v_dim = 0,
                               .tokens_per_block = 16,
                               .dtype = KvDtype::kBf16});
      const SomeSignals signals(sequence.kv().shape, window, window, group);
      for (const char* policy : {"snapkv", "cake", "tova", "epicache"})
        ExpectSame(sequence.kv(), signals.s, policy);
    }
  }
}

// A head of more queries than a team holds at once, and heads of which it holds some and the rest later.
TEST_F(ComputeTest, WindowsLargerThanATeamHolds) {
  const Sequence sequence({.layers = 1, .tokens = 37, .k_dim = 20, .dtype = KvDtype::kF16});
  for (const auto& [window, group] : {std::pair(300u, 1u), std::pair(33u, 7u)}) {
    SCOPED_TRACE(testing::Message() << window << " queries, group of " << group);
    SomeSignals signals(sequence.kv().shape, 7, window, group);
    signals.s.window.behind = true;
    for (const char* policy : {"snapkv", "cake", "tova", "epicache"})
      ExpectSame(sequence.kv(), signals.s, policy);
  }
}

// A warp has 128 elements of a query at once, and a team 16 warps. Larger heads are multiplied without tensor cores.
TEST_F(ComputeTest, WindowsOfHeadsThatSeveralWarpsHold) {
  for (const uint32_t dim : {64u, 130u, 576u, 2048u, 2056u}) {
    for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBf16, KvDtype::kFp8E4m3}) {
      SCOPED_TRACE(testing::Message() << dim << " elements, type " << static_cast<int>(dtype));
      const Sequence sequence({.layers = 1, .tokens = 45, .k_dim = dim, .v_dim = 0, .dtype = dtype});
      const SomeSignals signals(sequence.kv().shape, dim, 40, 3);
      for (const char* policy : {"snapkv", "cake", "epicache"}) ExpectSame(sequence.kv(), signals.s, policy);
    }
  }
}

TEST_F(ComputeTest, QueriesBehindTheSequenceSeeAllOfItOnEveryDevice) {
  const Sequence sequence({.tokens = 29});
  SomeSignals signals(sequence.kv().shape, 6);
  signals.s.window.behind = true;
  for (const char* policy : {"epicache", "snapkv", "cake"}) ExpectSame(sequence.kv(), signals.s, policy);
}

TEST_F(ComputeTest, EveryTypeAndLayoutScoresAsOnTheHost) {
  const std::vector<std::pair<std::string, TestSettings>> policies = {
      {"paged_eviction", {}},
      {"paged_eviction", {{"ratio", "of_sums"}}},
      {"keydiff", {}},
      {"keydiff", {{"anchor", "mean"}}},
      {"lagkv", {{"lag", "5"}, {"cross_scoring", "true"}}},
      {"leverage", {{"sketch", "7"}}},
      {"leverage", {{"sketch", "18"}, {"rope", "none"}}},
      {"compactor", {{"sketch", "7"}, {"pairing", "interleaved"}}},
      {"qfilters", {}},
      {"triattention", {}},
      {"triattention", {{"pairing", "interleaved"}}},
      {"expected_attention", {}},
      {"mpcache", {{"stage", "dynamic"}}},
      {"quest", {}},
      {"snapkv", {}},
      {"cake", {}},
      {"rkv", {{"threshold", "0.1"}, {"search", "20"}}},
      {"caote", {{"host", "importance"}}},
      {"graphkv", {{"host", "importance"}, {"sources", "3"}}},
      {"criticalkv", {{"host", "importance"}}},
  };
  for (const KvDtype dtype :
       {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3, KvDtype::kFp8E5m2}) {
    for (const Arrangement arrangement : {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                          Arrangement::kColumnMajorKeys, Arrangement::kScattered}) {
      // Rows of whole sixteen bytes, odd ones, and rows that a warp does not take at once.
      for (const uint32_t dim : {32u, 33u, 144u}) {
        const Sequence sequence(
            {.tokens = 29, .k_dim = dim, .v_dim = dim, .dtype = dtype, .arrangement = arrangement});
        SomeSignals signals(sequence.kv().shape, 5);
        for (const auto& [policy, settings] : policies) {
          signals.Weigh(policy, sequence.kv().shape);
          SCOPED_TRACE(testing::Message() << "type " << static_cast<int>(dtype) << ", arrangement "
                                          << static_cast<int>(arrangement) << ", dim " << dim);
          ExpectSame(sequence.kv(), signals.s, policy, settings);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Heads of one element and of many, with one token and with more than a tile. Leverage of fewer tokens than the sketch has
// columns differs by rounding alone.
TEST_F(ComputeTest, SmallAndLargeHeadsOfPoliciesWithScratchOfTheirOwn) {
  for (const uint32_t dim : {1u, 2u, 3u, 256u}) {
    for (const uint32_t tokens : {1u, 2u, 13u, 70u}) {
      for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kFp8E5m2}) {
        SCOPED_TRACE(testing::Message()
                     << "dim " << dim << ", " << tokens << " tokens, type " << static_cast<int>(dtype));
        const Sequence sequence({.tokens = tokens, .k_dim = dim, .v_dim = dim, .dtype = dtype});
        SomeSignals signals(sequence.kv().shape, 5, std::min(tokens, 9u));
        ExpectSame(sequence.kv(), signals.s, "leverage", {{"sketch", dim < 4 || tokens < 70 ? "1" : "48"}});
        ExpectSame(sequence.kv(), signals.s, "compactor", {{"sketch", "1"}, {"sinks", "2"}});
        ExpectSame(sequence.kv(), signals.s, "rkv", {{"search", "50"}});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A host's scratch is that of the policy over it.
TEST_F(ComputeTest, AHostWithScratchOfItsOwn) {
  const Sequence sequence({.tokens = 45});
  const SomeSignals signals(sequence.kv().shape, 5);
  ExpectSame(sequence.kv(), signals.s, "chunkkv", {{"host", "leverage"}, {"host.sketch", "5"}});
  ExpectSame(sequence.kv(), signals.s, "caote", {{"host", "rkv"}});
}

// Gates of all sizes of a group, with layers and heads that are not the first.
TEST_F(ComputeTest, GatesOverHiddenStates) {
  const Sequence sequence({.layers = 2, .tokens = 21, .heads = 3});
  const KvShape& shape = sequence.kv().shape;
  SomeSignals signals(shape, 8);
  for (const uint32_t hidden_dim : {1u, 37u, 64u}) {
    for (const uint32_t group : {1u, 5u}) {
      for (const auto& [dim, bases] : {std::pair(16u, 16u), std::pair(1u, 0u), std::pair(7u, 33u)}) {
        SCOPED_TRACE(testing::Message() << hidden_dim << " hidden, group " << group << ", gate of " << dim);
        Random random(hidden_dim);
        std::vector<float> hidden(size_t{shape.layers} * shape.tokens * hidden_dim);
        for (float& x : hidden) x = static_cast<float>(random.Normal());
        signals.weights.resize(size_t{2} * (3 * dim * (bases + hidden_dim) + 2 * dim +
                                            3 * group * (1 + dim * (hidden_dim + 1))));
        for (float& x : signals.weights) x = static_cast<float>(random.Normal() / 4);
        signals.s.weights = {.values = signals.weights.data()};
        signals.s.weight_count = signals.weights.size();
        signals.s.hidden = {.values = hidden.data(), .layer_stride = uint64_t{shape.tokens} * hidden_dim};
        signals.s.hidden_dim = hidden_dim;
        ExpectSame(sequence.kv(), signals.s, "fast_kvzip",
                   {{"dim", std::to_string(dim)}, {"bases", std::to_string(bases)}});
      }
    }
  }
}

// A rank with the last two heads of three reads its heads' part of the model's weights.
TEST_F(ComputeTest, ARankReadsTheGatesOfItsHeads) {
  const Sequence sequence({.layers = 2, .tokens = 21, .heads = 3});
  const KvView& all = sequence.kv();
  KvView part = all;
  part.shape.kv_heads = 2;
  part.k.offset_bytes += part.k.head_stride_bytes;
  part.v.offset_bytes += part.v.head_stride_bytes;
  constexpr uint32_t kHiddenDim = 6, kGroup = 2;
  Random random(3);
  std::vector<float> hidden(size_t{all.shape.layers} * all.shape.tokens * kHiddenDim);
  for (float& x : hidden) x = static_cast<float>(random.Normal());
  std::vector<float> weights(size_t{all.shape.layers} * (GateFloats(16, 16, 3, kHiddenDim) +
                                                         3 * kGroup * GateFloatsOfQueryHead(16, kHiddenDim)));
  for (float& x : weights) x = static_cast<float>(random.Normal() / 4);
  Signals signals;
  signals.hidden = {.values = hidden.data(), .layer_stride = uint64_t{all.shape.tokens} * kHiddenDim};
  signals.hidden_dim = kHiddenDim;
  signals.weights = {.values = weights.data()};
  signals.weight_count = weights.size();
  const auto of_all = ScoreOn(&compute(), all, signals, "fast_kvzip", {}, {.scope = Scope::kHead});
  const auto of_part = ScoreOn(&compute(), part, signals, "fast_kvzip", {},
                               {.scope = Scope::kHead, .model_heads = 3, .first_model_head = 1});
  ASSERT_TRUE(of_all.ok() && of_part.ok()) << of_all.status() << of_part.status();
  const uint32_t tokens = all.shape.tokens;
  for (uint32_t layer = 0; layer < all.shape.layers; ++layer) {
    for (uint32_t i = 0; i < 2 * tokens; ++i) {
      EXPECT_EQ(of_part->tokens[layer * 2 * tokens + i], of_all->tokens[(layer * 3 + 1) * tokens + i]);
    }
  }
}

TEST_F(ComputeTest, EveryScopeAndReduction) {
  const Sequence sequence({.layers = 35, .tokens = 83, .heads = 3, .k_dim = 8, .v_dim = 8});
  for (const Scope scope : {Scope::kSequence, Scope::kLayer, Scope::kHead}) {
    for (const PlaneReduction over : {PlaneReduction::kMean, PlaneReduction::kMax}) {
      for (const TokenReduction tokens :
           {TokenReduction::kMean, TokenReduction::kSum, TokenReduction::kMax, TokenReduction::kP90}) {
        const ScoreRequest request = {
            .scope = scope, .over_tokens = tokens, .over_heads = over, .over_layers = over};
        ExpectSame(sequence.kv(), {}, "paged_eviction", {}, request);
        ExpectSame(sequence.kv(), {}, "paged_eviction", {{"ratio", "of_sums"}}, request);
      }
    }
  }
}

TEST_F(ComputeTest, WhatIsNotANumberIsNotLost) {
  const Sequence sequence({.tokens = 40},
                          [](bool value, uint32_t, uint32_t token, uint32_t head, uint32_t dim) {
                            if (token == 7 && head == 1 && dim == 3) return double{kNan};
                            if (token == 9 && value && dim == 0) return double{INFINITY};
                            return (token * 7 + head * 3 + dim) % 11 - 5.0;
                          });
  for (const char* policy : {"paged_eviction", "keydiff", "inverse_key_l2"})
    ExpectSame(sequence.kv(), {}, policy);
}

TEST_F(ComputeTest, LongSequencesTakeManyTeams) {
  const Sequence sequence(
      {.layers = 1, .tokens = 4100, .heads = 2, .k_dim = 8, .v_dim = 8, .tokens_per_block = 3});
  ExpectSame(sequence.kv(), {}, "paged_eviction");
  ExpectSame(sequence.kv(), {}, "keydiff");
}

TEST_F(ComputeTest, RowsOfWholeSixteenBytesMayBeginAnywhere) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kF16, KvDtype::kFp8E5m2}) {
    const Sequence sequence({.k_dim = 33, .v_dim = 33, .dtype = dtype});
    KvView kv = sequence.kv();
    kv.shape.k_head_dim = kv.shape.v_head_dim = kv.k.head_dim = kv.v.head_dim = 32;
    ExpectSame(kv, {}, "paged_eviction");
    ExpectSame(kv, {}, "keydiff");
  }
}

// A token for each code, all of whose key's elements but one are 0, and whose value's norm is 1.
template <KvDtype dtype>
std::vector<float> ScoresOfCodes(KvCompute* compute, uint32_t dim, uint32_t step) {
  using Storage = typename Element<dtype>::Storage;
  const uint32_t tokens = (1u << 8 * sizeof(Storage)) / step;
  const Sequence sequence(
      {.layers = 1, .tokens = tokens, .heads = 1, .k_dim = dim, .v_dim = dim, .dtype = dtype},
      [](bool value, uint32_t, uint32_t, uint32_t, uint32_t d) { return value && d == 0 ? 1.0 : 0.0; });
  for (uint32_t t = 0; t < tokens; ++t) {
    auto* const row = const_cast<unsigned char*>(sequence.kv().KeyRow(0, 0, t));
    reinterpret_cast<Storage*>(row)[t % dim] = static_cast<Storage>(t * step);
  }
  const auto policy = BindPolicy("paged_eviction", {{"eps", "0"}});
  const auto staged = StagedSequence::Make(compute, sequence.kv(), {});
  EXPECT_TRUE(policy.ok() && staged.ok());
  const auto scored = lab::ScoreStaged(compute, *staged, {.policy = *policy, .shape = sequence.kv().shape});
  EXPECT_TRUE(scored.ok()) << scored.status();
  return scored->tokens;
}

template <KvDtype dtype>
void ExpectEveryCode(KvCompute* compute, uint32_t step) {
  using Storage = typename Element<dtype>::Storage;
  // Rows of whole sixteen bytes are read another way than others.
  for (const uint32_t dim : {32u, 19u}) {
    const std::vector<float> scores = ScoresOfCodes<dtype>(compute, dim, step);
    for (uint32_t t = 0; t < scores.size(); ++t) {
      const double x = std::abs(double{Element<dtype>::Load(static_cast<Storage>(t * step))});
      if (std::isfinite(x) && x > 0) {
        ASSERT_NEAR(scores[t], 1 / x, 1e-6 / x) << "code " << t * step << ", dim " << dim;
      } else {
        ASSERT_EQ(OrderOf(scores[t]), OrderOf(static_cast<float>(1 / x)))
            << "code " << t * step << ", dim " << dim;
      }
    }
  }
}

TEST_F(ComputeTest, EveryCodeIsReadAsItsNumber) {
  ExpectEveryCode<KvDtype::kFp8E4m3>(&compute(), 1);
  ExpectEveryCode<KvDtype::kFp8E5m2>(&compute(), 1);
  ExpectEveryCode<KvDtype::kF16>(&compute(), 7);
}

TEST_F(ComputeTest, RecordsThatAreKeptAreNotMadeAgain) {
  const Sequence sequence({.tokens = 37});
  const KvShape& shape = sequence.kv().shape;
  const auto staged = StagedSequence::Make(&compute(), sequence.kv(), {});
  ASSERT_TRUE(staged.ok()) << staged.status();
  const auto policy = BindPolicy("keydiff", {});
  ASSERT_TRUE(policy.ok());
  const auto plan = compute().Plan({.policy = *policy, .shape = shape}, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const size_t record_bytes = plan->record.floats * sizeof(float);
  const auto memory = compute().Allocate(shape.blocks() * record_bytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::vector<float*> records;
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    records.push_back(reinterpret_cast<float*>((*memory)->address() + block * record_bytes));
  }
  const auto score = [&](const std::vector<BlockRun>& runs) {
    std::vector<float> tokens(shape.tokens);
    const absl::Status status = compute().Score({.plan = &*plan,
                                                 .kv = staged->kv(),
                                                 .records = records,
                                                 .to_record = runs,
                                                 .output = {.token_scores = tokens.data()}});
    EXPECT_TRUE(status.ok()) << status;
    return tokens;
  };
  const std::vector<float> all = score({{0, shape.blocks()}});
  EXPECT_EQ(score({}), all);
  EXPECT_EQ(score({{0, 1}, {3, 2}}), all);
  // A given record counts and not the block: that of block 1 is given for block 2.
  records[2] = records[1];
  EXPECT_NE(score({}), all);
}

// Scores are the engine's importance, so that they can be any numbers.
class ChoiceTest : public ComputeTest {
 protected:
  absl::StatusOr<std::vector<uint32_t>> Choose(KvCompute* compute, const std::vector<float>& scores,
                                               uint32_t rows, const std::vector<uint8_t>& marks,
                                               uint32_t count) {
    const uint32_t tokens = static_cast<uint32_t>(scores.size() / rows);
    const SequenceOptions options = {.layers = rows, .tokens = 1, .heads = 1, .k_dim = 1, .v_dim = 0};
    const Sequence sequence(options);
    KvView kv = sequence.kv();
    kv.shape.tokens = tokens;
    kv.shape.tokens_per_block = 16;
    const std::vector<uint64_t> nowhere(kv.shape.blocks());
    kv.blocks = nowhere.data();
    ASSIGN_OR_RETURN(const BoundPolicy policy, BindPolicy("importance", {}));
    ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> staged,
                     compute->Allocate(scores.size() * sizeof(float)));
    const KvPiece piece = {.address = reinterpret_cast<uint64_t>(scores.data()),
                           .bytes = scores.size() * sizeof(float)};
    RETURN_IF_ERROR(compute->Stage({&piece, 1}, staged->address()));
    Signals signals;
    signals.importance = {reinterpret_cast<const float*>(staged->address()), tokens, 0};
    ASSIGN_OR_RETURN(const ScorePlan plan,
                     compute->Plan({.policy = policy, .shape = kv.shape, .scope = Scope::kLayer}, signals));
    std::vector<uint32_t> victims(size_t{rows} * count);
    RETURN_IF_ERROR(compute->Score({.plan = &plan,
                                    .kv = kv,
                                    .signals = signals,
                                    .choice = {.of_tokens = true,
                                               .count = count,
                                               .protected_marks = marks,
                                               .victims = absl::MakeSpan(victims)}}));
    return victims;
  }
};

TEST_F(ChoiceTest, SameAsSelectVictims) {
  Random random(11);
  for (const uint32_t tokens : {1u, 31u, 2048u, 4097u, 50'000u}) {
    for (const uint32_t rows : {1u, 3u}) {
      for (const int kind : {0, 1, 2}) {
        std::vector<float> scores(size_t{tokens} * rows);
        for (float& x : scores) {
          // Many equal ones; all different; all equal but for NaN, or for infinities.
          x = kind == 0 ? static_cast<float>(random.Below(9)) - 4
              : kind == 1
                  ? static_cast<float>(random.Normal())
                  : std::vector<float>{1, 1, 1, 0.0f, -0.0f, kNan, INFINITY, -INFINITY}[random.Below(8)];
        }
        std::vector<uint8_t> marks(tokens);
        for (uint8_t& mark : marks) mark = random.Below(4) == 0;
        const uint32_t candidates = static_cast<uint32_t>(std::count(marks.begin(), marks.end(), 0));
        for (const uint32_t count : {0u, std::min(1u, candidates), candidates / 2, candidates}) {
          const auto expected = Choose(&host(), scores, rows, marks, count);
          const auto actual = Choose(&compute(), scores, rows, marks, count);
          ASSERT_TRUE(expected.ok()) << expected.status();
          ASSERT_TRUE(actual.ok()) << actual.status();
          ASSERT_EQ(*actual, *expected) << tokens << " tokens, " << rows << " rows, " << count << " leave";
        }
      }
    }
  }
}

TEST_F(ChoiceTest, MoreThanThereAreIsRefused) {
  const auto none = Choose(&compute(), {1, 2, 3, 4}, 1, {1, 1, 0, 1}, 2);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(none.status().message(), HasSubstr("2 of 4 must leave for the budget, but 3 are protected"));
}

TEST_F(ComputeTest, BlocksAreChosenByTheirScores) {
  const Sequence sequence({.tokens = 8 * 41, .k_dim = 8, .v_dim = 8});
  const KvShape& shape = sequence.kv().shape;
  const auto policy = BindPolicy("paged_eviction", {});
  ASSERT_TRUE(policy.ok());
  const auto staged = StagedSequence::Make(&compute(), sequence.kv(), {});
  ASSERT_TRUE(staged.ok()) << staged.status();
  const auto scored = lab::ScoreStaged(&compute(), *staged, {.policy = *policy, .shape = shape});
  ASSERT_TRUE(scored.ok()) << scored.status();
  const ScorePlan& plan = scored->plan;
  const auto memory = compute().Allocate(shape.blocks() * plan.record.floats * sizeof(float));
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::vector<float*> records;
  for (uint32_t block = 0; block < shape.blocks(); ++block) {
    records.push_back(reinterpret_cast<float*>((*memory)->address()) + uint64_t{block} * plan.record.floats);
  }
  const std::vector<BlockRun> runs = {{0, shape.blocks()}};
  std::vector<uint8_t> marks(shape.blocks());
  MarkProtectedBlocks(ProtectionOf(*policy, shape, 0, 0), {}, shape, absl::MakeSpan(marks));
  std::vector<uint32_t> victims(5), expected(5);
  const absl::Status status =
      compute().Score({.plan = &plan,
                       .kv = staged->kv(),
                       .records = records,
                       .to_record = runs,
                       .choice = {.count = 5, .protected_marks = marks, .victims = absl::MakeSpan(victims)}});
  ASSERT_TRUE(status.ok()) << status;
  std::vector<uint64_t> keys(shape.blocks());
  ASSERT_TRUE(SelectVictims(scored->blocks, marks, 5, absl::MakeSpan(keys), absl::MakeSpan(expected)).ok());
  EXPECT_EQ(victims, expected);
}

TEST_F(ComputeTest, GatherMovesTheBytesOfWhatStays) {
  for (const Arrangement arrangement : {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                        Arrangement::kColumnMajorKeys, Arrangement::kScattered}) {
    const SequenceOptions options = {
        .k_dim = 16, .v_dim = 12, .dtype = KvDtype::kF16, .arrangement = arrangement};
    const Sequence sequence(options);
    const uint32_t planes = options.layers * options.heads, kept_tokens = 19;
    std::vector<uint32_t> kept;
    Random random(3);
    for (uint32_t plane = 0; plane < planes; ++plane) {
      std::vector<uint32_t> tokens(options.tokens);
      for (uint32_t t = 0; t < options.tokens; ++t) tokens[t] = t;
      while (tokens.size() > kept_tokens) tokens.erase(tokens.begin() + random.Below(tokens.size()));
      // Some heads keep fewer, and the last one none.
      std::fill(tokens.end() - (plane + 1 == planes ? kept_tokens : 3 * plane), tokens.end(), kNoToken);
      kept.insert(kept.end(), tokens.begin(), tokens.end());
    }
    SequenceOptions fewer = options;
    fewer.tokens = kept_tokens;
    const Sequence to(fewer, [](bool, uint32_t, uint32_t, uint32_t, uint32_t) { return 0.0; });
    const auto from_staged = StagedSequence::Make(&compute(), sequence.kv(), {});
    const auto to_staged = StagedSequence::Make(&compute(), to.kv(), {});
    ASSERT_TRUE(from_staged.ok() && to_staged.ok());
    GatherRequest request = {
        .from = from_staged->kv(),
        .to_blocks = to_staged->kv().blocks,
        .kept = kept.data(),
        .kept_layer_stride = uint64_t{options.heads} * kept_tokens,
        .kept_head_stride = kept_tokens,
        .kept_tokens = kept_tokens,
        .filler = arrangement == Arrangement::kTokenHeadDim || arrangement == Arrangement::kColumnMajorKeys
                      ? Filler::kZero
                      : Filler::kNan};
    ASSERT_TRUE(compute().Gather(request).ok());
    // The same on the host, where `to` lies.
    request.from = sequence.kv();
    request.to_blocks = to.kv().blocks;
    ASSERT_TRUE(host().Gather(request).ok());
    const uint64_t words = lab::BlockBytes(to.kv()) / sizeof(uint64_t);
    for (uint32_t block = 0; block < to.kv().shape.blocks(); ++block) {
      for (uint64_t word = 0; word < words; ++word) {
        uint64_t expected;
        std::memcpy(&expected, reinterpret_cast<const uint64_t*>(to.kv().blocks[block]) + word,
                    sizeof expected);
        ASSERT_EQ(ReadWord(to_staged->kv().blocks[block] + word * sizeof(uint64_t)), expected)
            << "block " << block << ", word " << word << ", arrangement " << static_cast<int>(arrangement);
      }
    }
  }
}

TEST_F(ComputeTest, PiecesAreStagedOneBehindTheOther) {
  const auto block = compute().Allocate(64), to = compute().Allocate(64);
  ASSERT_TRUE(block.ok() && to.ok());
  const std::vector<unsigned char> first = {1, 2, 3}, second(16, 9);
  const KvPiece written = {.address = reinterpret_cast<uint64_t>(second.data()), .bytes = 16};
  ASSERT_TRUE(compute().Stage({&written, 1}, (*block)->address()).ok());
  const std::vector<KvPiece> pieces = {{.address = reinterpret_cast<uint64_t>(first.data()), .bytes = 3},
                                       {.address = 0, .bytes = 0},
                                       {.address = (*block)->address() + 8, .bytes = 4, .in_block = true},
                                       {.address = reinterpret_cast<uint64_t>(first.data()), .bytes = 1}};
  ASSERT_TRUE(compute().Stage(pieces, (*to)->address()).ok());
  EXPECT_EQ(ReadWord((*to)->address()), 0x0109090909030201u);
}

}  // namespace
}  // namespace kvpool::scorers
