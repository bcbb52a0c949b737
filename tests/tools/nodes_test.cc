// Daemons as nodes on one store, each with a replay of its own: what the first has computed the second finds, whatever happens to
// the store costs hits, and nothing else.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/replay/conversation.h"
#include "client/replay/exact_lru.h"
#include "proto/formats/trace.h"
#include "tests/support/daemon_process.h"
#include "tests/tiers/redis_server.h"
#include "tests/tools/run_tool.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;

// What is replayed, and on which nodes. By hand: the recorded trace, in a tenth of the time that it took.
struct Load {
  int pool_blocks = 600;
  int block_bytes = 4096;
  int64_t store_bytes = 0;  // 0: no bound.
  std::vector<std::string> flags = {"--workload=conversation", "--seed=5", "--time-scale=.01"};
  std::vector<replay::Request> requests;
  // Sanitizers are slow: what one computes may be written when the other has asked.
  double least_of_infinite = KVPOOL_SANITIZED ? .7 : .95;
};
Load LoadOfThis() {
  Load load;
  if (std::getenv("KVPOOL_NODES_WHOLE_TRACE") == nullptr) {
    constexpr uint64_t kRequests = 1200;
    load.flags.push_back(absl::StrCat("--requests=", kRequests));
    load.requests = replay::GenerateConversation({.seed = 5, .requests = kRequests});
    return load;
  }
  const auto path = replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces");
  EXPECT_TRUE(path.ok()) << path.status();
  if (!path.ok()) return load;
  auto requests = replay::ReadTrace(*path);
  EXPECT_TRUE(requests.ok()) << requests.status();
  if (requests.ok()) load.requests = *std::move(requests);
  return {.pool_blocks = 5000,
          .block_bytes = 65536,
          .store_bytes =
              int64_t{100000} * 80 * 1024,  // What jemalloc takes for a value of 64 KiB and its header.
          .flags = {"--trace=" + *path, "--time-scale=.1"},
          .requests = std::move(load.requests),
          .least_of_infinite = .98};
}

class NodesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (RedisServer::Program().empty()) {
      GTEST_SKIP() << "no redis-server: deploy/install_deps.sh test installs one";
    }
    key_file_ = folder_.path() + "/tier.key";
    std::ofstream(key_file_) << std::string(64, '5') << "\n";
    std::filesystem::permissions(key_file_, std::filesystem::perms::owner_read);
    cluster_ = std::make_unique<RedisCluster>(3);
    for (size_t i = 0; i < cluster_->size() && load_.store_bytes > 0; ++i) {
      const std::string bytes = absl::StrCat(load_.store_bytes / 3);
      ASSERT_EQ(cluster_->node(i).Command({"CONFIG", "SET", "maxmemory", bytes}), "OK");
      ASSERT_EQ(cluster_->node(i).Command({"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}), "OK");
    }
  }
  std::unique_ptr<DaemonProcess> StartNode() const {
    const uint64_t bytes = uint64_t(load_.pool_blocks) * load_.block_bytes;
    const std::string capacity = absl::StrCat(bytes);
    auto node = DaemonProcess::Start(
        {.binary = KVPOOL_KVPOOLD,
         .capacity = capacity,
         .slab_bytes = capacity,
         .flags = {"--policy=lru", "--tier-key-file=" + key_file_,
                   absl::StrCat("--tier=resp:127.0.0.1:", cluster_->node(0).port(), ",write=seal")}});
    EXPECT_TRUE(node.ok()) << node.status();
    return node.ok() ? std::move(*node) : nullptr;
  }
  // `part`: K/N, of all requests.
  google::protobuf::Struct Replay(const DaemonProcess& node, int wait_ms, const std::string& part) const {
    std::vector<std::string> arguments = {"--socket=" + node.socket(),
                                          "--run=" + std::string(64, 'a'),
                                          absl::StrCat("--block-bytes=", load_.block_bytes),
                                          absl::StrCat("--wait-ms=", wait_ms),
                                          "--part=" + part,
                                          "--json"};
    arguments.insert(arguments.end(), load_.flags.begin(), load_.flags.end());
    const ToolResult result = RunTool(KVPOOL_REPLAY, arguments);
    EXPECT_EQ(result.exit_status, 0) << result.err << node.Log();
    if (result.exit_status != 0) return {};
    auto json = ParseJson(result.out);
    EXPECT_EQ(Number(json, "corrupt_blocks"), 0);
    EXPECT_EQ(Number(json, "double_owners"), 0);
    EXPECT_EQ(Number(json, "refused"), 0);
    return json;
  }
  static void Print(const char* what, const google::protobuf::Struct& replay) {
    const auto& below = replay.fields().at("below").struct_value();
    std::string counters;
    for (const auto& [name, value] : below.fields()) {
      if (value.has_number_value()) absl::StrAppend(&counters, " ", name, " ", value.number_value());
    }
    std::printf(
        "%s: %.0f requests in %.1f s, found %.4f of blocks, %.4f of tokens; longest match %.0f ms;%s\n", what,
        Number(replay, "requests"), Number(replay, "seconds"), Number(replay, "block_hit_ratio"),
        Number(replay, "token_hit_ratio"), LongestMatchMs(replay), counters.c_str());
  }
  static double LongestMatchMs(const google::protobuf::Struct& replay) {
    return Number(replay.fields().at("verbs").struct_value().fields().at("match").struct_value(), "max_ns") *
           1e-6;
  }

  const Load load_ = LoadOfThis();
  TemporaryDirectory folder_;
  std::string key_file_;
  std::unique_ptr<RedisCluster> cluster_;
};

// Requests go to two nodes in turns, as a balancer that knows no prefixes sends them.
TEST_F(NodesTest, TwoFindWhatOneOfInfiniteMemoryWould) {
  const auto infinite = replay::SimulateLru(load_.requests, {.capacity_blocks = uint64_t{1} << 30});
  ASSERT_TRUE(infinite.ok()) << infinite.status();
  std::unique_ptr<DaemonProcess> nodes[] = {StartNode(), StartNode()};
  google::protobuf::Struct replays[2];
  {
    std::vector<std::thread> threads;
    const absl::Cleanup join = [&] {
      for (std::thread& thread : threads) thread.join();
    };
    for (int i = 0; i < 2; ++i) {
      ASSERT_NE(nodes[i], nullptr);
      threads.emplace_back([&, i] { replays[i] = Replay(*nodes[i], 60000, absl::StrCat(i + 1, "/2")); });
    }
  }
  ASSERT_FALSE(HasFailure());
  Print("a node", replays[0]);
  Print("the other", replays[1]);
  const auto both = [&](const char* field) { return Number(replays[0], field) + Number(replays[1], field); };
  EXPECT_EQ(both("requests"), static_cast<double>(load_.requests.size()));
  const double blocks = both("hit_blocks") / both("blocks") / infinite->block_ratio();
  const double tokens = both("hit_tokens") / both("tokens") / infinite->token_ratio();
  std::printf(
      "both found %.3f of the blocks and %.3f of the tokens that one of infinite memory would have: %.4f, "
      "%.4f\n",
      blocks, tokens, infinite->block_ratio(), infinite->token_ratio());
  EXPECT_GE(blocks, load_.least_of_infinite);
  EXPECT_GE(tokens, load_.least_of_infinite);
  for (const auto& node : nodes) EXPECT_EQ(node->Stop(), 0);
}

// What operators' stores go through, one after the other, while engines work.
TEST_F(NodesTest, FaultsOfTheStoreCostHitsAndNothingElse) {
  constexpr int kWaitMs = 2000;
  constexpr uint32_t kMovedSlots = 100;  // A node that has lost all of its slots would become a replica.
  const auto first = StartNode();
  ASSERT_NE(first, nullptr);
  Print("first", Replay(*first, 60000, "1/1"));
  const auto second = StartNode();
  ASSERT_NE(second, nullptr);
  std::atomic<bool> over{false};
  uint32_t removed = 0, migrated = 0;
  double most_down = 0;
  std::thread faults([&] {
    const auto for_a_while = [&](const auto& what) {
      const auto until = std::chrono::steady_clock::now() + milliseconds(500);
      do {
        what();
        most_down = std::max(most_down, second->Metric("kvpool_tier_nodes", "state=\"down\""));
      } while (std::chrono::steady_clock::now() < until);
    };
    while (!over) {
      // Single pieces are evicted.
      for_a_while([&] {
        for (size_t i = 0; i < cluster_->size(); ++i) {
          const std::string key = cluster_->node(i).Command({"RANDOMKEY"});
          removed += cluster_->node(i).Command({"UNLINK", key}) == "1";
        }
      });
      // Slots move.
      for_a_while([&] {
        const uint16_t slot = static_cast<uint16_t>(migrated++ % kMovedSlots);
        cluster_->Migrate(slot, (cluster_->OwnerOf(slot) + 1) % cluster_->size());
      });
      // A node hangs, and with it what is on its way there.
      cluster_->node(2).Signal(SIGSTOP);
      for_a_while([] {});
      cluster_->node(2).Signal(SIGCONT);
      // A node is lost, and comes back with nothing.
      cluster_->node(1).Kill();
      for_a_while([] {});
      cluster_->node(1).Restart();
      EXPECT_TRUE(Eventually([&] {
        return absl::StrContains(cluster_->node(1).Command({"CLUSTER", "INFO"}), "cluster_state:ok");
      }));
      // The network between both is gone: nothing of it answers.
      for (size_t i = 0; i < cluster_->size(); ++i) cluster_->node(i).Signal(SIGSTOP);
      for_a_while([] {});
      for (size_t i = 0; i < cluster_->size(); ++i) cluster_->node(i).Signal(SIGCONT);
    }
  });
  const auto through = Replay(*second, kWaitMs, "1/1");
  over = true;
  faults.join();
  ASSERT_FALSE(HasFailure());
  Print("second, through faults", through);
  std::printf("%u pieces evicted, %u slots moved, %.0f nodes down at most\n", removed, migrated, most_down);
  EXPECT_LT(LongestMatchMs(through), kWaitMs + 2000);
  EXPECT_GT(removed, 0);
  EXPECT_GT(most_down, 0);
  // Once the store is well it is used again.
  EXPECT_TRUE(Eventually([&] { return second->Metric("kvpool_tier_nodes", "state=\"down\"") == 0; }));
  EXPECT_EQ(first->Stop(), 0);
  EXPECT_EQ(second->Stop(), 0);
}

}  // namespace
}  // namespace kvpool
