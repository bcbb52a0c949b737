// Learned policies from training to scores: a network learns to tell tokens apart whose labels it can
// tell apart.
#include "cuda/lab/train.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cuda/lab/evaluate.h"
#include "tests/scorers/sequence.h"

namespace kvpool::lab {
namespace {

using testing::HasSubstr;

// Scores of `input` with weights that went through a file's bytes.
std::vector<float> ScoresWith(Tensors input, const Tensors& weights, const Options& options) {
  const auto read = ParseSafetensors(SafetensorsOf(weights));
  EXPECT_TRUE(read.ok()) << read.status();
  for (const auto& [name, tensor] : read->by_name) input.by_name[name] = tensor;
  const auto problem = Problem::Make(input, {});
  EXPECT_TRUE(problem.ok()) << problem.status();
  const auto policy = BindFor(options, **problem);
  EXPECT_TRUE(policy.ok()) << policy.status();
  const auto scores = Score(**problem, *policy, options);
  EXPECT_TRUE(scores.ok()) << scores.status();
  return scores->tokens;
}

Tensor RandomTensor(std::vector<uint64_t> shape, uint64_t seed) {
  Tensor tensor{.shape = std::move(shape)};
  uint64_t size = 1;
  for (const uint64_t extent : tensor.shape) size *= extent;
  scorers::Random random(seed);
  for (uint64_t i = 0; i < size; ++i) tensor.values.push_back(static_cast<float>(random.Normal()));
  return tensor;
}

TEST(TrainTest, SeparableLabelsAreSeparated) {
  constexpr uint64_t kTokens = 120, kDim = 6;
  Tensors input;
  input.by_name["hidden"] = RandomTensor({kTokens, kDim}, 4);
  std::vector<double>& x = input.by_name["hidden"].values;
  Tensor target{.shape = {kTokens}};
  for (uint64_t t = 0; t < kTokens; ++t) {
    // Tokens at both ends are to stay, which no single direction separates from those in the middle.
    const bool wanted = t % 3 == 0;
    x[t * kDim] = wanted ? (t % 2 == 0 ? 2.0 : -2.0) : x[t * kDim] / 4;
    target.values.push_back(wanted ? 1 : 0);
  }
  input.by_name["target"] = target;
  const auto weights = Train(input, "learned_mlp", {{"units", "8"}, {"steps", "600"}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  const std::vector<float> scores = ScoresWith(input, *weights, {.policy = "learned_mlp"});
  float worst_wanted = 1, best_other = 0;
  for (uint64_t t = 0; t < kTokens; ++t) {
    (target.values[t] == 1 ? worst_wanted : best_other) =
        target.values[t] == 1 ? std::min(worst_wanted, scores[t]) : std::max(best_other, scores[t]);
    // The network itself, in doubles.
    double logit = weights->Find("b2")->values[0];
    for (uint64_t u = 0; u < 8; ++u) {
      double sum = weights->Find("b1")->values[u];
      for (uint64_t d = 0; d < kDim; ++d) sum += weights->Find("W1")->values[u * kDim + d] * x[t * kDim + d];
      logit += weights->Find("w2")->values[u] * std::max(sum, 0.0);
    }
    EXPECT_NEAR(scores[t], 1 / (1 + std::exp(-logit)), 1e-5);
  }
  EXPECT_GT(worst_wanted, best_other) << "the area under the curve is not 1";
}

TEST(TrainTest, GatesKeepPlantedTokensAtTheRateAskedFor) {
  constexpr uint64_t kLayers = 2, kHeads = 2, kTokens = 200, kDim = 5;
  Tensors input;
  input.by_name["hidden"] = RandomTensor({kLayers, kTokens, kDim}, 7);
  input.by_name["K"] = RandomTensor({kLayers, kTokens, kHeads, 3}, 8);
  Tensor target{.shape = {kLayers, kHeads, kTokens}};
  // Head h of layer l keeps the tokens whose element l + h is large: four of ten.
  for (uint64_t i = 0; i < kLayers * kHeads * kTokens; ++i) {
    const uint64_t t = i % kTokens, head = i / kTokens % kHeads, layer = i / kTokens / kHeads;
    double& element = input.by_name["hidden"].values[(layer * kTokens + t) * kDim + layer + head];
    const bool kept = (t * 7 + layer + 3 * head) % 10 < 4;
    element = (kept ? 1 : -1) * (std::abs(element) + 0.2);
    target.values.push_back(kept ? 1 : 0);
  }
  input.by_name["target"] = target;
  const auto weights = Train(input, "attention_gate", {{"keep", "0.4"}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  Options options{.policy = "attention_gate", .settings = {{"source", "gate"}, {"output", "flag"}}};
  options.scope = scorers::Scope::kHead;
  const std::vector<float> flags = ScoresWith(input, *weights, options);
  double kept = 0;
  for (size_t i = 0; i < flags.size(); ++i) {
    kept += double{flags[i]};
    EXPECT_GE(flags[i], target.values[i]) << "planted token " << i;
  }
  EXPECT_NEAR(kept / static_cast<double>(flags.size()), 0.4, 0.02);
}

TEST(TrainTest, WhatIsWrongIsRefused) {
  Tensors input;
  const auto error = [&input](const std::string& policy, const TrainingSettings& settings) {
    return std::string(Train(input, policy, settings).status().message());
  };
  EXPECT_THAT(error("learned_mlp", {}), HasSubstr("hidden"));
  input.by_name["hidden"] = RandomTensor({3, 2}, 1);
  EXPECT_THAT(error("learned_mlp", {}), HasSubstr("target"));
  input.by_name["target"] = {.shape = {3}, .values = {0, 1, 2}};
  EXPECT_THAT(error("learned_mlp", {}), HasSubstr("from 0 to 1"));
  EXPECT_THAT(error("learned_mlp", {{"speed", "1"}}), HasSubstr("parameter speed"));
  EXPECT_THAT(error("learned_mlp", {{"steps", "0"}}), HasSubstr("must be 1 to"));
  EXPECT_THAT(error("h2o", {}), HasSubstr("not trained"));
}

}  // namespace
}  // namespace kvpool::lab
