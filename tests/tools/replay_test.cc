// kvpool-replay as people run it: engine processes, kills, and a proof that corruption would be seen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/layouts.h"
#include "client/session.h"
#include "client/tools/text.h"
#include "proto/formats/trace.h"
#include "tests/support/daemon_process.h"
#include "tests/tools/run_tool.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;

constexpr char kRun[] = "a replay of the tests";
constexpr uint32_t kBlockBytes = 4096;

Deadline InAMinute() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

google::protobuf::Struct ReplayJson(std::vector<std::string> arguments, int exit_status = 0) {
  arguments.push_back("--json");
  const ToolResult result = RunTool(KVPOOL_REPLAY, arguments);
  if (result.exit_status != exit_status) {
    // This ends the test, whose other claims would only hide what was said.
    throw std::runtime_error(absl::StrCat("kvpool-replay: exit status ", result.exit_status, ", not ",
                                          exit_status, ":\n", result.err));
  }
  return result.out.empty() ? google::protobuf::Struct() : ParseJson(result.out);
}

// Another session of the space that engines of kRun use.
absl::StatusOr<std::unique_ptr<Session>> JoinRun(const std::string& socket) {
  SessionOptions options;
  options.socket = socket;
  options.layout = OpaqueLayout({.block_bytes = kBlockBytes, .tokens_per_block = replay::kTokensPerBlock});
  options.fingerprint.set_digest(kRun);
  (*options.fingerprint.mutable_facts())["made by"] = "kvpool-replay";
  options.magazine_blocks = 1;
  return Session::Open(options);
}

TEST(SimUsage, FlagsOfAnotherVerbAreRefused) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"run", "--plot=/tmp/x.svg"}, "--plot is for curve"},
      {{"curve", "--out=/tmp/x"}, "--out is for train"},
      {{"run", "--epochs=3"}, "--epochs is for train"},
      {{"run", "--trace=/nope", "--capacity=0"}, "--capacity: \"0\" is not a whole number of blocks"},
      {{"run", "--trace=/nope", "--capacity=,"}, "--capacity: no capacity is given"},
      {{"run", "--trace=/nope", "--policy=lur"}, "--policy: \"lur\" is unknown"},
      {{"run", "--trace=/nope", "--sample=0"}, "--sample: 0 is below 1 in 10000"},
      {{"run", "--trace=/nope", "--from=0.8", "--to=0.2"}, "--from: 0.8 is not below --to, 0.2"},
      {{"run", "--trace=/nope", "--warm-up=1"}, "--warm-up: 1 leaves no request whose hits count"},
      {{"advise", "--json"}, "--json is for run and curve, --markdown for nodes, too"},
      {{"rum"}, "\"rum\" is not run, curve, advise, nodes or train"},
  };
  for (const auto& [arguments, message] : cases) {
    const ToolResult result = RunTool(KVPOOL_SIM, arguments);
    EXPECT_EQ(result.exit_status, 2) << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

TEST(Replay, HitsWhatTheExactSimulationHits) {
  for (const char* engines : {"--engines=1", "--engines=3"}) {
    const auto result = ReplayJson({"--spawn-daemon", "--blocks=2000", "--workload=conversation", "--seed=5",
                                    "--requests=1500", engines});
    EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
    EXPECT_GT(Number(result, "checked_blocks"), Number(result, "blocks"));
    EXPECT_NEAR(Number(result, "block_hit_ratio_difference"), 0, 0.005) << engines;
    const auto& states = result.fields().at("states").struct_value();
    EXPECT_EQ(Number(states, "free") + Number(states, "cached"), Number(states, "capacity"));
  }
}

// What does not fit into the pool comes back from the tier, through kills of the daemon and of engines, and not one byte is
// wrong.
TEST(Replay, ATierKeepsWhatThePoolCannotThroughKills) {
  constexpr int kRequests = KVPOOL_SANITIZED ? 300 : 600;
  for (const bool keeper : {false, true}) {
    const TemporaryDirectory folder;
    std::vector<std::string> arguments = {
        "--spawn-daemon",
        "--blocks=600",
        "--workload=conversation",
        "--seed=5",
        absl::StrCat("--requests=", kRequests),
        "--time-scale=.01",  // What is computed is written before it leaves.
        "--engines=2",
        absl::StrCat("--kill-daemon-every=", keeper ? kRequests / 10 : kRequests * 7 / 12),
        "--kill-every=100",
        "--wait-ms=60000",
        "--daemon-flag=--tier=file:" + folder.path() + "/tier,capacity=256MiB"};
    // The other time what lies there is encrypted.
    const std::string keys = folder.path() + "/keys";
    std::ofstream(keys) << "* " << std::string(64, '7') << "\n";
    std::filesystem::permissions(keys, std::filesystem::perms::owner_read);
    arguments.push_back(keeper ? "--keeper" : "--daemon-flag=--tier-encryption-keys=" + keys);
    const auto result = ReplayJson(arguments);
    // Requests go on while a daemon is killed and the next one comes.
    EXPECT_GE(Number(result, "daemon_kills"), keeper ? 4 : 1);
    EXPECT_GE(Number(result, "kills"), 1);
    EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
    EXPECT_EQ(Number(result, "double_owners"), 0);
    // An engine that was not killed goes on with its session, also with a match that waits.
    if (keeper) {
      EXPECT_LE(Number(result, "sessions"), 2 + Number(result, "kills"));
    }
    const auto& below = result.fields().at("below").struct_value();
    EXPECT_EQ(Number(below, "corrupt_values"), 0);
    // The counts are of the last daemon, which has lived shortly where there was a keeper.
    if (!keeper) {
      EXPECT_GT(Number(below, "promoted_blocks"), 0);
    }
    size_t sealed = 0;
    for (const auto& file : std::filesystem::directory_iterator(folder.path() + "/tier")) {
      std::ifstream text(file.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(text), {}};
      sealed += absl::StrContains(bytes, "KVPSEAL1");
    }
    EXPECT_EQ(sealed > 0, !keeper);
  }
}

// The same of GPUs, over the fake driver.
TEST(Replay, ATierKeepsWhatAGpuCannot) {
  if (std::string(KVPOOL_FAKE_CUDA).empty()) GTEST_SKIP() << "built without CUDA, so there is no fake driver";
  const TemporaryDirectory folder;
  setenv("KVPOOL_LIBCUDA", KVPOOL_FAKE_CUDA, 1);
  const auto result =
      ReplayJson({"--spawn-daemon", "--daemon-flag=--device=cuda:0", "--blocks=600",
                  "--workload=conversation", "--seed=5", "--requests=2500", "--engines=2", "--kill-every=500",
                  "--wait-ms=60000", "--daemon-flag=--tier=file:" + folder.path() + "/tier,capacity=256MiB"});
  unsetenv("KVPOOL_LIBCUDA");
  EXPECT_GE(Number(result, "kills"), 1);
  EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
  EXPECT_EQ(Number(result, "double_owners"), 0);
  const auto& below = result.fields().at("below").struct_value();
  EXPECT_EQ(Number(below, "corrupt_values"), 0);
  EXPECT_GT(Number(below, "promoted_blocks"), 0);
}

// Where nothing is evicted, a key that was sealed is known for good.
TEST(Replay, EnginesLiveThroughKillsOfADaemonWithAKeeper) {
  constexpr int kKills = KVPOOL_SANITIZED ? 10 : 30, kBetween = 20, kRequests = kBetween * (kKills + 2);
  for (const bool evicts : {true, false}) {
    const auto result = ReplayJson(
        {"--spawn-daemon", "--keeper", evicts ? "--blocks=2000" : "--blocks=30000", "--workload=conversation",
         "--seed=5", absl::StrCat("--requests=", kRequests), "--engines=3",
         absl::StrCat("--kill-daemon-every=", kBetween), absl::StrCat("--kill-every=", kBetween)});
    EXPECT_GE(Number(result, "daemon_kills"), kKills);
    EXPECT_GE(Number(result, "kills"), kKills);
    EXPECT_EQ(Number(result, "requests"), kRequests);
    EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
    EXPECT_EQ(Number(result, "double_owners"), 0);
    EXPECT_EQ(Number(result, "refused"), 0);
    // One for each engine, and for each that was killed.
    EXPECT_LE(Number(result, "sessions"), 3 + Number(result, "kills"));
    if (!evicts) {
      EXPECT_EQ(Number(result, "evicted_blocks"), 0);
      EXPECT_EQ(Number(result, "sealed_again"), 0) << "a seal that was answered is lost";
    }
  }
}

// The same on a GPU that the fake driver imitates.
TEST(Replay, EnginesOnAGpuLiveThroughKillsOfTheDaemon) {
  if (std::string(KVPOOL_FAKE_CUDA).empty()) GTEST_SKIP() << "built without CUDA, so there is no fake driver";
  setenv("KVPOOL_LIBCUDA", KVPOOL_FAKE_CUDA, 1);
  const auto result = ReplayJson({"--spawn-daemon", "--keeper", "--blocks=2000", "--workload=conversation",
                                  "--seed=7", "--requests=300", "--engines=3", "--kill-daemon-every=30",
                                  "--kill-every=50", "--daemon-flag=--device=cuda:0"});
  unsetenv("KVPOOL_LIBCUDA");
  EXPECT_GE(Number(result, "daemon_kills"), 3);
  EXPECT_EQ(Number(result, "requests"), 300);
  EXPECT_GT(Number(result, "hit_blocks"), 0);
  EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
  EXPECT_EQ(Number(result, "refused"), 0);
  EXPECT_LE(Number(result, "sessions"), 3 + Number(result, "kills"));
}

// KVPOOL_UPGRADES says how many, for a longer run by hand.
TEST(Replay, UpgradesOfTheDaemonFailNoVerb) {
  const char* const asked = std::getenv("KVPOOL_UPGRADES");
  const int upgrades = asked == nullptr ? 5 : std::atoi(asked);
  auto daemon = DaemonProcess::Start({.binary = KVPOOL_KVPOOLD,
                                      .capacity = "8MiB",
                                      .flags = {"--slab-bytes=8MiB", "--policy=lru", "--keeper=on"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string socket = "--socket=" + (*daemon)->socket();
  // More requests than are served meanwhile: the engines are at work whenever an upgrade begins.
  constexpr int kRequests = 2000;
  const std::string trace = absl::StrCat("--requests=", kRequests * upgrades);
  std::atomic<bool> over{false};
  google::protobuf::Struct result;
  std::thread replay([&] {
    try {
      result = ReplayJson({socket, "--workload=conversation", "--seed=11", "--engines=3", trace});
    } catch (const std::exception& failure) {  // Thrown on this thread, it would end the process.
      ADD_FAILURE() << failure.what();
    }
    over = true;
  });
  // The daemon would outlive its keeper, and the replay goes on until it is done.
  const absl::Cleanup end = [&] {
    if (replay.joinable()) replay.join();
    EXPECT_EQ((*daemon)->Stop(), 0);
  };
  double longest_gap_ms = 0;
  const auto served = [&] {
    const ToolResult status = RunTool(KVPOOL_KVPOOLCTL, {socket, "status", "--json"});
    return status.exit_status == 0 && Number(ParseJson(status.out), "sessions") == 3;
  };
  for (const Deadline deadline = InAMinute(); !served() && !over;)
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  int done = 0;
  for (; done < upgrades && !over; ++done) {
    const ToolResult upgrade = RunTool(KVPOOL_KVPOOLCTL, {socket, "upgrade", "--deadline=1m", "--json"});
    ASSERT_EQ(upgrade.exit_status, 0) << upgrade.err << (*daemon)->Log();
    longest_gap_ms = std::max(longest_gap_ms, Number(ParseJson(upgrade.out), "gap_ms"));
  }
  EXPECT_EQ(done, upgrades) << "the replay was over before the next one began";
  replay.join();
  EXPECT_EQ(Number(result, "requests"), kRequests * upgrades);
  EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
  EXPECT_EQ(Number(result, "refused"), 0);
  EXPECT_EQ(Number(result, "sessions"), 3) << "one was opened again";
  double longest_answer_ns = 0;
  for (const auto& [name, verb] : result.fields().at("verbs").struct_value().fields()) {
    longest_answer_ns = std::max(longest_answer_ns, Number(verb.struct_value(), "max_ns"));
  }
  const std::string log = (*daemon)->Log();
  EXPECT_EQ(log.find("session not resumed"), std::string::npos) << log;
  std::printf(
      "%d upgrades, %.0f requests: 0 verbs failed, 0 corruptions; longest answer %.0f ms, longest gap %.0f "
      "ms\n",
      upgrades, Number(result, "requests"), longest_answer_ns * 1e-6, longest_gap_ms);
}

TEST(Replay, AnswersTakeBlocksToo) {
  const auto result = ReplayJson({"--spawn-daemon", "--blocks=1000", "--workload=conversation",
                                  "--requests=800", "--decode", "--layout=2x2x8"});
  EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
  EXPECT_NEAR(Number(result, "block_hit_ratio_difference"), 0, 0.005);
}

TEST(Replay, ThePublicTraceWithTwoAndEightEngines) {
  if (KVPOOL_SANITIZED) GTEST_SKIP() << "figures of the whole trace: minutes under a sanitizer";
  const auto path = replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces");
  if (!path.ok()) GTEST_SKIP() << path.status().message();
  for (const char* engines : {"--engines=2", "--engines=8"}) {
    const auto result = ReplayJson({"--spawn-daemon", "--blocks=10000", "--trace=" + *path, engines});
    EXPECT_EQ(Number(result, "requests"), 12031);
    EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
    EXPECT_NEAR(Number(result, "block_hit_ratio_difference"), 0, 0.005) << engines;
  }
}

// The same on a GPU that the fake driver imitates: the kernels' host bodies write and read the stamps.
TEST(Replay, OnAGpuOfTheFakeDriver) {
  if (std::string(KVPOOL_FAKE_CUDA).empty()) GTEST_SKIP() << "built without CUDA, so there is no fake driver";
  setenv("KVPOOL_LIBCUDA", KVPOOL_FAKE_CUDA, 1);
  const auto result = ReplayJson({"--spawn-daemon", "--blocks=2000", "--daemon-flag=--device=cuda:0",
                                  "--workload=conversation", "--requests=500", "--kill-every=100"});
  unsetenv("KVPOOL_LIBCUDA");
  EXPECT_GE(Number(result, "kills"), 4);
  EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
  // A kill takes what its engine had not sealed: up to a request, of a hundred. How near hits come to the simulator's
  // without kills is asked of more requests, above.
  EXPECT_NEAR(Number(result, "block_hit_ratio_difference"), 0, 0.05);
}

// The daemon's record of a replay equals the trace but for the keys: the simulator finds the
// same hits in both.
TEST(Replay, TheDaemonsEventLogReplaysAsTheTrace) {
  std::string folder = (std::filesystem::temp_directory_path() / "kvpool-replay-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string trace = folder + "/trace.jsonl", events = folder + "/events";
  {
    // Turns of conversations, each carrying on an earlier one.
    std::mt19937_64 random(7);
    std::vector<std::vector<uint64_t>> conversations;
    std::ofstream out(trace);
    uint64_t next = 1;
    for (int turn = 0; turn < 600; ++turn) {
      std::vector<uint64_t> chain = {0};
      if (turn % 3 != 0) chain = conversations[random() % conversations.size()];
      for (uint64_t blocks = 1 + random() % 6; blocks > 0; --blocks) chain.push_back(next++);
      conversations.push_back(chain);
      out << "{\"timestamp\": " << turn << ", \"input_length\": " << chain.size() * replay::kTokensPerBlock
          << ", \"output_length\": 1, \"hash_ids\": [" << absl::StrJoin(chain, ", ") << "]}\n";
    }
  }
  const auto replayed = ReplayJson({"--spawn-daemon", "--blocks=400", "--trace=" + trace, "--engines=1",
                                    "--daemon-flag=--event-log=" + events});
  EXPECT_EQ(Number(replayed, "requests"), 600);
  const auto simulate = [](const std::string& path) {
    const ToolResult result = RunTool(
        KVPOOL_SIM,
        {"run", "--trace=" + path, "--policy=lru,s3_fifo,opt,infinite", "--capacity=100,400", "--json"});
    EXPECT_EQ(result.exit_status, 0) << result.err;
    const auto json = ParseJson(result.out);
    std::vector<double> hits;
    for (const auto& of : json.fields().at("results").list_value().values()) {
      hits.push_back(Number(of.struct_value(), "hit_blocks"));
      EXPECT_GT(hits.back(), 0);
    }
    return hits;
  };
  const std::vector<double> of_trace = simulate(trace), of_events = simulate(events);
  EXPECT_EQ(of_trace.size(), 7u);
  EXPECT_EQ(of_trace, of_events);
  std::filesystem::remove_all(folder);
}

TEST(Replay, TimeScaleHoldsRequestsBack) {
  // 100 requests of the workload arrive within 30 s or so: a hundredth of that is some 300 ms.
  const auto result =
      ReplayJson({"--spawn-daemon", "--workload=conversation", "--requests=100", "--time-scale=0.01"});
  EXPECT_GT(Number(result, "seconds"), 0.15);
}

TEST(Replay, HundredsOfKilledEnginesLoseNoBlock) {
  constexpr int kKills = KVPOOL_SANITIZED ? 50 : 300, kRequests = 8 * kKills;
  auto daemon =
      DaemonProcess::Start({.binary = KVPOOL_KVPOOLD, .capacity = "8MiB", .flags = {"--slab-bytes=8MiB"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto result =
      ReplayJson({"--socket=" + (*daemon)->socket(), "--run=" + tools::Hex(kRun), "--workload=conversation",
                  "--seed=11", absl::StrCat("--requests=", kRequests), "--engines=3", "--kill-every=8"});
  EXPECT_GE(Number(result, "kills"), kKills - 10);
  EXPECT_GT(Number(result, "reopened"), kKills / 6);
  EXPECT_EQ(Number(result, "requests"), kRequests);
  EXPECT_EQ(Number(result, "corrupt_blocks"), 0);
  const auto& states = result.fields().at("states").struct_value();
  EXPECT_EQ(Number(states, "free") + Number(states, "cached"), Number(states, "capacity"));
  // Every block can be had: all but the null block, which is no part of the capacity,
  // and this session's sink.
  auto session = JoinRun((*daemon)->socket());
  ASSERT_TRUE(session.ok()) << session.status();
  auto all = (*session)->LeaseWithin(static_cast<uint32_t>(Number(states, "capacity")) - 1, InAMinute());
  EXPECT_TRUE(all.ok()) << all.status();
}

TEST(Replay, CorruptionIsSeen) {
  auto daemon =
      DaemonProcess::Start({.binary = KVPOOL_KVPOOLD, .capacity = "16MiB", .flags = {"--slab-bytes=16MiB"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::vector<std::string> arguments = {"--socket=" + (*daemon)->socket(), "--run=" + tools::Hex(kRun),
                                              "--workload=conversation", "--requests=60"};
  EXPECT_EQ(Number(ReplayJson(arguments), "corrupt_blocks"), 0);
  auto session = JoinRun((*daemon)->socket());
  ASSERT_TRUE(session.ok()) << session.status();
  // One word of each block: what a stray write, or a block in two hands, leaves behind.
  for (uint32_t block = 1; block < (*session)->capacity_blocks(); ++block) {
    std::memset((*session)->data({.id = BlockId{block}}) + 1024, 0x5a, 8);
  }
  session->reset();
  const auto result = ReplayJson(arguments, /*exit_status=*/1);
  EXPECT_GT(Number(result, "hit_blocks"), 0);
  EXPECT_GT(Number(result, "corrupt_blocks"), 0);
}

TEST(ReplayUsage, ExitStatus2NamesTheFlag) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--engines=0"}, "--engines: \"0\" is not a whole number of 1 to 256"},
      {{"--workload=poems"}, "--workload: \"poems\" is not conversation"},
      {{"--workload=conversation", "--trace=x"}, "--trace and --workload exclude each other"},
      {{"--spawn-daemon", "--socket=x"}, "--spawn-daemon and --socket exclude each other"},
      {{"--blocks=100"}, "--blocks, --daemon-flag, --kill-daemon-every and --keeper are for --spawn-daemon"},
      {{"--trace=/nowhere/t"}, "/nowhere/t: cannot be opened"},
      {{"--workload=conversation", "--layout=1x2"}, "--layout: \"1x2\" is not opaque or LAYERSxHEADSxDIM"},
      {{"--layout=1x1x8", "--block-bytes=64"}, "--block-bytes is for --layout=opaque"},
      {{"stray"}, "unexpected argument stray"},
  };
  for (const auto& [arguments, message] : cases) {
    const ToolResult result = RunTool(KVPOOL_REPLAY, arguments);
    EXPECT_EQ(result.exit_status, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
}

TEST(ReplayUsage, ExitStatus1SaysWhy) {
  ToolResult result =
      RunTool(KVPOOL_REPLAY, {"--workload=conversation", "--requests=5", "--socket=/nowhere/s"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("cannot reach kvpoold at /nowhere/s"));
  result = RunTool(KVPOOL_REPLAY, {"--workload=conversation", "--requests=500", "--spawn-daemon",
                                   "--blocks=16", "--block-bytes=131072"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("the largest request has"));
}

}  // namespace
}  // namespace kvpool
