#include "cuda/scorers/policies/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace kvpool::scorers {
namespace {

using testing::HasSubstr;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

TEST(RegistryTest, PagedEvictionIsFirstAndAllAreDescribed) {
  EXPECT_EQ(Policies()[0]->name, kDefaultPolicy);
  std::set<std::string_view> names;
  for (const PolicyFacts* facts : Policies()) {
    EXPECT_TRUE(names.insert(facts->name).second) << facts->name;
    EXPECT_GT(facts->description.size(), 40u) << facts->name;
    EXPECT_FALSE(facts->source.empty() || facts->title.empty()) << facts->name;
    std::set<std::string_view> params;
    for (const ParamFacts& param : facts->params) {
      EXPECT_TRUE(params.insert(param.name).second) << facts->name << " " << param.name;
      EXPECT_FALSE(param.help.empty()) << facts->name << " " << param.name;
      EXPECT_GE(param.default_value, param.min) << facts->name << " " << param.name;
      EXPECT_LE(param.default_value, param.max) << facts->name << " " << param.name;
    }
    if (!facts->default_host.empty()) {
      EXPECT_TRUE(FindPolicy(View(facts->default_host)).ok()) << facts->name;
    }
    EXPECT_THAT(PoliciesHelp(), HasSubstr(std::string(facts->name)));
  }
}

TEST(RegistryTest, BadNamesAndValuesAreNamed) {
  const auto error = [](absl::string_view policy, const std::string& key, const std::string& value) {
    const auto bound = BindPolicy(policy, {{key, value}});
    EXPECT_EQ(bound.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(bound.status().message());
  };
  EXPECT_THAT(std::string(BindPolicy("paged", {}).status().message()),
              HasSubstr("there are: paged_eviction, "));
  EXPECT_THAT(error("keydiff", "anker", "unit"), HasSubstr("has no parameter \"anker\"; there are: anchor"));
  EXPECT_THAT(error("keydiff", "anchor", "median"), HasSubstr("\"median\" is not unit, mean"));
  EXPECT_THAT(error("recency", "x", "1"), HasSubstr("it has none"));
  EXPECT_THAT(error("snapkv", "kernel", "4"), HasSubstr("an odd integer from 1 to 255"));
  EXPECT_THAT(error("snapkv", "kernel", "5.5"), HasSubstr("\"5.5\" is not"));
  EXPECT_THAT(error("streaming_llm", "sinks", "-1"), HasSubstr("from 0 to 1048576"));
  EXPECT_THAT(error("cake", "gamma", "nan"), HasSubstr("\"nan\" is not a number from 0"));
  EXPECT_THAT(error("paged_eviction", "paper_literal", "maybe"), HasSubstr("true or false"));
  EXPECT_THAT(error("caote", "host", "graphkv"), HasSubstr("itself over another policy"));
  EXPECT_THAT(error("caote", "host.recent", "x"), HasSubstr("host.recent of policy h2o"));
}

TEST(RegistryTest, ParametersReachThePolicyAndItsHost) {
  const auto bound = BindPolicy("graphkv", {{"sources", "3"}, {"host", "snapkv"}, {"host.pool", "max"}});
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->params[1], 3);
  EXPECT_EQ(FactsOf(bound->host).name, "snapkv");
  EXPECT_EQ(bound->host_params[0], 1);
  EXPECT_TRUE(bound->needs() & kNeedWindowMean);
}

TEST(RegistryTest, TheTableInTheReadmeIsTheRegistrys) {
  std::ifstream file(KVPOOL_SOURCE_DIR "/cuda/scorers/README.md");
  std::ostringstream text;
  ASSERT_TRUE(text << file.rdbuf());
  EXPECT_THAT(text.str(), HasSubstr(PoliciesTable())) << "make it again: kvpool-lab --policies-table";
}

}  // namespace
}  // namespace kvpool::scorers
