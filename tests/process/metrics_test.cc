// What a scrape shows: of snapshots that are made here, and of this process.
#include "server/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <ctime>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics/process_facts.h"
#include "server/metrics/scrape_stats.h"

namespace kvpool {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

using Labels = std::map<std::string, std::string>;

std::vector<prometheus::MetricFamily> Families(const DaemonSnapshot& daemon) {
  return CollectMetrics({.daemon = [&daemon] { return daemon; },
                         .rpc = [] { return RpcStats::Totals(); },
                         .attach = [] { return AttachStats(); },
                         .scrapes_refused = [] { return ScrapeStats().refused(); },
                         .keeper_up = [] { return true; },
                         .build = {.version = "1", .cuda = "built without"}});
}

// {labels: value} of the family.
std::map<Labels, double> Family(const DaemonSnapshot& daemon, const std::string& name) {
  std::map<Labels, double> samples;
  for (const prometheus::MetricFamily& family : Families(daemon)) {
    if (family.name != name) continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      Labels labels;
      for (const auto& label : metric.label) labels[label.name] = label.value;
      const bool counts = family.type == prometheus::MetricType::Counter;
      const double value = counts ? metric.counter.value : metric.gauge.value;
      EXPECT_TRUE(samples.emplace(labels, value).second) << name << " has a series twice";
    }
  }
  return samples;
}

Labels Session(const std::string& space, const std::string& session) {
  return {{"space", space}, {"session", session}};
}

TEST(MetricsTest, SessionsWithFewBlocksAreOneSeries) {
  DaemonSnapshot daemon;
  daemon.spaces.resize(3);
  for (uint64_t i = 0; i < 3; ++i) daemon.spaces[i].space = i + 1;
  // Sessions 1 to 1000, in turn in spaces 1 and 2; session n has n blocks.
  uint64_t blocks = 0;
  for (uint32_t session = 1; session <= 1000; ++session) {
    daemon.spaces[session % 2].session_blocks.push_back({session, session});
    blocks += session;
  }
  const std::map<Labels, double> shown = Family(daemon, "kvpool_session_blocks");
  EXPECT_EQ(shown.size(), 16u + 3u);
  double sum = 0;
  for (const auto& [labels, value] : shown) sum += value;
  EXPECT_EQ(sum, static_cast<double>(blocks));
  EXPECT_EQ(shown.at(Session("1", "1000")), 1000);
  EXPECT_EQ(shown.at(Session("2", "985")), 985);
  EXPECT_FALSE(shown.contains(Session("1", "984")));
  EXPECT_EQ(shown.at(Session("3", "other")), 0);
}

TEST(MetricsTest, ASpaceSaysWhatItIsOf) {
  DaemonSnapshot daemon;
  SpaceSnapshot& space = daemon.spaces.emplace_back();
  space.space = 7;
  space.tenant = "team@1000";
  space.kind = "slabs";
  space.policy = "lru";
  space.model = "llama";
  space.architecture = "LlamaForCausalLM";
  space.bookkeeping_bytes = 14 << 20;
  EXPECT_THAT(
      Family(daemon, "kvpool_space_info"),
      ElementsAre(Pair(UnorderedElementsAre(Pair("space", "7"), Pair("tenant", "team@1000"),
                                            Pair("kind", "slabs"), Pair("policy", "lru"),
                                            Pair("model", "llama"), Pair("architecture", "LlamaForCausalLM")),
                       1)));
  EXPECT_THAT(Family(daemon, "kvpool_space_bookkeeping_bytes"),
              ElementsAre(Pair(Labels{{"space", "7"}}, 14 << 20)));
}

TEST(MetricsTest, WhatWasRefusedIsCountedByVerb) {
  DaemonSnapshot daemon;
  daemon.step_errors = {{"fence", 2}, {"lease", 3}};
  daemon.refused_blocks = {{"pin", 5}, {"release", 7}};
  EXPECT_THAT(Family(daemon, "kvpool_step_errors_total"),
              ElementsAre(Pair(Labels{{"verb", "fence"}}, 2), Pair(Labels{{"verb", "lease"}}, 3)));
  EXPECT_THAT(Family(daemon, "kvpool_refused_blocks_total"),
              ElementsAre(Pair(Labels{{"verb", "pin"}}, 5), Pair(Labels{{"verb", "release"}}, 7)));
}

TEST(MetricsTest, WhatAStartFoundHasItsReasons) {
  DaemonSnapshot daemon;
  daemon.start.cold = ColdStart::kWentAlone;
  daemon.start.first_answer_seconds = 0.5;
  daemon.start.lost = {{.loss = SpaceLoss::kMemory}, {.loss = SpaceLoss::kMemory}};
  SpaceSnapshot& space = daemon.spaces.emplace_back();
  space.space = 7;
  space.recovered.blocks.cached = 3;
  space.recovered.blocks.lost[static_cast<size_t>(BlockLoss::kTorn)] = 2;
  space.recovered.back = 4;
  space.recovered.Lose({.why = {SessionLoss::kAway, "hung up"}});
  space.recovered.Lose({.why = {SessionLoss::kEnded, "it had ended"}});
  const auto all = [](const std::map<Labels, double>& samples) {
    double sum = 0;
    for (const auto& [labels, value] : samples) sum += value;
    return sum;
  };
  EXPECT_THAT(Family(daemon, "kvpool_start_info"), ElementsAre(Pair(Labels{{"start", "went_alone"}}, 1)));
  EXPECT_THAT(Family(daemon, "kvpool_first_answer_seconds"), ElementsAre(Pair(Labels{}, 0.5)));
  EXPECT_EQ(Family(daemon, "kvpool_recovery_lost_spaces").at({{"reason", "memory"}}), 2);
  EXPECT_EQ(all(Family(daemon, "kvpool_recovery_lost_spaces")), 2);
  EXPECT_THAT(Family(daemon, "kvpool_recovered_blocks"),
              ElementsAre(Pair(Labels{{"space", "7"}, {"state", "cached"}}, 3),
                          Pair(Labels{{"space", "7"}, {"state", "held"}}, 0)));
  EXPECT_EQ(Family(daemon, "kvpool_recovery_dropped_blocks").at({{"space", "7"}, {"reason", "torn"}}), 2);
  EXPECT_EQ(all(Family(daemon, "kvpool_recovery_dropped_blocks")), 2);
  EXPECT_EQ(Family(daemon, "kvpool_recovered_sessions").at({{"space", "7"}, {"state", "back"}}), 4);
  EXPECT_EQ(Family(daemon, "kvpool_recovery_lost_sessions").at({{"space", "7"}, {"reason", "away"}}), 1);
  EXPECT_EQ(all(Family(daemon, "kvpool_recovery_lost_sessions")), 1);
}

TEST(MetricsTest, WhatIsVerifiedIsCountedByWhen) {
  DaemonSnapshot daemon;
  SpaceSnapshot& space = daemon.spaces.emplace_back();
  space.space = 7;
  space.checks = {.checked = {5, 6, 7}, .failed = {0, 1, 2}, .unsummed = 3};
  space.recovered.blocks.unsummed = 4;
  space.doubted = 8;
  const auto when = [](const char* name) { return Labels{{"space", "7"}, {"when", name}}; };
  EXPECT_THAT(Family(daemon, "kvpool_verify_blocks_total"),
              ElementsAre(Pair(when("restart"), 6), Pair(when("sample"), 7), Pair(when("seal"), 5)));
  EXPECT_THAT(Family(daemon, "kvpool_verify_failed_blocks_total"),
              ElementsAre(Pair(when("restart"), 1), Pair(when("sample"), 2)));
  EXPECT_THAT(Family(daemon, "kvpool_verify_unverified_blocks_total"),
              ElementsAre(Pair(Labels{{"space", "7"}}, 7)));
  EXPECT_THAT(Family(daemon, "kvpool_verify_doubted_blocks"), ElementsAre(Pair(Labels{{"space", "7"}}, 8)));
}

TEST(MetricsTest, AFailedBlocksHelpSaysWhatBecomesOfThoseBehindIt) {
  std::string help;
  for (const prometheus::MetricFamily& family : Families({})) {
    if (family.name == "kvpool_verify_failed_blocks_total") help = family.help;
  }
  EXPECT_THAT(help, HasSubstr("what is behind them stays"));
}

TEST(MetricsTest, ABuildWithoutCudaSaysSo) {
  EXPECT_THAT(Family({}, "kvpool_build_info"),
              ElementsAre(Pair(Labels{{"version", "1"}, {"cuda", "built without"}}, 1)));
}

TEST(ProcessFactsTest, AreThisProcess) {
  const std::vector<char> touched(32 << 20, 'x');
  const ProcessFacts facts = ReadProcessFacts();
  EXPECT_GE(facts.anonymous_bytes, static_cast<double>(touched.size()));
  EXPECT_GE(facts.resident_bytes, facts.anonymous_bytes);
  EXPECT_GE(facts.virtual_bytes, facts.resident_bytes);
  EXPECT_GE(facts.threads, 1);
  EXPECT_GE(facts.open_fds, 3);
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(facts.max_fds, static_cast<double>(limit.rlim_cur));
  const int extra = dup(0);
  EXPECT_EQ(ReadProcessFacts().open_fds, facts.open_fds + 1);
  close(extra);
  // Later than 2020, and not in the future.
  EXPECT_GT(facts.start_time_seconds, 1577836800);
  EXPECT_LE(facts.start_time_seconds, static_cast<double>(std::time(nullptr)) + 1);
}

}  // namespace
}  // namespace kvpool
