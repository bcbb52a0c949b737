// Weights of trained policies: reading a file says what is wrong with it.
#include "server/replacement/parts/weights.h"

#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/replacement/policies/cold_rl.h"
#include "server/replacement/policy.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

Weights Good() {
  Weights weights(ColdRlPolicy::Shape(), "by hand");
  for (const WeightsShape::Tensor& tensor : ColdRlPolicy::Shape().tensors) {
    size_t size = 1;
    for (const uint64_t extent : tensor.shape) size *= extent;
    weights.Set(tensor.name, tensor.shape, std::vector<float>(size, 0.5f));
  }
  return weights;
}

// The error of asking for the policy with those weights.
std::string ErrorOf(const std::string& bytes, std::string_view policy = "cold_rl") {
  absl::StatusOr<Weights> weights = Weights::Parse(bytes, "w.safetensors");
  if (!weights.ok()) return std::string(weights.status().message());
  const absl::Status status =
      MakeReplacementPolicy(
          policy, {.max_blocks = 2, .weights = std::make_shared<const Weights>(*std::move(weights))})
          .status();
  return std::string(status.message());
}

TEST(WeightsTest, ThereAndBackAgain) {
  const absl::StatusOr<Weights> read = Weights::Parse(Good().Serialize(), "w.safetensors");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->trained(), "by hand");
  EXPECT_EQ(read->Serialize(), Good().Serialize());
  EXPECT_EQ(read->Get("hidden2.weight").size(), 64u * 64);
  EXPECT_EQ(ErrorOf(Good().Serialize()), "");
}

TEST(WeightsTest, TheyAreBuiltIn) {
  for (const PolicyEntry& entry : ReplacementPolicies()) {
    const auto policy = MakeReplacementPolicy(entry.name, 2);
    EXPECT_TRUE(policy.ok()) << policy.status();
  }
  const auto weights = Weights::BuiltIn("cold_rl");
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_THAT((*weights)->trained(), HasSubstr("mooncake_conversation_trace"));
  EXPECT_EQ(Weights::BuiltIn("lru").status().message(), "no weights of lru are built in");
}

TEST(WeightsTest, WhatIsWrongIsNamed) {
  EXPECT_EQ(Weights::Read("/nowhere/w.safetensors").status().message(),
            "/nowhere/w.safetensors: No such file or directory");
  EXPECT_EQ(ErrorOf("no"), "w.safetensors: shorter than 8 bytes");
  EXPECT_EQ(ErrorOf(Good().Serialize() + "x"), "w.safetensors: 1 bytes behind the last tensor");
  EXPECT_EQ(ErrorOf(Good().Serialize(), "lru"),
            "w.safetensors: weights of policy cold_rl, but the policy that is asked for has none");

  Weights shape = Good();
  shape.Set("hidden1.weight", {64, 5}, std::vector<float>(320));
  EXPECT_EQ(ErrorOf(shape.Serialize()),
            "w.safetensors: tensor \"hidden1.weight\" has shape [64, 5], not [64, 6]");
  Weights nan = Good();
  nan.Set("value.bias", {1}, {std::numeric_limits<float>::quiet_NaN()});
  EXPECT_EQ(ErrorOf(nan.Serialize()), "w.safetensors: tensor \"value.bias\": value 0 is nan, not finite");
  Weights more = Good();
  more.Set("extra", {1}, {0});
  EXPECT_EQ(ErrorOf(more.Serialize()), "w.safetensors: 9 tensors, not 8");

  WeightsShape other = ColdRlPolicy::Shape();
  EXPECT_EQ(ErrorOf(Weights(other, "").Serialize()),
            "w.safetensors: tensor \"hidden1.weight\" of shape [64, 6] is missing");
  other.features = "age,size";
  EXPECT_EQ(ErrorOf(Weights(other, "").Serialize()),
            "w.safetensors: features are age,size, not age,size,hits,inter_arrival,idle,cost");
  other.format = "2";
  EXPECT_EQ(ErrorOf(Weights(other, "").Serialize()), "w.safetensors: format is 2, not 1");
  other.policy = "learned";
  EXPECT_EQ(ErrorOf(Weights(other, "").Serialize()),
            "w.safetensors: weights of policy learned, not of cold_rl");
}

TEST(WeightsTest, OthersFilesAreRefused) {
  // A header of a file that some other program wrote: tensors of another type, no metadata.
  const auto file = [](std::string header, const std::string& data) {
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    return bytes + header + data;
  };
  EXPECT_EQ(ErrorOf(file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "1234")),
            "w.safetensors: the metadata lacks policy: not written by kvpool-sim train");
  EXPECT_EQ(ErrorOf(file(R"({"__metadata__":{"policy":"p","format":"1","features":"","trained":""},)"
                         R"("a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}})",
                         "12")),
            "w.safetensors: tensor \"a\": dtype is BF16, not F32");
}

}  // namespace
}  // namespace kvpool
