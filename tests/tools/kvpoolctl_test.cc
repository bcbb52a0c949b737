// kvpoolctl against a real daemon: every subcommand, its JSON, and its exit status.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "client/ctl/render.h"
#include "client/layouts.h"
#include "client/live_sequence.h"
#include "client/session.h"
#include "client/tools/text.h"
#include "google/protobuf/util/json_util.h"
#include "kvpool/v1/operator.pb.h"
#include "proto/support/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/tools/run_tool.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kDone = 0, kRefused = 1, kUsage = 2, kUnreachable = 3;
constexpr size_t kKeyBytes = 32;
constexpr uint32_t kChain = 4;  // Blocks of the prefix that the fixture seals.

Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }

std::string Key(int i) { return std::string(kKeyBytes, static_cast<char>('a' + i)); }

class Kvpoolctl : public ::testing::Test {
 protected:
  void SetUp() override {
    auto daemon =
        DaemonProcess::Start({.binary = KVPOOL_KVPOOLD, .capacity = "2MiB", .flags = {"--slab-bytes=2MiB"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    SessionOptions options;
    options.socket = daemon_->socket();
    options.tenant = "tests";
    options.client_name = "kvpoolctl\x1btest";
    options.layout = OpaqueLayout({.block_bytes = 4096});
    options.fingerprint.set_digest("tests of kvpoolctl");
    options.magazine_blocks = 8;
    auto session = Session::Open(options);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    SealChain();
  }

  // Leaves a chain of kChain cached blocks.
  void SealChain() {
    auto blocks = session_->LeaseWithin(kChain, Soon());
    ASSERT_TRUE(blocks.ok()) << blocks.status();
    std::string keys;
    for (uint32_t i = 0; i < kChain; ++i) keys += Key(static_cast<int>(i));
    auto sealed = session_->Seal({.blocks = blocks->refs(), .keys = keys, .key_bytes = kKeyBytes});
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    ASSERT_TRUE(sealed->Wait(Soon()).ok());
    blocks->Release();
    ASSERT_TRUE(session_->Flush(Soon()).ok());
  }

  ToolResult Run(std::vector<std::string> arguments) const {
    // For machines under a sanitizer and other builds.
    arguments.insert(arguments.begin(), {"--socket=" + daemon_->socket(), "--deadline=60s"});
    return RunTool(KVPOOL_KVPOOLCTL, arguments);
  }
  // The answer as the message that it is.
  template <typename Message>
  Message Ask(std::vector<std::string> arguments) const {
    arguments.push_back("--json");
    const ToolResult result = Run(arguments);
    EXPECT_EQ(result.exit_status, kDone) << result.err;
    Message message;
    const auto status = google::protobuf::util::JsonStringToMessage(result.out, &message);
    EXPECT_TRUE(status.ok()) << status.ToString() << ": " << result.out;
    return message;
  }
  std::string StatePath(const std::string& name) const {
    return (std::filesystem::path(daemon_->socket()).parent_path() / name).string();
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(Kvpoolctl, StatusAndTop) {
  const auto stats = Ask<v1::GetStatsResponse>({"status"});
  EXPECT_EQ(stats.sessions(), 1u);
  EXPECT_EQ(stats.sealed_total(), kChain);
  const v1::StateCounts& blocks = stats.blocks();
  EXPECT_EQ(blocks.cached(), kChain);
  EXPECT_EQ(blocks.free() + blocks.leased() + blocks.sealed() + blocks.cached() + blocks.quarantined(),
            blocks.capacity());
  EXPECT_THAT(Run({"status"}).out, HasSubstr("4 sealed, 0 deduplicated"));
  EXPECT_EQ(Ask<v1::GetStatsResponse>({"top", "--once"}).sessions(), 1u);
  EXPECT_THAT(Run({"top", "--once"}).out, HasSubstr("tests@"));
}

TEST_F(Kvpoolctl, SpacesAndSessions) {
  const auto spaces = Ask<v1::ListSpacesResponse>({"spaces"});
  ASSERT_EQ(spaces.spaces_size(), 1);
  EXPECT_EQ(spaces.spaces(0).fingerprint(), "tests of kvpoolctl");
  EXPECT_THAT(Run({"spaces"}).out, HasSubstr("opaque, 4 KiB a block"));
  const auto sessions = Ask<v1::ListSessionsResponse>({"sessions"});
  ASSERT_EQ(sessions.sessions_size(), 1);
  EXPECT_EQ(sessions.sessions(0).session(), session_->id());
  EXPECT_EQ(sessions.sessions(0).members(0).pid(), getpid());
  const ToolResult text = Run({"sessions"});
  EXPECT_THAT(text.out, HasSubstr("kvpoolctl?test"));
  EXPECT_THAT(text.out, Not(HasSubstr("\x1b")));
}

TEST_F(Kvpoolctl, Recovered) {
  const auto recovery = Ask<v1::GetRecoveryResponse>({"recovered"});
  EXPECT_EQ(recovery.start(), "no_keeper");
  EXPECT_GT(recovery.first_answer_seconds(), 0);
  EXPECT_EQ(recovery.spaces_size() + recovery.lost_spaces_size(), 0);
  EXPECT_THAT(Run({"recovered"}).out, HasSubstr("Start: no_keeper; first answer after "));
}

TEST_F(Kvpoolctl, Tiers) {
  EXPECT_EQ(Ask<v1::ListTiersResponse>({"tier"}).tiers_size(), 0);
  EXPECT_THAT(Run({"tier"}).out, HasSubstr("No tiers"));
  const TemporaryDirectory below;
  const std::string folder = below.path() + "/tier";
  auto daemon = DaemonProcess::Start(
      {.binary = KVPOOL_KVPOOLD, .flags = {"--tier=file:" + folder + ",capacity=64MiB"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  session_.reset();
  daemon_ = *std::move(daemon);
  const auto tiers = Ask<v1::ListTiersResponse>({"tier"});
  ASSERT_EQ(tiers.tiers_size(), 1);
  EXPECT_EQ(tiers.tiers(0).tier(), "file");
  EXPECT_EQ(tiers.tiers(0).path(), folder);
  EXPECT_EQ(tiers.tiers(0).capacity_bytes(), 64 << 20);
  EXPECT_THAT(Run({"tier"}).out, HasSubstr(folder));
  EXPECT_THAT(Run({"tier"}).out, Not(HasSubstr("next daemon")));
  const ToolResult attached = Run({"tier", "attach", "--tier=host:capacity=4MiB", "--write=seal"});
  EXPECT_EQ(attached.exit_status, kDone) << attached.err;
  EXPECT_THAT(attached.out,
              HasSubstr("Tier host at memory is attached, with 0 values, until the daemon ends"));
  EXPECT_THAT(attached.out, HasSubstr("tier = host:capacity=4MiB,write=seal\n"));
  EXPECT_THAT(Run({"tier"}).out,
              HasSubstr("The next daemon does not have host, which was attached to this one"));
  EXPECT_THAT(Run({"tier", "attach", "--tier=host:capacity=4MiB"}).err, HasSubstr("one is attached"));
  EXPECT_EQ(Run({"tier", "drain", "host"}).out, "Tier host is not written to any more; 0 writes under way\n");
  EXPECT_EQ(Ask<v1::ListTiersResponse>({"tier"}).tiers(1).state(), v1::TIER_STATE_DRAINING);
  EXPECT_EQ(Run({"tier", "drain", "host", "--cancel"}).out, "Tier host is written to again\n");
  EXPECT_EQ(Run({"tier", "detach", "host"}).out, "Tier host is detached\n");
  EXPECT_EQ(Run({"tier", "detach", "host"}).exit_status, kRefused);
  EXPECT_EQ(Run({"tier", "detach", "file"}).exit_status, kDone);
  EXPECT_THAT(Run({"tier"}).out, HasSubstr("No tiers"));
  EXPECT_THAT(Run({"tier"}).out, HasSubstr("The next daemon has another one: file:" + folder));
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"tier", "attach"},
                                                {"tier", "drain"},
                                                {"tier", "drain", "host", "--write=seal"},
                                                {"tier", "--tier=host:"},
                                                {"tier", "detach", "host", "--cancel"},
                                                {"tier", "attach", "host"}})
    EXPECT_EQ(Run(wrong).exit_status, kUsage) << wrong.back();
}

TEST_F(Kvpoolctl, ATierIsNotAttachedToADaemonWithoutASecret) {
  const ToolResult refused = Run({"tier", "attach", "--tier=host:capacity=4MiB"});
  EXPECT_EQ(refused.exit_status, kRefused);
  EXPECT_THAT(refused.err, HasSubstr("started with neither --tier nor --tier-key-file"));
}

TEST_F(Kvpoolctl, BlocksInPages) {
  const auto cached = Ask<v1::ListBlocksResponse>({"blocks", "--space=1", "--state=cached"});
  ASSERT_EQ(cached.blocks_size(), static_cast<int>(kChain));
  const auto page = Ask<v1::ListBlocksResponse>({"blocks", "--space=1", "--limit=5"});
  EXPECT_EQ(page.blocks_size(), 5);
  EXPECT_NE(page.next(), 0u);
  const auto rest = Ask<v1::ListBlocksResponse>(
      {"blocks", "--space=1", "--limit=1000000", "--first", std::to_string(page.next())});
  EXPECT_EQ(rest.next(), 0u);
  EXPECT_EQ(page.blocks_size() + rest.blocks_size(),
            static_cast<int>(Ask<v1::GetStatsResponse>({"status"}).blocks().capacity()));
  EXPECT_THAT(Run({"blocks", "--space=1", "--state=sealed"}).out, HasSubstr("No such blocks."));
  EXPECT_THAT(Run({"blocks", "--space=1", "--state=cached"}).out, HasSubstr(tools::Hex(Key(1))));
}

TEST_F(Kvpoolctl, Explain) {
  const auto by_key = Ask<v1::ExplainResponse>({"explain", "--key=" + tools::Hex(Key(1))});
  ASSERT_GE(by_key.blocks_size(), 1);
  EXPECT_EQ(by_key.blocks(0).key(), Key(1));
  EXPECT_NE(by_key.summary(), "");
  const std::string block = std::to_string(by_key.blocks(0).block());
  const ToolResult text = Run({"explain", "--space=1", "--block", block});
  EXPECT_EQ(text.exit_status, kDone);
  EXPECT_THAT(text.out, HasSubstr(tools::Hex(Key(1))));
  EXPECT_NE(Ask<v1::ExplainResponse>({"explain", "--key=00"}).summary(), "");
}

TEST_F(Kvpoolctl, PinHoldsBackAndEvictFrees) {
  const std::string key = "--key=" + tools::Hex(Key(1));
  EXPECT_EQ(Ask<v1::PinPrefixResponse>({"pin", key, "--ttl=1h"}).pinned(), 2u);
  auto evicted = Ask<v1::EvictResponse>({"evict", "--all"});
  EXPECT_EQ(evicted.evicted(), 2u);  // Those behind the pinned ones.
  EXPECT_EQ(evicted.held_back(), 2u);
  EXPECT_EQ(Ask<v1::PinPrefixResponse>({"pin", key, "--unpin"}).pinned(), 2u);
  evicted = Ask<v1::EvictResponse>({"evict", key});
  EXPECT_EQ(evicted.evicted(), 1u);
  EXPECT_THAT(Run({"evict", "--space=1", "--tenant=tests"}).out, HasSubstr("1 block evicted"));
  EXPECT_EQ(Ask<v1::GetStatsResponse>({"status"}).blocks().cached(), 0u);
}

TEST_F(Kvpoolctl, EraseSaysWhatIsLeft) {
  const std::string tenant = Ask<v1::ListSpacesResponse>({"spaces"}).spaces(0).tenant();
  const ToolResult erased = Run({"erase", "--tenant=" + tenant});
  // The session has leases, and free blocks are not overwritten.
  EXPECT_EQ(erased.exit_status, kRefused);
  EXPECT_THAT(erased.out, HasSubstr("4 blocks (16 KiB) left 1 space"));
  EXPECT_THAT(erased.out, HasSubstr("Held in space 1: by session 1 (kvpoolctl?test"));
  EXPECT_THAT(erased.out, HasSubstr("Looked for afterwards: 0 blocks found"));
  EXPECT_EQ(Ask<v1::GetStatsResponse>({"status"}).blocks().cached(), 0u);
  EXPECT_THAT(Run({"erase", "--tenant=tests"}).err, HasSubstr("did you mean " + tenant));
  EXPECT_EQ(Run({"erase"}).exit_status, kUsage);
}

TEST_F(Kvpoolctl, ShareSaysWhatASpaceMayHave) {
  EXPECT_THAT(
      Run({"share", "--space=1", "--guaranteed-blocks=9", "--weight=3"}).out,
      HasSubstr(
          "Space 1 keeps 9 blocks instead of 0; it has 511 of at most 511, weight 3, and class standard."));
  EXPECT_THAT(Run({"share", "--space=1", "--limit-blocks=600"}).out,
              HasSubstr("keeps 9 blocks instead of 9"));
  EXPECT_EQ(Run({"share", "--space=1"}).exit_status, kUsage);
  EXPECT_EQ(Run({"share", "--space=1", "--weight=1001"}).exit_status, kUsage);
  EXPECT_THAT(Run({"share", "--space=1", "--priority=batch"}).out, HasSubstr("and class batch."));
  EXPECT_THAT(Run({"spaces"}).out, AllOf(HasSubstr("PRIORITY"), HasSubstr("batch")));
  EXPECT_THAT(Run({"share", "--space=1", "--priority=rule"}).out, HasSubstr("and class standard."));
  for (const char* wrong : {"--priority=urgent", "--priority=", "--priority=unspecified"})
    EXPECT_EQ(Run({"share", "--space=1", wrong}).exit_status, kUsage) << wrong;
}

// Nothing evicted because nothing was cached, and nothing because of a misspelt name, are told apart.
TEST_F(Kvpoolctl, NamesThatNobodyHasAreErrors) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"evict", "--tenant=nope"}, "tenant \"nope\" has no open space"},
      {{"evict", "--tenant=nope", "--space=1"}, "tenant \"nope\" has no open space with the number 1"},
      {{"evict", "--space=99"}, "space 99 does not exist"},
      {{"evict", "--session=99"}, "session 99 does not exist"},
      {{"sessions", "--space=99"}, "space 99 does not exist"},
      {{"policy", "--space=99"}, "space 99 does not exist"},
      {{"policy", "set", "lru", "--space=99"}, "space 99 does not exist"},
      {{"pin", "--key=00", "--ttl=1h"}, "key is resident in no space asked"},
      {{"pin", "--key=00", "--ttl=1h", "--space=99"}, "space 99 does not exist"},
      {{"explain", "--key=00", "--space=99"}, "space 99 does not exist"},
      {{"revoke", "--blocks=1", "--session=99"}, "session 99 does not exist"},
  };
  for (const auto& [arguments, message] : cases) {
    const ToolResult result = Run(arguments);
    EXPECT_EQ(result.exit_status, kRefused) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  }
  EXPECT_EQ(Ask<v1::GetStatsResponse>({"status"}).blocks().cached(), kChain);
}

TEST_F(Kvpoolctl, DrainAndRevoke) {
  EXPECT_EQ(Ask<v1::RevokeResponse>({"revoke", "--blocks=1"}).sessions_asked(), 1u);
  EXPECT_EQ(Ask<v1::DrainResponse>({"drain"}).sessions_left(), 1u);
  EXPECT_TRUE(Ask<v1::GetStatsResponse>({"status"}).draining());
  const ToolResult waited = Run({"drain", "--wait", "--timeout=10ms"});
  EXPECT_EQ(waited.exit_status, kRefused);
  EXPECT_THAT(waited.err, HasSubstr("1 session still open"));
  ASSERT_TRUE(session_->Close(Soon()).ok());
  EXPECT_EQ(Ask<v1::DrainResponse>({"drain", "--wait"}).sessions_left(), 0u);
  EXPECT_THAT(Run({"drain", "--wait"}).out, HasSubstr("Drained: no session is left"));
  EXPECT_EQ(Run({"drain", "--cancel"}).exit_status, kDone);
  EXPECT_FALSE(Ask<v1::GetStatsResponse>({"status"}).draining());
}

TEST_F(Kvpoolctl, PolicyIsShownAndSet) {
  EXPECT_EQ(Ask<v1::GetPoliciesResponse>({"policy"}).spaces(0).policy(), "learned");
  EXPECT_THAT(Run({"policy"}).out, HasSubstr("New spaces: learned"));
  const auto set = Ask<v1::SetPolicyResponse>({"policy", "set", "arc", "--space=1"});
  EXPECT_EQ(set.spaces(0).previous(), "learned");
  EXPECT_EQ(set.spaces(0).blocks(), kChain);
  EXPECT_EQ(Run({"policy", "set", "sieve"}).out,
            "Space 1: sieve instead of arc; takes over 4 blocks\nNew spaces: sieve\n");
  EXPECT_THAT(Run({"policy", "--space=1"}).out, HasSubstr("sieve"));
  const ToolResult unknown = Run({"policy", "set", "mru"});
  EXPECT_EQ(unknown.exit_status, kRefused);
  EXPECT_THAT(unknown.err, HasSubstr("there are: lru"));
  EXPECT_EQ(Run({"policy", "set"}).exit_status, kUsage);
  EXPECT_EQ(Run({"policy", "get", "lru"}).exit_status, kUsage);
}

TEST_F(Kvpoolctl, GuardIsShownAndReset) {
  EXPECT_EQ(Run({"guard"}).out, "No policy has dropped tokens.\nNothing is measured (--guard-share=0).\n");
  const ToolResult nothing = Run({"guard", "--on=h2o"});
  EXPECT_EQ(nothing.exit_status, kRefused);
  EXPECT_THAT(nothing.err, HasSubstr("no drop by policy h2o: it measures nothing (--guard-share)"));
  auto daemon = DaemonProcess::Start(
      {.binary = KVPOOL_KVPOOLD,
       .capacity = "2MiB",
       .flags = {"--slab-bytes=2MiB", "--guard-share=1", "--guard-bound=0.01", "--guard-samples=1"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  ASSERT_TRUE(session_->Close(Soon()).ok());
  session_ = nullptr;
  daemon_ = *std::move(daemon);
  SessionOptions options;
  options.socket = daemon_->socket();
  options.tenant = "tests";
  options.layout = PagedLayout({.layers = 1, .kv_heads = 1, .head_dim = 8});
  options.fingerprint.set_digest("the guard");
  auto session = Session::Open(options);
  ASSERT_TRUE(session.ok()) << session.status();
  LiveSequence sequence(session->get());
  auto blocks = (*session)->LeaseWithin(3, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  for (int i = 0; i < 3; ++i)
    std::memset((*session)->data(blocks->refs()[i]), 56 + 2 * i, options.layout.block_bytes());
  ASSERT_TRUE(sequence.Append(*std::move(blocks)).ok());
  ASSERT_TRUE(sequence.Extend(std::vector<uint32_t>(48, 1)).ok());
  v1::Prune prune;
  prune.mutable_policy()->set_name("recency");
  prune.set_budget_tokens(32);
  v1::QueryWindow* const window = prune.mutable_signals()->mutable_window();
  window->set_queries(1);
  window->set_q_heads(1);
  window->mutable_data()->set_inlined(std::string(8 * 2, 0));
  ASSERT_TRUE(sequence.Prune(prune, Soon()).ok());
  const auto guard = Ask<v1::GetGuardResponse>({"guard"});
  ASSERT_EQ(guard.policies_size(), 1);
  EXPECT_TRUE(guard.policies(0).off());
  EXPECT_EQ(guard.policies(0).operations().at("measured"), 1u);
  EXPECT_THAT(guard.policies(0).tenant(), HasSubstr("tests"));
  const std::string text = Run({"guard"}).out;
  EXPECT_THAT(text, HasSubstr("A share of 1 is measured; off above a mean of 0.01 over 1 samples."));
  EXPECT_THAT(text, HasSubstr(" recency  off  "));
  prune.set_budget_tokens(16);
  EXPECT_THAT(sequence.Prune(prune, Soon()).status().message(),
              HasSubstr("policy recency is off in space 1"));
  EXPECT_EQ(Run({"guard", "--on=recency", "--space=1"}).out,
            "Space 1, recency: on again; 1 sample forgotten\n");
  EXPECT_FALSE(Ask<v1::GetGuardResponse>({"guard", "--space=1"}).policies(0).off());
  EXPECT_TRUE(sequence.Prune(prune, Soon()).ok());
  EXPECT_EQ(Run({"guard", "--on=recency", "--space=9"}).exit_status, kRefused);
}

TEST_F(Kvpoolctl, EndNamesTheProcessesToWaitFor) {
  const uint64_t id = session_->id();
  const ToolResult ended = Run({"end", "--session=" + std::to_string(id)});
  EXPECT_EQ(ended.exit_status, kDone) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("Session " + std::to_string(id) + " has ended."));
  EXPECT_THAT(ended.out, HasSubstr("pid " + std::to_string(getpid())));
  EXPECT_TRUE(Ask<v1::EndSessionResponse>({"end", "--session=" + std::to_string(id)}).session().ended());
  EXPECT_EQ(Run({"end", "--session=99"}).exit_status, kRefused);
}

TEST_F(Kvpoolctl, PoliciesNeedNoDaemon) {
  daemon_->End(SIGKILL);
  const ToolResult text = Run({"policies"});
  EXPECT_EQ(text.exit_status, kDone) << text.err;
  EXPECT_THAT(text.out, HasSubstr("paged_eviction: "));
  EXPECT_THAT(text.out, HasSubstr("query window"));
  const ToolResult json = Run({"policies", "--json"});
  EXPECT_EQ(json.exit_status, kDone);
  EXPECT_THAT(json.out, HasSubstr("\"paged_eviction\""));
  EXPECT_THAT(json.out, HasSubstr("\"paper_literal\""));
}

TEST_F(Kvpoolctl, Health) {
  const ToolResult healthy = Run({"health"});
  EXPECT_EQ(healthy.exit_status, kDone);
  EXPECT_EQ(healthy.out, "SERVING\n");
  EXPECT_EQ(Run({"health", "--json"}).out, "{\"status\":\"SERVING\"}\n");
  EXPECT_EQ(Run({"health", "--service=kvpool.v1.Engine"}).exit_status, kDone);
  EXPECT_EQ(Run({"health", "--service=no.such"}).exit_status, kRefused);
  EXPECT_EQ(Run({"health", "--wait=10s"}).out, "SERVING\n");
  daemon_->End(SIGKILL);
  EXPECT_EQ(Run({"health", "--wait=100ms"}).exit_status, kUnreachable);
  const ToolResult dead = Run({"health"});
  EXPECT_EQ(dead.exit_status, kUnreachable);
  EXPECT_THAT(dead.err, HasSubstr("kvpoold has ended without removing the socket"));
}

// A liveness probe that fails would end the daemon, and with it the sessions that it waits for.
TEST_F(Kvpoolctl, ADrainingDaemonIsAliveAndNotReady) {
  EXPECT_EQ(Run({"health", "--live"}).out, "SERVING\n");
  EXPECT_EQ(Run({"drain"}).exit_status, kDone);
  const ToolResult ready = Run({"health"});
  EXPECT_EQ(ready.exit_status, kRefused);
  EXPECT_EQ(ready.out, "NOT_SERVING\n");
  const ToolResult live = Run({"health", "--live"});
  EXPECT_EQ(live.exit_status, kDone) << live.err;
  EXPECT_EQ(live.out, "NOT_SERVING\n");
  EXPECT_EQ(Run({"health", "--live", "--service=no.such"}).exit_status, kRefused);
  EXPECT_EQ(Run({"drain", "--cancel"}).exit_status, kDone);
  EXPECT_EQ(Run({"health"}).exit_status, kDone);
  daemon_->End(SIGKILL);
  EXPECT_EQ(Run({"health", "--live"}).exit_status, kUnreachable);
}

TEST_F(Kvpoolctl, TheDaemonsRefusalsAreExitStatus1) {
  const ToolResult result = Run({"blocks", "--space=77"});
  EXPECT_EQ(result.exit_status, kRefused);
  EXPECT_THAT(result.err, HasSubstr("77"));
}

// A live view on a terminal of its own, ended by q.
TEST_F(Kvpoolctl, TopOnATerminal) {
  int terminal;
  const std::string socket = "--socket=" + daemon_->socket();
  winsize size{.ws_row = 40, .ws_col = 160};
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, &size);
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    execl(KVPOOL_KVPOOLCTL, KVPOOL_KVPOOLCTL, socket.c_str(), "top", "--interval=50ms", nullptr);
    _exit(127);
  }
  const UniqueFd owned(terminal);
  std::string shown;
  char buffer[4096];
  ssize_t bytes;
  // Rates need two frames. Reading from a terminal that nobody has open any more fails.
  while (shown.find("per second:") == std::string::npos &&
         (bytes = read(terminal, buffer, sizeof(buffer))) > 0) {
    shown.append(buffer, static_cast<size_t>(bytes));
  }
  EXPECT_THAT(shown, HasSubstr("q quit"));
  EXPECT_THAT(shown, HasSubstr("per second:"));
  ASSERT_EQ(write(terminal, "xq", 2), 2);
  while ((bytes = read(terminal, buffer, sizeof(buffer))) > 0)
    shown.append(buffer, static_cast<size_t>(bytes));
  EXPECT_THAT(shown, HasSubstr("\x1b[?1049l"));  // The screen from before is back.
  int status;
  waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(KvpoolctlUsage, ExitStatus2NamesTheFlag) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{}, "no command"},
      {{"frobnicate"}, "no command frobnicate"},
      {{"status", "extra"}, "unexpected argument extra"},
      {{"status", "--frob"}, "no flag --frob"},
      {{"blocks"}, "blocks needs --space=ID"},
      {{"blocks", "--space=1", "--state=odd"},
       "--state: \"odd\" is not free, leased, sealed, cached, quarantined or withheld"},
      {{"explain"}, "explain needs --space=ID --block=ID, or --key=HEX"},
      {{"explain", "--block=3"}, "--block needs --space=ID"},
      {{"evict"}, "say --all if that is meant"},
      {{"pin", "--key=00"}, "pin needs --ttl=TIME, or --unpin"},
      {{"pin", "--key=00", "--ttl=25h"}, "--ttl: \"25h\" is not a time of 1ms to 24h"},
      {{"pin", "--ttl=1h"}, "pin needs --key=HEX"},
      {{"revoke"}, "revoke needs --blocks=N"},
      {{"end"}, "end needs --session=ID"},
      {{"drain", "--cancel", "--wait"}, "--cancel and --wait exclude each other"},
      {{"drain", "--timeout=1s"}, "--timeout is for --wait"},
      {{"evict", "--tenant=", "--count=5"}, "--tenant: no tenant has an empty name"},
      {{"evict", "--space=0", "--count=5"}, "--space: \"0\" is not a whole number of 1 to"},
      {{"evict", "--all", "--group=1"}, "--group is for --key"},
      {{"explain", "--space=1", "--block=1", "--group=1"}, "--group is for --key"},
      {{"--tls-ca=/nope", "status"}, "are for --address"},
      {{"--address=a:1", "--tls-ca=/nope", "--tls-cert=/", "--tls-key=/", "status"},
       "--tls-ca=/nope: cannot read it: No such file or directory"},
      {{"top", "--interval=1ms"}, "--interval: \"1ms\" is not a time of 50ms to 1h"},
      {{"--address=localhost:1", "status"}, "--address needs --tls-ca, --tls-cert and --tls-key"},
  };
  for (const auto& [arguments, message] : cases) {
    const ToolResult result = RunTool(KVPOOL_KVPOOLCTL, arguments);
    EXPECT_EQ(result.exit_status, kUsage) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
  EXPECT_EQ(RunTool(KVPOOL_KVPOOLCTL, {"--help"}).exit_status, kDone);
  EXPECT_THAT(RunTool(KVPOOL_KVPOOLCTL, {"evict", "--help"}).out, HasSubstr("--tenant=TEXT"));
  // The receipt of an erasure that takes longer would be lost.
  EXPECT_THAT(RunTool(KVPOOL_KVPOOLCTL, {"evict", "--help"}).out,
              HasSubstr("longest wait for an answer [5s]"));
  EXPECT_THAT(RunTool(KVPOOL_KVPOOLCTL, {"erase", "--help"}).out,
              HasSubstr("longest wait for an answer [10m]"));
}

TEST(KvpoolctlUnreachable, ExitStatus3SaysWhatToTry) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/s";
  ToolResult result = RunTool(KVPOOL_KVPOOLCTL, {"--socket=" + path, "status"});
  EXPECT_EQ(result.exit_status, kUnreachable);
  EXPECT_THAT(result.err, HasSubstr("cannot reach kvpoold at " + path + ": there is no such socket"));
  EXPECT_THAT(result.err, HasSubstr("KVPOOL_SOCKET"));
  // A server that accepts connections and never answers.
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX};
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  result = RunTool(KVPOOL_KVPOOLCTL, {"--socket=" + path, "status"});
  EXPECT_EQ(result.exit_status, kUnreachable);
  EXPECT_THAT(result.err, HasSubstr("cannot reach kvpoold at " + path + ": connection refused"));
  ASSERT_EQ(listen(listener.get(), 16), 0);
  result = RunTool(KVPOOL_KVPOOLCTL, {"--socket", path, "--deadline=200ms", "status"});
  EXPECT_EQ(result.exit_status, kUnreachable);
  EXPECT_THAT(result.err, HasSubstr("cannot reach kvpoold at " + path + ": no answer within 200ms"));
  // Of an erasure too, whose own default is longer.
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{"--socket", path, "--deadline=200ms", "erase", "--tenant=a"},
                                             {"--socket", path, "erase", "--tenant=a", "--deadline=200ms"}}) {
    EXPECT_THAT(RunTool(KVPOOL_KVPOOLCTL, arguments).err, HasSubstr("no answer within 200ms"));
  }
}

TEST(KvpoolctlUnreachable, HealthWaitsForADaemonThatStarts) {
  const TemporaryDirectory folder;
  ToolResult waited;
  std::thread waiting([&] {
    waited =
        RunTool(KVPOOL_KVPOOLCTL, {"--socket=" + folder.path() + "/kvpoold.sock", "health", "--wait=60s"});
  });
  const auto daemon = DaemonProcess::Start({.binary = KVPOOL_KVPOOLD, .directory = folder.path()});
  waiting.join();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  EXPECT_EQ(waited.exit_status, kDone);
  EXPECT_EQ(waited.out, "SERVING\n");
  EXPECT_EQ(waited.err, "");
}

TEST(KvpoolctlRender, LongChainsShowTheirEnds) {
  v1::ExplainResponse explanation;
  for (uint32_t block = 101; block <= 158; ++block) explanation.add_blocks()->set_block(block);
  const std::string ends = ctl::RenderExplanation(explanation, /*all=*/false);
  for (const char* shown :
       {"101", "106", "156", "158", "49 blocks between the first 6 and the last 3 left out; --all"}) {
    EXPECT_THAT(ends, HasSubstr(shown));
  }
  EXPECT_THAT(ends, testing::Not(HasSubstr("107")));
  EXPECT_THAT(ctl::RenderExplanation(explanation, /*all=*/true), HasSubstr("130"));
  explanation.mutable_blocks()->DeleteSubrange(10, 48);
  EXPECT_THAT(ctl::RenderExplanation(explanation, /*all=*/false), HasSubstr("107"))
      << "one block is shorter than its absence";
}

TEST(KvpoolctlRender, WhatWasLostHasItsReason) {
  v1::GetRecoveryResponse recovery;
  recovery.set_start("warm");
  recovery.set_recovery_seconds(0.0312);
  v1::RecoveredSpace* const space = recovery.add_spaces();
  space->set_space(3);
  space->set_tenant("red@1000");
  space->set_cached_blocks(123);
  space->set_held_blocks(45);
  space->set_unverified_blocks(8);
  (*space->mutable_dropped_blocks())["checksum"] = 6;
  (*space->mutable_dropped_blocks())["torn"] = 1;
  (*space->mutable_lost_sessions())["away"] = 1;
  v1::LostSession* const session = space->add_lost();
  session->set_session(9);
  session->set_client_name("vllm\x1b");
  session->set_reason("away");
  session->set_detail("member 0 hung up");
  v1::LostSpace* lost = recovery.add_lost_spaces();
  lost->set_space(2);
  lost->set_tenant("blue");
  lost->set_reason("settings");
  lost->set_detail("it had other slabs");
  lost->set_sealed_blocks(77);
  lost->set_sessions(1);
  recovery.add_lost_spaces()->set_reason("damaged");
  const std::string text = ctl::RenderRecovery(recovery);
  for (const char* shown :
       {"Start: warm; what was kept was read in 0.031 s\n", "red@1000", "123", "45",
        "Space 3: blocks dropped: 6 checksum, 1 torn\n", "Space 3: sessions lost: 1 away\n",
        "Space 3: 8 blocks without a sum of the content\n", "  session 9 (vllm?): away: member 0 hung up\n",
        "Space 2 (blue) lost, with 77 sealed blocks and 1 session: settings: it had other slabs\n",
        "Space of an unreadable table lost, with 0 sealed blocks and 0 sessions: damaged: "}) {
    EXPECT_THAT(text, HasSubstr(shown));
  }
}

// What a newer daemon says, in words that this build does not know.
TEST(KvpoolctlRender, UnknownValuesShowAsNumbers) {
  v1::ListBlocksResponse blocks;
  blocks.add_blocks()->set_state(static_cast<v1::BlockState>(42));
  blocks.GetReflection()->MutableUnknownFields(&blocks)->AddVarint(999, 1);
  EXPECT_THAT(ctl::RenderBlocks(blocks), HasSubstr("42"));
  v1::ListSpacesResponse spaces;
  spaces.add_spaces()->mutable_layout()->set_encoding(static_cast<v1::Encoding>(43));
  EXPECT_THAT(ctl::RenderSpaces(spaces), HasSubstr("holds 43, "));
  EXPECT_EQ(ctl::StateName(v1::BLOCK_STATE_CACHED), "cached");
  EXPECT_EQ(ctl::StateFromName("cached"), v1::BLOCK_STATE_CACHED);
}

// Certificates as an operator makes them, with the openssl program.
class KvpoolctlTls : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::system("openssl version >/dev/null 2>&1") != 0)
      GTEST_SKIP() << "no openssl program to make certificates";
    Openssl(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=ca -keyout "
        "ca.key -out ca.pem");
    for (const std::string& name : {std::string("daemon"), std::string("operator")}) {
      std::ofstream(folder_.path() + "/" + name + ".ext") << "subjectAltName=DNS:" << name << "\n";
      Openssl("req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=" + name + " -keyout " +
              name + ".key -out " + name + ".csr");
      Openssl("x509 -req -days 1 -in " + name + ".csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile " +
              name + ".ext -out " + name + ".pem");
    }
  }
  void Openssl(const std::string& command) {
    const std::string line = "cd " + folder_.path() + " && openssl " + command + " >/dev/null 2>&1";
    ASSERT_EQ(std::system(line.c_str()), 0) << line;
  }
  std::string File(const std::string& name) const { return folder_.path() + "/" + name; }

  const TemporaryDirectory folder_;
};

TEST_F(KvpoolctlTls, OperatorVerbsOverTcp) {
  std::ofstream(File("access.conf")) << "[operators]\nsan = operator\nrole = operator\n";
  auto daemon = DaemonProcess::Start(
      {.binary = KVPOOL_KVPOOLD,
       .flags = {"--operator-tls-listen=127.0.0.1:0", "--access=" + File("access.conf"),
                 "--operator-tls-cert=" + File("daemon.pem"), "--operator-tls-key=" + File("daemon.key"),
                 "--operator-tls-ca=" + File("ca.pem")}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  std::ifstream facts((std::filesystem::path((*daemon)->socket()).parent_path() / "kvpoold.json").string());
  const std::string text((std::istreambuf_iterator<char>(facts)), std::istreambuf_iterator<char>());
  const auto port = static_cast<int>(Number(ParseJson(text), "operator_port"));
  std::vector<std::string> arguments = {"--address=127.0.0.1:" + std::to_string(port),
                                        "--tls-ca=" + File("ca.pem"),
                                        "--tls-cert=" + File("operator.pem"),
                                        "--tls-key=" + File("operator.key"),
                                        "--tls-name=daemon",
                                        "status",
                                        "--json",
                                        "--deadline=60s"};
  const ToolResult answered = RunTool(KVPOOL_KVPOOLCTL, arguments);
  EXPECT_EQ(answered.exit_status, kDone) << answered.err;
  EXPECT_EQ(Number(ParseJson(answered.out), "sessions"), 0);
  arguments.pop_back();
  arguments[4] = "--tls-name=somebody-else";
  EXPECT_EQ(RunTool(KVPOOL_KVPOOLCTL, arguments).exit_status, kUnreachable);
  arguments[1] = "--tls-ca=" + File("missing.pem");
  EXPECT_EQ(RunTool(KVPOOL_KVPOOLCTL, arguments).exit_status, kUsage);
}

}  // namespace
}  // namespace kvpool
