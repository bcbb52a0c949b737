// How far attention outputs move when tokens leave, on the device that this run is about: against drift.json (make_drift.py), and for every
// type against the formulas in doubles.
#include "cuda/scorers/drift.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kv_compute.h"
#include "cuda/lab/staged_sequence.h"
#include "nlohmann/json.hpp"
#include "tests/scorers/sequence.h"
#include "tests/scorers/test_compute.h"

namespace kvpool::scorers::drifts {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

struct Queries {
  uint32_t queries = 0, q_heads = 0;
  float scale = 0;
  bool behind = false;
  std::vector<float> values;  // [layers][queries][q_heads][k_head_dim]
};
Queries RandomQueries(const KvShape& shape, uint32_t queries, uint32_t q_heads, uint64_t seed) {
  Random random(seed);
  Queries window{.queries = queries, .q_heads = q_heads};
  window.values.resize(size_t{shape.layers} * queries * q_heads * shape.k_head_dim);
  for (float& x : window.values) x = static_cast<float>(random.Normal());
  return window;
}

// Rows of tokens that stay: one for all heads, or one for each.
using Kept = std::vector<std::vector<uint32_t>>;
Kept SomeKept(const KvShape& shape, uint32_t rows, uint32_t tokens, uint64_t seed) {
  Random random(seed);
  Kept kept(rows);
  for (std::vector<uint32_t>& row : kept) {
    for (uint32_t t = 0; t < shape.tokens; ++t) row.push_back(t);
    while (row.size() > tokens) row.erase(row.begin() + random.Below(static_cast<uint32_t>(row.size())));
  }
  return kept;
}

absl::StatusOr<Drift> Measure(const Sequence& from, uint32_t layer, const Queries& window, const Kept& kept,
                              uint64_t weights_at_once = kDriftWeights) {
  std::unique_ptr<KvCompute> host;
  KvCompute* const compute = TestOrHostCompute(&host);
  const KvShape& shape = from.kv().shape;
  Signals signals;
  signals.window = {.data = window.values.data(),
                    .queries = window.queries,
                    .q_heads = window.q_heads,
                    .scale = window.scale,
                    .behind = window.behind};
  signals.window.head_stride_bytes = shape.k_head_dim * sizeof(float);
  signals.window.query_stride_bytes = window.q_heads * signals.window.head_stride_bytes;
  signals.window.layer_stride_bytes = window.queries * signals.window.query_stride_bytes;
  const auto staged = lab::StagedSequence::Make(compute, from.kv(), signals);
  if (!staged.ok()) return staged.status();
  DriftRequest request{.kv = staged->kv(), .layer = layer, .window = staged->signals().window};
  request.window.data =
      static_cast<const char*>(request.window.data) + layer * request.window.layer_stride_bytes;
  request.kept_head_stride = kept.size() > 1 ? request.words() : 0;
  std::vector<uint32_t> bits(kept.size() * request.words());
  for (size_t row = 0; row < kept.size(); ++row) {
    for (const uint32_t token : kept[row]) bits[row * request.words() + token / 32] |= 1u << token % 32;
  }
  request.kept = bits.data();
  request.weights_at_once = weights_at_once;
  if (const absl::Status fits = CheckDrift(request, uint64_t{1} << 30); !fits.ok()) return fits;
  return compute->Drift(request);
}

// ---- The formulas in doubles

std::vector<double> Output(const Sequence& from, uint32_t layer, uint32_t head, const Queries& window,
                           uint32_t query, uint32_t q_head, const std::vector<bool>& counts) {
  const KvShape& shape = from.kv().shape;
  const double scale =
      window.scale != 0 ? window.scale : 1 / std::sqrt(static_cast<double>(shape.k_head_dim));
  const uint32_t seen =
      window.behind ? shape.tokens : shape.tokens - (window.queries - 1 - query);  // It sees its own.
  std::vector<double> logits(seen, -std::numeric_limits<double>::infinity());
  double most = -std::numeric_limits<double>::infinity();
  for (uint32_t t = 0; t < seen; ++t) {
    double logit = 0;
    for (uint32_t d = 0; d < shape.k_head_dim; ++d) {
      const size_t at =
          ((size_t{layer} * window.queries + query) * window.q_heads + q_head) * shape.k_head_dim + d;
      logit += scale * window.values[at] * from.K(layer, t, head, d);
    }
    if (!counts[t] || !std::isfinite(logit)) continue;
    logits[t] = logit;
    most = std::max(most, logit);
  }
  std::vector<double> output(shape.v_head_dim);
  double sum = 0;
  for (uint32_t t = 0; t < seen; ++t) {
    if (!std::isfinite(logits[t])) continue;
    const double weight = std::exp(logits[t] - most);
    sum += weight;
    for (uint32_t d = 0; d < shape.v_head_dim; ++d) output[d] += weight * from.V(layer, t, head, d);
  }
  for (double& x : output) x = sum > 0 ? x / sum : 0;
  return output;
}

Drift Expect(const Sequence& from, uint32_t layer, const Queries& window, const Kept& kept) {
  const KvShape& shape = from.kv().shape;
  Drift drift;
  for (uint32_t q_head = 0; q_head < window.q_heads; ++q_head) {
    const uint32_t head = q_head / (window.q_heads / shape.kv_heads);
    std::vector<bool> stays(shape.tokens);
    for (const uint32_t token : kept[kept.size() > 1 ? head : 0]) stays[token] = true;
    for (uint32_t query = 0; query < window.queries; ++query) {
      const auto all =
          Output(from, layer, head, window, query, q_head, std::vector<bool>(shape.tokens, true));
      const auto rest = Output(from, layer, head, window, query, q_head, stays);
      double whole = 0, moved = 0;
      for (size_t d = 0; d < all.size(); ++d) {
        whole += all[d] * all[d];
        moved += (all[d] - rest[d]) * (all[d] - rest[d]);
      }
      const double of_row = whole > 0 ? std::sqrt(moved / whole) : moved > 0 ? 1 : 0;
      drift.sum += std::min(of_row, 10.0);
      drift.greatest = std::max(drift.greatest, of_row);
      ++drift.rows;
    }
  }
  return drift;
}

void ExpectDrift(const Sequence& from, const Queries& window, const Kept& kept, const std::string& what,
                 uint64_t weights_at_once = kDriftWeights) {
  for (uint32_t layer = 0; layer < from.kv().shape.layers; ++layer) {
    const absl::StatusOr<Drift> drift = Measure(from, layer, window, kept, weights_at_once);
    ASSERT_TRUE(drift.ok()) << what << ": " << drift.status();
    const Drift expected = Expect(from, layer, window, kept);
    ASSERT_EQ(drift->rows, expected.rows) << what;
    EXPECT_NEAR(drift->sum, expected.sum, 2e-5 * static_cast<double>(expected.rows) + 2e-5 * expected.sum)
        << what << " layer " << layer;
    EXPECT_NEAR(drift->greatest, expected.greatest, 5e-5 * (1 + expected.greatest))
        << what << " layer " << layer;
  }
}

// ---- Tests

TEST(DriftTest, MatchesTheIndependentImplementation) {
  const char* const folder = std::getenv("KVPOOL_SCORER_VECTORS");
  std::ifstream file(std::filesystem::path(folder != nullptr ? folder : KVPOOL_SCORER_VECTORS) /
                     "drift.json");
  ASSERT_TRUE(file);
  const Json json = Json::parse(file);
  for (const Json& one : json["cases"]) {
    const Sequence from({.layers = json["layers"],
                         .tokens = json["tokens"],
                         .heads = json["heads"],
                         .k_dim = json["k_dim"],
                         .v_dim = json["v_dim"],
                         .tokens_per_block = json["tokens_per_block"]},
                        [&](bool value, uint32_t layer, uint32_t token, uint32_t head, uint32_t dim) {
                          return one[value ? "v" : "k"][layer][token][head][dim].get<double>();
                        });
    Queries window{.queries = json["queries"],
                   .q_heads = json["q_heads"],
                   .scale = one["scale"],
                   .behind = one["behind"]};
    for (const Json& of_layer : one["q"]) {
      for (const Json& of_query : of_layer) {
        for (const Json& of_head : of_query) {
          for (const Json& x : of_head) window.values.push_back(x);
        }
      }
    }
    for (uint32_t layer = 0; layer < from.kv().shape.layers; ++layer) {
      const absl::StatusOr<Drift> drift = Measure(from, layer, window, one["kept"]);
      ASSERT_TRUE(drift.ok()) << drift.status();
      const double rows = 1.0 * window.queries * window.q_heads;
      EXPECT_EQ(drift->rows, rows);
      EXPECT_NEAR(drift->sum, one["sums"][layer].get<double>(), 1e-5 * rows) << layer;
      EXPECT_NEAR(drift->greatest, one["greatest"][layer].get<double>(), 2e-5) << layer;
    }
  }
}

TEST(DriftTest, EveryTypeAndArrangement) {
  for (const KvDtype dtype :
       {KvDtype::kF32, KvDtype::kF16, KvDtype::kBf16, KvDtype::kFp8E4m3, KvDtype::kFp8E5m2}) {
    for (const Arrangement arrangement : {Arrangement::kTokenHeadDim, Arrangement::kHeadTokenDim,
                                          Arrangement::kColumnMajorKeys, Arrangement::kScattered}) {
      const Sequence from({.tokens = 47,
                           .k_dim = 16,
                           .v_dim = 12,
                           .dtype = dtype,
                           .arrangement = arrangement,
                           .seed = 5 + static_cast<uint64_t>(arrangement)});
      ExpectDrift(from, RandomQueries(from.kv().shape, 3, 4, 9), SomeKept(from.kv().shape, 2, 20, 3),
                  "type " + std::to_string(static_cast<int>(dtype)) + " arrangement " +
                      std::to_string(static_cast<int>(arrangement)));
    }
  }
}

TEST(DriftTest, ShapesAtTheLimits) {
  for (const auto& [tokens, k_dim, v_dim, queries, q_heads] :
       std::vector<std::array<uint32_t, 5>>{{1, 1, 1, 1, 2},
                                            {2, 1, 256, 2, 2},
                                            {33, 256, 1, 33, 2},
                                            {70, 40, 72, 64, 6},
                                            {1100, 8, 33, 2, 2}}) {
    const Sequence from({.tokens = tokens, .k_dim = k_dim, .v_dim = v_dim});
    ExpectDrift(from, RandomQueries(from.kv().shape, queries, q_heads, 4),
                SomeKept(from.kv().shape, 1, tokens / 2 + 1, 5), std::to_string(tokens) + " tokens");
  }
}

TEST(DriftTest, WhereAllStayNothingMovesAndWhereNoneDoesAllIsGone) {
  const Sequence from({.tokens = 40});
  const KvShape& shape = from.kv().shape;
  const Queries window = RandomQueries(shape, 5, 4, 2);
  const auto none = Measure(from, 1, window, SomeKept(shape, 1, shape.tokens, 1));
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->greatest, 0);
  EXPECT_EQ(none->rows, 20u);
  const auto all = Measure(from, 1, window, {{}});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_NEAR(all->sum, 20, 1e-5);
  // The first query sees tokens 0 to 35, so that nothing it sees stays.
  const auto newest = Measure(from, 1, window, {{36, 37, 38, 39}});
  ASSERT_TRUE(newest.ok()) << newest.status();
  const Drift expected = Expect(from, 1, window, {{36, 37, 38, 39}});
  EXPECT_NEAR(newest->sum, expected.sum, 1e-3);
}

// What stays keeps its own scale: in f32 its weights beside that of the token that leaves are zero.
TEST(DriftTest, WhatStaysMayBeFarBelowWhatLeaves) {
  const Sequence from({.layers = 1, .tokens = 9, .heads = 1, .k_dim = 1, .v_dim = 2, .tokens_per_block = 4},
                      [](bool value, uint32_t, uint32_t token, uint32_t, uint32_t dim) {
                        if (!value) return token == 4 ? 300.0 : static_cast<double>(token) / 4;
                        return token == 4 ? 1.0 : dim == 0 ? 2.0 : static_cast<double>(token);
                      });
  Queries window{.queries = 1, .q_heads = 1, .scale = 1, .values = {1}};
  const Kept kept = {{0, 1, 2, 3, 5, 6, 7, 8}};
  ExpectDrift(from, window, kept, "one token has all the attention");
}

TEST(DriftTest, AKeyThatIsNotANumberIsLeftOutAndAValueIsRefused) {
  const auto with = [](bool in_value) {
    return std::make_unique<Sequence>(SequenceOptions{.tokens = 30},
                                      [in_value, random = std::make_shared<Random>(5)](
                                          bool value, uint32_t, uint32_t t, uint32_t, uint32_t d) {
                                        return t == 7 && d == 3 && value == in_value ? NAN : random->Normal();
                                      });
  };
  const std::unique_ptr<Sequence> keys = with(false), values = with(true);
  const KvShape& shape = keys->kv().shape;
  const Queries window = RandomQueries(shape, 2, 4, 8);
  ExpectDrift(*keys, window, SomeKept(shape, 2, 12, 5), "a key");
  EXPECT_THAT(Measure(*values, 0, window, SomeKept(shape, 2, 12, 5)).status().ToString(),
              testing::StartsWith("OUT_OF_RANGE: the outputs are not finite"));
}

TEST(DriftTest, AQueryThatIsNotANumberIsRefused) {
  const Sequence from({.tokens = 30});
  Queries window = RandomQueries(from.kv().shape, 2, 4, 8);
  window.values.back() = NAN;
  const Kept kept = SomeKept(from.kv().shape, 1, 12, 5);
  EXPECT_TRUE(Measure(from, 0, window, kept).ok());  // It is the other layer's.
  EXPECT_EQ(Measure(from, 1, window, kept).status().code(), absl::StatusCode::kOutOfRange);
}

// The only token that stays has a value of 1, and all together of 1/1000.
TEST(DriftTest, AnOutputThatNearlyCancelsDoesNotDecideAlone) {
  const Sequence from({.layers = 1, .tokens = 2, .heads = 1, .k_dim = 1, .v_dim = 1},
                      [](bool value, uint32_t, uint32_t token, uint32_t, uint32_t) {
                        return !value ? 1.0 : token == 0 ? 1.0 : -0.998;
                      });
  const Queries window{.queries = 1, .q_heads = 1, .values = {1}};
  const auto drift = Measure(from, 0, window, {{0}});
  ASSERT_TRUE(drift.ok()) << drift.status();
  EXPECT_EQ(drift->sum, 10);
  EXPECT_NEAR(drift->greatest, 999, 1);
}

TEST(DriftTest, ValuesOfZeroDoNotMove) {
  const Sequence from({.tokens = 30}, [random = std::make_shared<Random>(5)](bool value, uint32_t, uint32_t,
                                                                             uint32_t, uint32_t) {
    return value ? 0.0 : random->Normal();
  });
  const auto drift = Measure(from, 0, RandomQueries(from.kv().shape, 2, 4, 8), {{1, 2, 3}});
  ASSERT_TRUE(drift.ok()) << drift.status();
  EXPECT_EQ(drift->greatest, 0);
}

TEST(DriftTest, ChecksNameTheNumbers) {
  const Sequence from({.tokens = 30});
  DriftRequest request{.kv = from.kv()};
  request.window = {.queries = 2, .q_heads = 4};
  EXPECT_TRUE(CheckDrift(request, 1 << 20).ok());
  // Queries 2 * 4 * 20 and their peaks, two weights for each row and token, and the drifts, each array a multiple of 64 bytes; a word
  // of bits.
  EXPECT_EQ(CheckDrift(request, 2691).message(),
            "measuring a drift needs 2692 bytes on the device; the limit is 2691 "
            "(--score-workspace)");
  EXPECT_TRUE(CheckDrift(request, 2692).ok());
  for (const auto& [queries, q_heads] :
       {std::pair(0, 4), std::pair(65, 4), std::pair(2, 0), std::pair(2, 3)}) {
    request.window.queries = queries;
    request.window.q_heads = q_heads;
    EXPECT_THAT(CheckDrift(request, 1 << 20).message(),
                HasSubstr("must be 1 to 64 queries and a multiple of 2"));
  }
  request.window = {.queries = 2, .q_heads = 4};
  request.kv.shape.v_head_dim = 0;
  EXPECT_THAT(CheckDrift(request, 1 << 20).message(), HasSubstr("the layout has no V"));
}

// Fewer rows than there are fit at once.
TEST(DriftTest, RowsComeInRounds) {
  const Sequence from({.tokens = 45});
  const Queries window = RandomQueries(from.kv().shape, 5, 4, 3);
  for (const uint64_t weights : {1, 3 * 2 * 45, 20 * 2 * 45 - 1}) {
    ExpectDrift(from, window, SomeKept(from.kv().shape, 2, 30, 3), std::to_string(weights) + " weights",
                weights);
  }
}

}  // namespace
}  // namespace kvpool::scorers::drifts
