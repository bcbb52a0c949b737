// Weights from a dump of queries, and the scores that they give, against what they stand for: the means of products of
// queries with keys.
#include "cuda/lab/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <string>
#include <vector>

#include "cuda/lab/evaluate.h"
#include "cuda/lab/train.h"
#include "tests/scorers/sequence.h"

namespace kvpool::lab {
namespace {

using Complex = std::complex<double>;
using testing::HasSubstr;

constexpr uint64_t kLayers = 2, kQueries = 40, kHeads = 4, kKvHeads = 2, kGroup = 2, kDim = 6, kTokens = 9;
constexpr uint64_t kSinks = 3;  // queries that are left out

Tensor Normals(std::vector<uint64_t> shape, uint64_t seed, double mean = 0) {
  Tensor tensor{.shape = std::move(shape)};
  uint64_t size = 1;
  for (const uint64_t extent : tensor.shape) size *= extent;
  scorers::Random random(seed);
  for (uint64_t i = 0; i < size; ++i) tensor.values.push_back(static_cast<float>(mean + random.Normal()));
  return tensor;
}

class CalibrateTest : public testing::Test {
 protected:
  CalibrateTest() {
    dump_.by_name["queries"] = Normals({kLayers, kQueries, kHeads, kDim}, 1, 0.5);
    sequence_.by_name["K"] = Normals({kLayers, kTokens, kKvHeads, kDim}, 2);
    sequence_.by_name["V"] = Normals({kLayers, kTokens, kKvHeads, kDim}, 3);
  }

  const double* Query(uint64_t layer, uint64_t query, uint64_t head) const {
    return dump_.Find("queries")->values.data() + ((layer * kQueries + query) * kHeads + head) * kDim;
  }
  const double* Key(uint64_t layer, uint64_t token, uint64_t head) const {
    return sequence_.Find("K")->values.data() + ((layer * kTokens + token) * kKvHeads + head) * kDim;
  }

  // The weights went through a file's bytes.
  void Weigh(const std::string& policy, CalibrationSettings settings) {
    settings.emplace_back("sinks", std::to_string(kSinks));
    const auto weights = Calibrate(dump_, policy, settings);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const auto read = ParseSafetensors(SafetensorsOf(*weights));
    ASSERT_TRUE(read.ok()) << read.status();
    sequence_.by_name["weights"] = read->by_name.at("weights");
  }

  // [layer][kv head][token]
  std::vector<float> Scores(const Options& options) {
    const auto problem = Problem::Make(sequence_, {});
    EXPECT_TRUE(problem.ok()) << problem.status();
    const auto policy = BindFor(options, **problem);
    EXPECT_TRUE(policy.ok()) << policy.status();
    Options of_heads = options;
    of_heads.scope = scorers::Scope::kHead;
    const auto scores = Score(**problem, *policy, of_heads);
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->tokens : std::vector<float>();
  }

  static double Product(const std::vector<double>& a, const double* b) {
    double sum = 0;
    for (uint64_t d = 0; d < kDim; ++d) sum += a[d] * b[d];
    return sum;
  }

  // RoPE by its definition: the pair f of a row turned by position * theta^(-2 f / dim).
  static std::vector<double> Turned(const double* row, double position, bool interleaved, double theta) {
    std::vector<double> turned(kDim);
    for (uint64_t f = 0; f < kDim / 2; ++f) {
      const uint64_t a = interleaved ? 2 * f : f, b = interleaved ? 2 * f + 1 : f + kDim / 2;
      const double angle = position * std::pow(theta, -2.0 * static_cast<double>(f) / kDim);
      turned[a] = row[a] * std::cos(angle) - row[b] * std::sin(angle);
      turned[b] = row[a] * std::sin(angle) + row[b] * std::cos(angle);
    }
    return turned;
  }

  Tensors dump_, sequence_;
};

// Without the term of lengths the score is the mean over queries, heads and offsets of the product of a query, turned to
// its position, with the key.
TEST_F(CalibrateTest, TriattentionIsTheMeanOverQueriesToCome) {
  constexpr double kPosition = 1000;
  const double offsets[] = {1, 2, 4, 8};
  for (const bool interleaved : {false, true}) {
    const std::string pairing = interleaved ? "interleaved" : "half";
    Weigh("triattention", {{"kv_heads", "2"}, {"theta", "500"}, {"farthest", "15"}, {"pairing", pairing}});
    sequence_.by_name["now"] = {.values = {kPosition}};
    const auto scores =
        Scores({.policy = "triattention", .settings = {{"normalise", "false"}, {"pairing", pairing}}});
    ASSERT_EQ(scores.size(), kLayers * kKvHeads * kTokens);
    for (uint64_t i = 0; i < scores.size(); ++i) {
      const uint64_t layer = i / kTokens / kKvHeads, head = i / kTokens % kKvHeads;
      const double* const key = Key(layer, i % kTokens, head);
      double expected = 0;
      Complex mean[kDim / 2];
      double length[kDim / 2] = {};
      constexpr double kCount = kGroup * (kQueries - kSinks);
      for (uint64_t q = kSinks; q < kQueries; ++q) {
        for (uint64_t g = 0; g < kGroup; ++g) {
          const double* const query = Query(layer, q, head * kGroup + g);
          for (const double offset : offsets) {
            expected += Product(Turned(query, kPosition + offset, interleaved, 500), key) / kCount / 4;
          }
          for (uint64_t f = 0; f < kDim / 2; ++f) {
            const Complex pair = interleaved ? Complex(query[2 * f], query[2 * f + 1])
                                             : Complex(query[f], query[f + kDim / 2]);
            mean[f] += pair / kCount;
            length[f] += std::abs(pair) / kCount;
          }
        }
      }
      for (uint64_t f = 0; f < kDim / 2; ++f) {
        const double of_key =
            interleaved ? std::hypot(key[2 * f], key[2 * f + 1]) : std::hypot(key[f], key[f + kDim / 2]);
        expected += (length[f] - std::abs(mean[f])) * of_key;
      }
      EXPECT_NEAR(scores[i], expected, 1e-5) << pairing << " at " << i;
    }
  }
}

// The mean is that of the queries turned to each position to come. The covariance is that of queries turned by the mean
// rotation, q -> Rq.
TEST_F(CalibrateTest, ExpectedAttentionHasTheMomentsOfTurnedQueries) {
  constexpr uint64_t kPosition = 7, kFuture = 5;
  Weigh("expected_attention", {{"theta", "500"}, {"position", "7"}, {"future", "5"}, {"scale", "2"}});
  const Tensor& weights = sequence_.by_name["weights"];
  ASSERT_EQ(weights.shape, (std::vector<uint64_t>{kLayers, kHeads, kDim + kDim * kDim}));
  constexpr double kCount = kQueries - kSinks;
  for (uint64_t plane = 0; plane < kLayers * kHeads; ++plane) {
    std::vector<std::vector<double>> turned;
    std::vector<double> mean(kDim);
    for (uint64_t q = kSinks; q < kQueries; ++q) {
      turned.emplace_back(kDim);
      for (uint64_t p = kPosition; p < kPosition + kFuture; ++p) {
        const auto at = Turned(Query(plane / kHeads, q, plane % kHeads), static_cast<double>(p), false, 500);
        for (uint64_t d = 0; d < kDim; ++d) turned.back()[d] += 2 * at[d] / kFuture;
      }
      for (uint64_t d = 0; d < kDim; ++d) mean[d] += turned.back()[d] / kCount;
    }
    const double* const own = weights.values.data() + plane * (kDim + kDim * kDim);
    for (uint64_t d = 0; d < kDim; ++d) {
      EXPECT_NEAR(own[d], mean[d], 1e-5) << plane;
      for (uint64_t e = 0; e < kDim; ++e) {
        double moment = 0;
        for (const auto& row : turned) moment += (row[d] - mean[d]) * (row[e] - mean[e]) / kCount;
        EXPECT_NEAR(own[kDim + d * kDim + e], moment, 1e-5) << plane << " at " << d << ", " << e;
      }
    }
  }
  EXPECT_EQ(Scores({.policy = "expected_attention"}).size(), kLayers * kKvHeads * kTokens);
  Weigh("expected_attention", {{"use_covariance", "false"}});
  EXPECT_EQ(sequence_.by_name["weights"].shape, (std::vector<uint64_t>{kLayers, kHeads, kDim}));
}

// Queries along one direction, most of them on one side of it, with noise: the keys on that side stay. The directions of
// two elements that vary alike and oppositely are told apart.
TEST_F(CalibrateTest, QfiltersFindTheDirectionOfTheQueries) {
  scorers::Random random(5);
  const double direction[kDim] = {0.5, -0.5, 0.5, -0.5, 0, 0};
  std::vector<double>& queries = dump_.by_name["queries"].values;
  for (uint64_t i = 0; i < queries.size(); i += kDim) {
    const double along = random.Normal() + (random.Below(10) == 0 ? -3 : 3);
    for (uint64_t d = 0; d < kDim; ++d) queries[i + d] = along * direction[d] + 0.01 * random.Normal();
  }
  Weigh("qfilters", {{"kv_heads", "2"}});
  const auto scores = Scores({.policy = "qfilters"});
  ASSERT_EQ(scores.size(), kLayers * kKvHeads * kTokens);
  for (uint64_t i = 0; i < scores.size(); ++i) {
    const double* const key = Key(i / kTokens / kKvHeads, i % kTokens, i / kTokens % kKvHeads);
    EXPECT_NEAR(scores[i], Product({direction, direction + kDim}, key), 0.02) << i;
  }
}

TEST_F(CalibrateTest, WhatIsWrongIsNamed) {
  const auto error = [this](const std::string& policy, const CalibrationSettings& settings) {
    const auto weights = Calibrate(dump_, policy, settings);
    EXPECT_EQ(weights.status().code(), absl::StatusCode::kInvalidArgument) << weights.status();
    return std::string(weights.status().message());
  };
  EXPECT_THAT(error("snapkv", {}), HasSubstr("policy snapkv is not calibrated"));
  EXPECT_THAT(error("qfilters", {{"kv_head", "2"}}),
              HasSubstr("parameter kv_head of calibration is unknown"));
  EXPECT_THAT(error("qfilters", {{"kv_heads", "3"}}), HasSubstr("kv_heads is 3, and 4 query heads"));
  EXPECT_THAT(error("qfilters", {{"kv_heads", "1.5"}}), HasSubstr("a whole number from 0 to 1024"));
  EXPECT_THAT(error("qfilters", {{"sinks", "40"}}), HasSubstr("must be below the number of queries, 40"));
  EXPECT_THAT(error("triattention", {{"pairing", "odd"}}), HasSubstr("\"odd\" is not half, interleaved"));
  EXPECT_THAT(error("triattention", {{"theta", "nan"}}), HasSubstr("parameter theta: \"nan\" must be 1 to"));
  EXPECT_THAT(error("expected_attention", {{"use_covariance", "x"}}),
              HasSubstr("\"x\" is not true or false"));
  dump_.by_name["inv_freq"] = {.shape = {2}, .values = {1, 0.1}};
  EXPECT_THAT(error("triattention", {}), HasSubstr("inv_freq has 2 numbers, must be 3 for dim 6"));
  dump_.by_name["queries"].values[5] = NAN;
  EXPECT_THAT(error("qfilters", {}), HasSubstr("a value that is not finite"));
  dump_.by_name["queries"] = Normals({20, 2, 5}, 1);
  EXPECT_THAT(error("triattention", {}), HasSubstr("dim is 5, must be even"));
  dump_.by_name.erase("queries");
  EXPECT_THAT(error("qfilters", {}), HasSubstr("queries [layer][query][head][dim]"));
}

}  // namespace
}  // namespace kvpool::lab
