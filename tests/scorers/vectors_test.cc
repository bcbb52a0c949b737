// Scores and choices against those of an independent implementation: vectors.json (make_vectors.py) has every
// policy's scores, scenarios.json (make_scenarios.py) what follows from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/lab/evaluate.h"
#include "cuda/lab/plan_budgets.h"
#include "cuda/scorers/policies/registry.h"
#include "cuda/scorers/select.h"
#include "nlohmann/json.hpp"
#include "tests/scorers/test_compute.h"

namespace kvpool::lab {
namespace {

using Json = nlohmann::json;

constexpr double kTolerance = 1e-5;

// A relative error; near 0, where scores are differences of numbers of size `scale`, it is relative to scale
// / 100, or / 10 where these numbers have been brought to mean 0 and deviation 1.
void ExpectNear(const std::vector<float>& actual, const std::vector<double>& expected,
                const std::string& what) {
  const bool normalised = what.starts_with("leverage") || what.starts_with("compactor");
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double scale = 0;
  for (const double x : expected) scale = std::max(scale, std::abs(x));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double size = std::max(std::abs(expected[i]), scale / (normalised ? 10 : 100));
    EXPECT_NEAR(actual[i], expected[i], kTolerance * size) << what << " at " << i;
  }
}

// Scores on the device that this run is about.
Options Here(Options options) {
  options.compute = TestCompute();
  return options;
}

Json ReadJson(const std::filesystem::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  return Json::parse(file);
}

struct Scored {
  std::unique_ptr<Problem> problem;
  Scores scores;
};

void ScoreInput(const Json& input, const Options& options, Scored* scored) {
  const auto tensors = ParseJson(input.dump(), "");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  auto problem = Problem::Make(*tensors, {});
  ASSERT_TRUE(problem.ok()) << problem.status();
  scored->problem = *std::move(problem);
  const auto policy = BindFor(options, *scored->problem);
  ASSERT_TRUE(policy.ok()) << policy.status();
  auto scores = Score(*scored->problem, *policy, Here(options));
  ASSERT_TRUE(scores.ok()) << scores.status();
  scored->scores = *std::move(scores);
}

std::vector<float> TokenScores(const Json& input, const Options& options) {
  Scored scored;
  ScoreInput(input, options, &scored);
  return scored.scores.tokens;
}

Options WithParams(const std::string& policy, const std::vector<std::string>& params) {
  Options options{.policy = policy};
  for (const std::string& param : params) {
    const size_t at = param.find('=');
    options.settings.emplace_back(param.substr(0, at), param.substr(at + 1));
  }
  return options;
}

// On a machine that has a GPU but not the source tree the variable names the folder of copies.
std::filesystem::path Vectors(const char* file) {
  const char* const folder = std::getenv("KVPOOL_SCORER_VECTORS");
  return std::filesystem::path(folder != nullptr ? folder : KVPOOL_SCORER_VECTORS) / file;
}

TEST(VectorsTest, EveryPolicyMatchesTheIndependentImplementation) {
  const Json vectors = ReadJson(Vectors("vectors.json"));
  std::set<std::string> covered = {"random"};  // it has no formula to compare with
  for (const Json& one : vectors["cases"]) {
    const std::string policy = one["policy"];
    covered.insert(policy);
    Json input = one["input"];
    for (const std::string name : one["uses"]) input[name] = vectors["shared"][name];
    Options options = WithParams(policy, one["params"].get<std::vector<std::string>>());
    const std::string what = policy + " " + one["params"].dump();
    Scored scored;
    ScoreInput(input, options, &scored);
    ExpectNear(scored.scores.tokens, one["token_scores"], what);
    ExpectNear(scored.scores.blocks, one["block_scores"], what + " blocks");
    options.scope = scorers::Scope::kHead;
    options.threads = 3;
    ScoreInput(input, options, &scored);
    std::vector<double> planes;
    for (const Json& plane : one["plane_scores"]) planes.insert(planes.end(), plane.begin(), plane.end());
    ExpectNear(scored.scores.tokens, planes, what + " planes");
  }
  for (const scorers::PolicyFacts* facts : scorers::Policies()) {
    EXPECT_TRUE(covered.contains(std::string(facts->name))) << "no vector for " << facts->name;
  }
}

// KVPOOL_GOLDEN may name a second file of the same form.
std::vector<std::filesystem::path> ScenarioFiles() {
  std::vector<std::filesystem::path> files = {Vectors("scenarios.json")};
  if (const char* const more = std::getenv("KVPOOL_GOLDEN")) files.emplace_back(more);
  return files;
}

class ScenariosTest : public testing::TestWithParam<std::filesystem::path> {
 protected:
  void SetUp() override { expected_ = ReadJson(GetParam()); }

  Tensors TensorsFor(const std::string& policy) {
    auto tensors = ParseJson(expected_.dump(), policy);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    return *std::move(tensors);
  }
  Json expected_;
};
INSTANTIATE_TEST_SUITE_P(Files, ScenariosTest, testing::ValuesIn(ScenarioFiles()),
                         [](const auto& file) { return file.index == 0 ? "Ours" : "Golden"; });

TEST_P(ScenariosTest, PagedEviction) {
  const Json& paged = expected_["paged_eviction"];
  ExpectNear(TokenScores(paged, {}), paged["S"], "S");
  const auto problem = Problem::Make(TensorsFor("paged_eviction"), {});
  ASSERT_TRUE(problem.ok()) << problem.status();
  for (const bool literal : {false, true}) {
    Options options;
    if (literal) options.settings = {{"paper_literal", "true"}};
    const auto policy = BindFor(options, **problem);
    ASSERT_TRUE(policy.ok()) << policy.status();
    const auto choice = Compact(**problem, *policy, Here(options));
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(Json(choice->victims[0]),
              paged[literal ? "evict_prefill_paper" : "evict_prefill_first_last_protected"]);
  }
}

TEST_P(ScenariosTest, PagedEvictionDropsPagesAsItDecodes) {
  // The scores of pages are given, so this tests the choice; a block is one token.
  const Json& paged = expected_["paged_eviction"];
  for (const Json& step : paged["decode"]) {
    const size_t pages = step["page_scores"].size();
    for (const bool literal : {false, true}) {
      const Json input = {
          {"importance", step["page_scores"]}, {"tokens_per_block", 1}, {"budget", pages - 1}};
      Scored scored;
      ScoreInput(input, {.policy = "importance"}, &scored);
      const auto bound = scorers::BindPolicy("paged_eviction", {{"paper_literal", literal ? "1" : "0"}});
      ASSERT_TRUE(bound.ok());
      const scorers::KvShape& shape = scored.problem->kv().shape;
      ASSERT_EQ(scorers::BlocksOverBudget(shape, static_cast<uint32_t>(pages - 1)), 1u);
      std::vector<uint8_t> marks(pages);
      scorers::MarkProtectedBlocks(scorers::ProtectionOf(*bound, shape, 0, 0), {}, shape,
                                   absl::MakeSpan(marks));
      std::vector<uint64_t> keys(pages);
      std::vector<uint32_t> victims(1);
      ASSERT_TRUE(scorers::SelectVictims(scored.scores.blocks, marks, 1, absl::MakeSpan(keys),
                                         absl::MakeSpan(victims))
                      .ok());
      EXPECT_EQ(victims[0], step[literal ? "evict_paper" : "evict_protected"].get<uint32_t>());
    }
  }
}

TEST_P(ScenariosTest, KeysAlone) {
  Json keys = {{"K", Json::array()}};
  for (const Json& token : expected_["paged_eviction"]["K"]) keys["K"].push_back(token[0]);
  ExpectNear(TokenScores(keys, {.policy = "inverse_key_l2"}), expected_["knorm_head0"], "inverse_key_l2");
  ExpectNear(TokenScores(keys, {.policy = "keydiff"}), expected_["keydiff_head0_normalised_anchor"],
             "keydiff");
  ExpectNear(TokenScores(keys, WithParams("keydiff", {"anchor=mean"})),
             expected_["keydiff_head0_plain_mean_anchor"], "keydiff, plain mean");
}

TEST_P(ScenariosTest, SequencesThatGrow) {
  for (const char* policy : {"h2o", "roco", "tova"}) {
    const auto growth = Grow(TensorsFor(policy), Here({.policy = policy}));
    ASSERT_TRUE(growth.ok()) << growth.status();
    EXPECT_EQ(Json(growth->evictions), expected_[policy]["evictions"]) << policy;
    EXPECT_EQ(Json(growth->final), expected_[policy]["final"]) << policy;
  }
}

TEST_P(ScenariosTest, Caote) {
  const Json& caote = expected_["caote"];
  ExpectNear(TokenScores(caote, {.policy = "caote"}), caote["caote"], "caote");
  ExpectNear(TokenScores(caote, {.policy = "caote"}), caote["brute_force"], "brute force");
  ExpectNear(TokenScores(caote, {.policy = "fast_caote"}), caote["fast_caote"], "fast_caote");
}

TEST_P(ScenariosTest, Graphkv) {
  const Json& graph = expected_["graphkv"];
  ExpectNear(TokenScores(graph, WithParams("graphkv", {"sources=3"})),
             expected_["graphkv_sequential"]["after"], "sequential");
  ExpectNear(TokenScores(graph, WithParams("graphkv", {"sources=3", "mode=all"})),
             graph["after_one_round_all_sources_exclude_self"], "all");
}

TEST_P(ScenariosTest, LazyEviction) {
  std::vector<double> both, first;
  for (const auto& [token, terms] : expected_["lazy"]["tokens"].items()) {
    first.push_back(terms["H1"]);
    both.push_back(terms["H1"].get<double>() + terms["H2_decreasing_variant"].get<double>());
  }
  ExpectNear(TokenScores(expected_["lazy"], {.policy = "lazy_eviction"}), both, "H1 + H2");
  ExpectNear(TokenScores(expected_["lazy"], WithParams("lazy_eviction", {"h2=off"})), first, "H1");
}

TEST_P(ScenariosTest, Cake) {
  Options options = WithParams("cake", {"pool=none"});
  options.scope = scorers::Scope::kLayer;
  const std::vector<float> all = TokenScores(expected_["cake"], options);
  const size_t keys = all.size() / 3;
  // The variance over all rows of keys before the window: the window's own end is not in these rows.
  ExpectNear({all.begin() + keys, all.begin() + 2 * keys}, expected_["cake"]["indicator_gamma200_layer1"],
             "indicator");
  const auto budgets = PlanBudgets(TensorsFor("cake"), Here({.policy = "cake", .budget_tokens = 10}));
  ASSERT_TRUE(budgets.ok()) << budgets.status();
  for (size_t layer = 0; layer < 3; ++layer) {
    EXPECT_NEAR(budgets->preferences[layer] / expected_["cake"]["pref"][layer].get<double>(), 1, 1e-9);
    EXPECT_NEAR(budgets->shares[layer] / expected_["cake"]["float_budget"][layer].get<double>(), 1, 1e-9);
  }
  EXPECT_EQ(budgets->tokens[0] + budgets->tokens[1] + budgets->tokens[2], 30u);
}

TEST_P(ScenariosTest, Mpcache) {
  for (const auto& [bound, name] : {std::pair("upper", "upper"), std::pair("linear", "linear_alpha0_6")}) {
    Scored scored;
    ScoreInput(expected_["mpcache"], WithParams("mpcache", {"stage=dynamic", std::string("bound=") + bound}),
               &scored);
    std::vector<double> expected;
    for (const Json& cluster : expected_["mpcache"]["scores"]) expected.push_back(cluster[name]);
    ExpectNear(scored.scores.blocks, expected, bound);
    for (size_t i = 0; i < expected.size() && std::string(bound) == "upper"; ++i) {
      EXPECT_GE(scored.scores.blocks[i], expected_["mpcache"]["scores"][i]["true_max"].get<double>() - 1e-5);
    }
  }
}

TEST_P(ScenariosTest, Budgets) {
  const auto plan = [this](const char* policy) {
    auto budgets = PlanBudgets(TensorsFor(policy), Here({.policy = policy}));
    EXPECT_TRUE(budgets.ok()) << budgets.status();
    return *std::move(budgets);
  };
  EXPECT_EQ(Json(plan("pyramid").tokens), expected_["budgets"]["pyramid"]["middle_budgets"]);
  const Budgets epicache = plan("epicache");
  EXPECT_EQ(Json(epicache.as_authors), expected_["budgets"]["epicache"]["out"]);
  EXPECT_EQ(epicache.tokens[0] + epicache.tokens[1] + epicache.tokens[2] + epicache.tokens[3], 4096u);
  const Budgets d2o = plan("d2o");
  for (size_t layer = 0; layer < 4; ++layer) {
    EXPECT_NEAR(d2o.shares[layer], expected_["budgets"]["d2o"]["ratio"][layer].get<double>(), 1e-12);
  }
}

}  // namespace
}  // namespace kvpool::lab
