#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "cuda/lab/evaluate.h"
#include "cuda/lab/explain.h"
#include "cuda/lab/tensor.h"

namespace kvpool::lab {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Safetensors(const std::string& header, const std::string& data) {
  const uint64_t bytes = header.size();
  std::string file(sizeof(bytes), 0);
  std::memcpy(file.data(), &bytes, sizeof(bytes));
  return file + header + data;
}

std::string ErrorOf(const absl::StatusOr<Tensors>& tensors) {
  EXPECT_FALSE(tensors.ok());
  return std::string(tensors.status().message());
}

TEST(SafetensorsTest, TypesAndShapes) {
  const std::string data("\x00\x00\x80\x3f\x00\x00\x00\xc0\x00\x3c\x00\xbc\x80\x3f\x38\x3c", 16);
  const auto tensors = ParseSafetensors(Safetensors(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[1,2],"data_offsets":[8,12]},)"
      R"("c":{"dtype":"BF16","shape":[],"data_offsets":[12,14]},"d":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[14,15]},)"
      R"("e":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[15,16]},"__metadata__":{"format":"pt"}})",
      data));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_THAT(tensors->Find("a")->values, ElementsAre(1, -2));
  EXPECT_THAT(tensors->Find("b")->values, ElementsAre(1, -1));
  EXPECT_THAT(tensors->Find("b")->shape, ElementsAre(1, 2));
  EXPECT_THAT(tensors->Find("c")->values, ElementsAre(1));
  EXPECT_THAT(tensors->Find("d")->values, ElementsAre(1));
  EXPECT_THAT(tensors->Find("e")->values, ElementsAre(1));
}

TEST(SafetensorsTest, WhatIsWrongIsRefused) {
  const auto error = [](const std::string& header, const std::string& data = "") {
    return ErrorOf(ParseSafetensors(Safetensors(header, data)));
  };
  EXPECT_THAT(ErrorOf(ParseSafetensors("abc")), HasSubstr("shorter than 8"));
  EXPECT_THAT(ErrorOf(ParseSafetensors(std::string(8, '\xff') + "{}")),
              HasSubstr("the header is said to have"));
  EXPECT_THAT(error("[]"), HasSubstr("no JSON object"));
  EXPECT_THAT(error("{\"a\":1}"), HasSubstr("lacks dtype"));
  EXPECT_THAT(error(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "1234"),
              HasSubstr("lacks dtype"));
  EXPECT_THAT(error(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", "1234"),
              HasSubstr("dtype F33"));
  EXPECT_THAT(error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "1234"),
              HasSubstr("are not 8 bytes"));
  EXPECT_THAT(error(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "12345678"),
              HasSubstr("begins at 4"));
  EXPECT_THAT(error(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "12345"),
              HasSubstr("1 bytes behind"));
  EXPECT_THAT(error(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})"),
              HasSubstr("more than 2^32"));
}

TEST(JsonTest, WhatIsWrongIsRefused) {
  EXPECT_THAT(ErrorOf(ParseJson("{\"K\": [1,", "")), HasSubstr("parse error"));
  EXPECT_THAT(ErrorOf(ParseJson("[1]", "")), HasSubstr("not a JSON object"));
}

TEST(JsonTest, NumbersThatAreNoneMayBeQuotedOrNot) {
  const auto tensors = ParseJson(
      R"({"of": "NaN, \"-Infinity", "mass": [NaN, -Infinity, Infinity, "NaN", "-Infinity", -1]})", "");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  const std::vector<double>& mass = tensors->Find("mass")->values;
  ASSERT_EQ(mass.size(), 6u);
  EXPECT_TRUE(std::isnan(mass[0]) && std::isnan(mass[3]));
  EXPECT_EQ(mass[1], -HUGE_VAL);
  EXPECT_EQ(mass[2], HUGE_VAL);
  EXPECT_EQ(mass[4], -HUGE_VAL);
  EXPECT_EQ(mass[5], -1);
  EXPECT_THAT(ErrorOf(ParseJson("{\"mass\": [Nan]}", "")), HasSubstr("parse error"));
}

absl::StatusOr<Choice> CompactText(const std::string& json, const Options& options) {
  const auto tensors = ParseJson(json, options.policy);
  if (!tensors.ok()) return tensors.status();
  const auto problem = Problem::Make(*tensors, {});
  if (!problem.ok()) return problem.status();
  const auto policy = BindFor(options, **problem);
  if (!policy.ok()) return policy.status();
  return Compact(**problem, *policy, options);
}

TEST(ProblemTest, ShapesThatDoNotFitAreNamed) {
  const auto error = [](const std::string& json, const std::string& policy, uint32_t budget = 1) {
    return std::string(CompactText(json, {.policy = policy, .budget_tokens = budget}).status().message());
  };
  EXPECT_THAT(error("{}", "recency"), HasSubstr("no tokens found"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3]]})", "keydiff"), HasSubstr("no tokens found"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]], "V": [[1, 2]]})", "paged_eviction"),
              HasSubstr("V has shape [1, 2]"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]]})", "paged_eviction"), HasSubstr("needs V"));
  EXPECT_THAT(error(R"({"V": [[1, 2], [3, 4]], "mass": [1, 2]})", "keydiff"), HasSubstr("needs K"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]]})", "h2o"), HasSubstr("needs attention mass, not given"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]], "mass": [1, 2, 3]})", "h2o"), HasSubstr("mass has shape [3]"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]], "queries": [[1, 2, 3]]})", "tova"),
              HasSubstr("queries has shape"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]], "B": 1.5})", "keydiff"),
              HasSubstr("tokens_per_block must be"));
  EXPECT_THAT(error(R"({"K": [[1, 2], [3, 4]]})", "keydiff", 0), HasSubstr("no budget"));
  EXPECT_THAT(error(R"({"mass": [1, 2, 3, 4]})", "h2o", 1), HasSubstr(""));
  EXPECT_THAT(error(R"({"K": [[1], [2], [3], [4]]})", "streaming_llm", 2), HasSubstr("are protected"));
}

TEST(CompactTest, HeadsOfALayerShareItsBudget) {
  const std::string input = R"({"K": [[[1],[1]],[[1],[1]],[[1],[1]],[[1],[1]],[[1],[1]]],
                               "importance": [[10, 11, 12, 13, 14], [1, 2, 3, 4, 5]], "B": 2})";
  Options options{.policy = "importance", .scope = scorers::Scope::kHead, .budget_tokens = 3};
  const auto uniform = CompactText(input, options);
  ASSERT_TRUE(uniform.ok()) << uniform.status();
  EXPECT_THAT(uniform->kept, ElementsAre(ElementsAre(2, 3, 4), ElementsAre(2, 3, 4)));
  options.heads = HeadBudgets::kAda;
  const auto shared = CompactText(input, options);
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_THAT(shared->kept, ElementsAre(ElementsAre(0, 1, 2, 3, 4), ElementsAre(4)));
  EXPECT_THAT(shared->victims, ElementsAre(ElementsAre(), ElementsAre(0, 1, 2, 3)));
  options.scope = scorers::Scope::kLayer;
  EXPECT_THAT(std::string(CompactText(input, options).status().message()), HasSubstr("needs --scope=head"));
}

// Of 10 tokens heads keep 3.5, 4.5 and 6: 14 together, of which the first of the two halves is rounded up.
TEST(CompactTest, HeadsLoseTheSharesOfACurve) {
  const auto input = [](const std::string& curve) {
    std::string one = "[";
    for (int t = 0; t < 10; ++t) one += std::string(t > 0 ? "," : "") + "[[1],[1],[1]]";
    return "{\"K\": " + one + "], \"budget_curve\": " + curve + "}";
  };
  Options options{
      .policy = "recency", .scope = scorers::Scope::kHead, .budget_tokens = 4, .heads = HeadBudgets::kCurve};
  const auto kept = [&](const std::string& curve) {
    std::vector<size_t> sizes;
    const auto choice = CompactText(input(curve), options);
    EXPECT_TRUE(choice.ok()) << choice.status();
    for (const std::vector<uint32_t>& row : choice->kept) {
      sizes.push_back(row.size());
      EXPECT_EQ(row.back(), 9u);
    }
    return sizes;
  };
  EXPECT_THAT(kept("[[0.65, 0.55, 0.4]]"), ElementsAre(4, 4, 6));
  EXPECT_THAT(kept("[[1, 0, 0.5]]"), ElementsAre(1, 10, 5));
  // 99 budgets, of which 60 % leaving is the sixtieth.
  std::string all = "[";
  for (int percent = 1; percent <= 99; ++percent) {
    const std::string row = percent == 60 ? "[[0.5, 0.6, 0.7]]" : "[[0, 0, 0]]";
    all += (percent > 1 ? "," : "") + row;
  }
  EXPECT_THAT(kept(all + "]"), ElementsAre(5, 4, 3));
  options.budget_tokens = 10;
  EXPECT_THAT(kept("[[1, 1, 1]]"), ElementsAre(10, 10, 10)) << "nothing leaves";
  options.budget_tokens = 4;
  const auto error = [&](const std::string& curve) {
    return std::string(CompactText(input(curve), options).status().message());
  };
  EXPECT_THAT(error("[[1, 1]]"), HasSubstr("budget_curve has shape [1, 2], must be [1, 3], or 99 of these"));
  EXPECT_THAT(error("[[[1, 1, 1]]]"), HasSubstr("budget_curve has shape [1, 1, 3]"));
  EXPECT_THAT(error("[[1, 1.5, 1]]"), HasSubstr("budget_curve has 1.5, must be 0 to 1"));
  options.scope = scorers::Scope::kLayer;
  EXPECT_THAT(error("[[1, 1, 1]]"), HasSubstr("--heads=curve needs --scope=head"));
  options.scope = scorers::Scope::kHead;
  EXPECT_THAT(std::string(CompactText(R"({"importance": [1, 2, 3, 4, 5]})", options).status().message()),
              HasSubstr("--heads=curve needs budget_curve, not given"));
  // Protected tokens stay whatever the curve says.
  options.policy = "streaming_llm";
  options.settings = {{"sinks", "3"}};
  const auto choice = CompactText(input("[[1, 0.6, 0]]"), options);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_THAT(choice->kept[0], ElementsAre(0, 1, 2));
  EXPECT_THAT(choice->kept[1], ElementsAre(0, 1, 2, 9));
  EXPECT_EQ(choice->kept[2].size(), 10u);
}

// Retrieval heads keep all, streaming heads two sinks and the last three tokens, where the budget is so large.
TEST(CompactTest, DuoAttentionsStreamingHeadsGiveTheirMiddle) {
  std::string keys = "[";
  for (int t = 0; t < 12; ++t) keys += std::string(t > 0 ? "," : "") + "[[1],[1]]";
  Options options{.policy = "duo_attention",
                  .settings = {{"sinks", "2"}, {"recent", "3"}},
                  .scope = scorers::Scope::kHead,
                  .budget_tokens = 9,
                  .heads = HeadBudgets::kAda};
  const auto choice = CompactText("{\"K\": " + keys + "], \"weights\": [0.9, 0.1]}", options);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->kept[0].size(), 12u);
  EXPECT_THAT(choice->kept[1], ElementsAre(0, 1, 8, 9, 10, 11));
}

TEST(ExplainTest, MarksWhatLeaves) {
  const auto choice =
      CompactText(R"({"importance": [5, 1, 4, 2, 3], "B": 2})", {.policy = "importance", .budget_tokens = 3});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_THAT(choice->victims[0], ElementsAre(1, 3));
  Picture picture{.title = "a < b",
                  .tokens = 5,
                  .tokens_per_block = 2,
                  .rows = 1,
                  .scores = choice->scores.tokens,
                  .stays = {1, 0, 1, 0, 1}};
  const std::string text = DrawText(picture);
  EXPECT_THAT(text, HasSubstr("       0  #.  mean 3\n"));
  EXPECT_THAT(text, HasSubstr("3 of 5 tokens stay"));
  const std::string svg = DrawSvg(picture);
  EXPECT_THAT(svg, HasSubstr("a &lt; b"));
  EXPECT_THAT(svg, HasSubstr("<title>token 3, block 1: 2</title></rect>\n<path"));
}

}  // namespace
}  // namespace kvpool::lab
