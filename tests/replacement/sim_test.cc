// kvpool-sim: what it reads, counts and reports.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/formats/trace.h"
#include "server/sim/advise.h"
#include "server/sim/curve.h"
#include "server/sim/nodes.h"
#include "server/sim/read_workload.h"
#include "server/sim/replay.h"
#include "server/sim/sample.h"
#include "server/sim/sweep.h"
#include "tests/tools/run_tool.h"

namespace kvpool::sim {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Folder {
 public:
  Folder() {
    char path[] = "/tmp/kvpool-sim.XXXXXX";
    path_ = mkdtemp(path);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(path_ / name) << text;
    return path_ / name;
  }
  std::string path(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// Chains of contents, each block a token.
Workload Chains(const std::vector<std::vector<uint32_t>>& chains) {
  Workload w{.name = "chains"};
  for (const std::vector<uint32_t>& chain : chains) {
    const auto blocks = static_cast<uint32_t>(chain.size());
    w.requests.push_back(
        {.now_ms = w.requests.size(), .first = w.contents.size(), .blocks = blocks, .tokens = blocks});
    for (const uint32_t content : chain) {
      w.contents.push_back(content);
      w.distinct = std::max(w.distinct, content + 1);
    }
  }
  return w;
}

TEST(Optimal, KeepsWhatIsUsedSoonest) {
  // Room for two. Of 0>1, 0>2 the leaves compete: 1 comes back sooner.
  const Workload w = Chains({{0, 1}, {0, 2}, {0, 1}, {0, 2}});
  EXPECT_EQ(ReplayOptimal(w, 2, {}).hit_blocks, 1u + 2u + 1u);
  EXPECT_EQ(ReplayOptimal(w, 3, {}).hit_blocks, 1u + 2u + 2u);
  EXPECT_EQ(ReplayInfinite(w, {}).hit_blocks, 1u + 2u + 2u);
}

TEST(Optimal, ALeadingRunIsAHitAndNothingElse) {
  // Room for one: the root stays, and what was behind it is computed anew.
  const Workload w = Chains({{0, 1, 2}, {0, 1, 2}});
  const Result result = ReplayOptimal(w, 1, {.us_per_token = 2, .us_per_token_pair = 0});
  EXPECT_EQ(result.hit_blocks, 1u);
  EXPECT_EQ(result.regret, 2u);
  EXPECT_EQ(result.prefill_us, 12);
  EXPECT_EQ(result.prefill_saved_us, 2);
}

TEST(Replay, HintsReachThePolicy) {
  Workload w = Chains({{1}, {0}, {2}, {1}});
  const ReplayOptions lru = {.policy = "lru", .capacity_blocks = 2};
  EXPECT_EQ(Replay(w, lru)->hit_blocks, 0u);
  w.hints = {{}, {.reuse = Reuse::kNever}, {}, {}};
  EXPECT_EQ(Replay(w, lru)->hit_blocks, 1u);
  // In a sample these are the hints of the blocks that were drawn.
  const Workload sample = Sample(w, {.one_in = 2, .seed = 3});
  ASSERT_EQ(sample.hints.size(), sample.contents.size());
  for (size_t i = 0; i < sample.contents.size(); ++i) {
    EXPECT_EQ(sample.hints[i].reuse == Reuse::kNever, sample.contents[i] == 0);
  }
}

TEST(Nodes, WhatOneHasComputedTheOthersFind) {
  const Workload w = Chains({{0, 1}, {0, 1}, {0, 1}, {0, 1}, {2}, {2}});
  const auto results =
      ReplayNodes(w, {.policy = "lru", .nodes = {1, 2}, .capacity_blocks = 4, .routes = {Route::kTurns}});
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_EQ(results->size(), 4u);
  const auto [one, two, one_reused, two_reused] =
      std::tie(results->at(0), results->at(1), results->at(2), results->at(3));
  EXPECT_EQ(one.own_tokens, 7u);
  EXPECT_EQ(one.store_tokens, 0u);
  EXPECT_EQ(one.infinite_tokens, 7u);
  EXPECT_EQ(two.own_tokens, 4u) << "the third and the fourth request";
  EXPECT_EQ(two.store_tokens, 3u);
  EXPECT_EQ(two.written, 3u);
  EXPECT_EQ(two.read, 3u);
  EXPECT_EQ(two.never_read, 0u);
  EXPECT_EQ(one_reused.written, 3u);
  EXPECT_EQ(two_reused.store_tokens, 0u) << "the second node has asked before the first did again";
  EXPECT_EQ(two_reused.written, 2u);
  EXPECT_EQ(two_reused.never_read, 2u);
  EXPECT_FALSE(ReplayNodes(w, {.policy = "lru", .capacity_blocks = 1}).ok());
  EXPECT_FALSE(ReplayNodes(w, {.policy = "best", .capacity_blocks = 4}).ok());
}

TEST(Nodes, RequestsThatBeginAlikeMeet) {
  std::vector<std::vector<uint32_t>> chains;
  for (uint32_t i = 0; i < 200; ++i) chains.push_back({i % 20, 100 + i % 20});
  const auto results = ReplayNodes(
      Chains(chains),
      {.policy = "lru", .nodes = {7}, .uses = {1}, .capacity_blocks = 40, .routes = {Route::kPrefix}});
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(results->at(0).own_tokens, 360u);
  EXPECT_EQ(results->at(0).store_tokens, 0u);
}

TEST(PrefillCost, IsLinearAndQuadratic) {
  const PrefillCost cost{.us_per_token = 3, .us_per_token_pair = 2};
  EXPECT_EQ(cost.us(0, 10), 30 + 100);
  EXPECT_EQ(cost.us(10, 10) + cost.us(0, 10), cost.us(0, 20)) << "in two pieces it costs the same";
}

TEST(Replay, RefusesWhatDoesNotFit) {
  const absl::Status status = Replay(Chains({{0, 1, 2}}), {.policy = "lru", .capacity_blocks = 2}).status();
  EXPECT_EQ(status.message(), "the largest request has 3 blocks, the pool 2");
  EXPECT_FALSE(Replay(Chains({{0}}), {.policy = "best", .capacity_blocks = 2}).ok());
}

TEST(Workload, ReadsCsv) {
  Folder folder;
  const std::string path = folder.Write("t.csv", "key,time,size\na,1,100\nb,2,250\n\na,3.5,100\n");
  const absl::StatusOr<Workload> unit = ReadWorkload(path, {});
  ASSERT_TRUE(unit.ok()) << unit.status();
  EXPECT_EQ(unit->contents, std::vector<uint32_t>({0, 1, 0}));
  const absl::StatusOr<Workload> sized = ReadWorkload(path, {.block_bytes = 100});
  EXPECT_EQ(sized->contents, std::vector<uint32_t>({0, 1, 2, 3, 0}));
  EXPECT_EQ(sized->distinct, 4u);
  EXPECT_EQ(ReadWorkload(path, {.from = 0.5})->requests.size(), 2u);

  const auto error = [&](const std::string& text) {
    return std::string(ReadWorkload(folder.Write("bad.csv", text), {}).status().message());
  };
  EXPECT_THAT(error("a,1,1\nb,2\n"), HasSubstr("bad.csv:2: 2 fields"));
  EXPECT_THAT(error("a,1,1\nb,x,1\n"), HasSubstr("bad.csv:2: time: \"x\""));
  EXPECT_THAT(error("a,1,1\nb,2,-1\n"), HasSubstr("bad.csv:2: size: \"-1\""));
  EXPECT_THAT(error("a,5,1\nb,2,1\n"), HasSubstr("bad.csv:2: time: 2 is before 5"));
  EXPECT_THAT(error(""), HasSubstr("no requests"));
}

TEST(Sample, OfAllIsAll) {
  const Workload w = Chains({{0, 1, 2}, {0, 1, 3}});
  EXPECT_EQ(Sample(w, {.one_in = 1}).contents, w.contents);
  EXPECT_EQ(w.ScaledCapacity(17), 17u);
}

// Dialogues behind one instruction that all share.
Workload Dialogues() {
  std::mt19937 random(3);
  std::vector<std::vector<uint32_t>> chains;
  uint32_t next = 2;
  for (int i = 0; i < 6000; ++i) {
    std::vector<uint32_t> chain = {0, 1};
    // Dialogues that began lately are continued.
    if (i > 0 && random() % 3 != 0) chain = chains[chains.size() - 1 - random() % std::min<size_t>(i, 400)];
    for (uint32_t blocks = 1 + random() % 4; blocks > 0 && chain.size() < 60; --blocks)
      chain.push_back(next++);
    chains.push_back(std::move(chain));
  }
  return Chains(chains);
}

TEST(Sample, HitsAsTheWholeDoes) {
  const Workload all = Dialogues();
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const Workload sample = Sample(all, {.one_in = 5, .seed = seed});
    EXPECT_EQ(sample.requests.size(), all.requests.size());
    EXPECT_GE(sample.common_blocks, 2u) << "the instruction, and what many dialogues begin with";
    EXPECT_LT(sample.contents.size(), all.contents.size() / 2);
    for (const char* policy : {"lru", "gdsf", "opt", "infinite"}) {
      const Result of_all = *Replay(all, {.policy = policy, .capacity_blocks = 1000});
      const Result of_sample = *Replay(sample, {.policy = policy, .capacity_blocks = 1000});
      EXPECT_NEAR(of_sample.block_ratio(), of_all.block_ratio(), 0.02) << policy << ", seed " << seed;
      EXPECT_NEAR(of_sample.prefill_saved_us / of_sample.prefill_us,
                  of_all.prefill_saved_us / of_all.prefill_us, 0.02)
          << policy << ", seed " << seed;
      EXPECT_NEAR(static_cast<double>(of_sample.blocks) / static_cast<double>(of_all.blocks), 1, 0.05);
    }
  }
}

// A trace of an hour, at 1 GiB a block.
std::string AdviceOn(const std::vector<std::tuple<std::string, uint64_t, double>>& saved_s) {
  Workload w = Chains({{0}, {0}});
  w.requests.back().now_ms = 3'600'000;
  std::vector<Result> results;
  for (const auto& [policy, capacity, seconds] : saved_s) {
    results.push_back({.policy = policy,
                       .capacity_blocks = capacity,
                       .blocks = 1000,
                       .hit_blocks = static_cast<uint64_t>(seconds),
                       .prefill_us = 1000e6,
                       .prefill_saved_us = seconds * 1e6});
  }
  return Advise(w, results, uint64_t{1} << 30);
}

TEST(Advise, SaysWhatMoreMemoryBuys) {
  const std::string text = AdviceOn({{"lru", 10, 60},
                                     {"arc", 10, 150},
                                     {"lru", 20, 460},
                                     {"arc", 20, 463},
                                     {"lru", 40, 500},
                                     {"arc", 40, 499},
                                     {"lru", 80, 500},
                                     {"arc", 80, 500},
                                     {"infinite", 90, 500}});
  EXPECT_THAT(
      text,
      testing::StartsWith(
          "Take 20.0 GiB (20 blocks) and the policy lru: of 16.7 min of prefill in this trace it saves 7.7 "
          "min (46.0 %), where memory without end would save 50.0 %, and 46.0 % of the blocks are found "
          "(50.0 % at most). In the 60.0 min of the trace, 0.13 devices would be busy with what is saved. "
          "With "
          "40.0 GiB it would save 40.0 s more, and a bigger cache buys nothing.\n\n"));
  EXPECT_THAT(
      text,
      HasSubstr("    10.0         10  arc                     2.5   15.0 %         6.0 %       15.0 %\n"));
  EXPECT_THAT(text, Not(HasSubstr("80.0")));

  EXPECT_THAT(AdviceOn({{"lru", 10, 500}, {"lru", 20, 500}, {"infinite", 90, 500}}),
              HasSubstr(". A bigger cache buys nothing.\n"));
  EXPECT_THAT(
      AdviceOn({{"arc", 10, 100}, {"arc", 20, 200}, {"infinite", 90, 500}}),
      HasSubstr("More memory than the largest size tried, 20.0 GiB, would save up to 5.0 min more.\n"));
  EXPECT_THAT(AdviceOn({{"lru", 10, 0}, {"infinite", 90, 0}}),
              HasSubstr("a cache of any size saves nothing"));
}

TEST(Tool, RunsDrawsAndAdvises) {
  Folder folder;
  std::string text;
  for (int i = 0; i < 400; ++i) {
    text += "k" + std::to_string(i * i % 37) + "," + std::to_string(i) + ",1\n";
  }
  const std::string trace = folder.Write("t.csv", text);
  const ToolResult run =
      RunTool(KVPOOL_SIM, {"run", "--trace", trace, "--policy", "lru,opt", "--capacity", "4,8", "--json"});
  ASSERT_EQ(run.exit_status, 0) << run.err;
  const google::protobuf::Struct json = ParseJson(run.out);
  ASSERT_EQ(json.fields().at("results").list_value().values_size(), 4);
  const google::protobuf::Struct& last = json.fields().at("results").list_value().values(3).struct_value();
  EXPECT_EQ(Number(last, "capacity_blocks"), 8);
  EXPECT_EQ(Number(last, "blocks"), 400);

  const ToolResult curve = RunTool(
      KVPOOL_SIM, {"curve", "--trace", trace, "--capacity", "2,4,8,16", "--plot", folder.path("c.svg")});
  ASSERT_EQ(curve.exit_status, 0) << curve.err;
  std::ifstream svg(folder.path("c.svg"));
  const std::string drawn((std::istreambuf_iterator<char>(svg)), std::istreambuf_iterator<char>());
  EXPECT_THAT(drawn, HasSubstr("<svg xmlns"));
  const std::vector<std::string> policies = *ParsePolicies("all");
  for (const std::string& policy : policies) {
    const bool is_line = policy != "infinite";
    EXPECT_EQ(absl::StrContains(drawn, "<title>" + policy + "</title>"), is_line) << policy;
  }

  const ToolResult advice =
      RunTool(KVPOOL_SIM, {"advise", "--trace", trace, "--block-bytes", "1073741824", "--policy", "lru,lfu"});
  ASSERT_EQ(advice.exit_status, 0) << advice.err;
  EXPECT_THAT(advice.out, HasSubstr("GiB"));
  EXPECT_THAT(advice.out, HasSubstr("<- advised"));
  const ToolResult table = RunTool(KVPOOL_SIM, {"run", "--trace", trace, "--capacity", "4", "--markdown"});
  EXPECT_THAT(table.out, HasSubstr("| lru |"));

  const ToolResult sampled = RunTool(
      KVPOOL_SIM, {"run", "--trace", trace, "--policy", "lru", "--capacity", "16", "--sample", "0.5"});
  EXPECT_THAT(sampled.out, HasSubstr("one in 2"));
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"run", "--trace", trace, "--sample", "0"}).exit_status, 2);
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"run", "--trace", trace, "--policy", "best"}).exit_status, 2);
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"run", "--trace", folder.path("none.csv")}).exit_status, 1);
  const ToolResult nodes = RunTool(KVPOOL_SIM, {"nodes", "--trace", trace, "--nodes", "1,3", "--capacity",
                                                "8", "--policy", "lru", "--markdown"});
  EXPECT_EQ(nodes.exit_status, 0) << nodes.err;
  EXPECT_THAT(nodes.out, HasSubstr("| 3 | by prefix | reuse:2 |"));
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"nodes", "--trace", trace}).exit_status, 2);
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"run", "--trace", trace, "--nodes", "3"}).exit_status, 2);
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"fly"}).exit_status, 2);
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"curve", "--trace", trace}).exit_status, 2);
  EXPECT_EQ(RunTool(KVPOOL_SIM, {"advise", "--trace", trace}).exit_status, 2);
}

}  // namespace
}  // namespace kvpool::sim
