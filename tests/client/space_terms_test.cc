// What rules of access and operators say of spaces, seen through a daemon that runs: who gives memory and who keeps it, while rules are
// read again, and the daemon is killed and upgraded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/upgrade_fixture.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kSharedBlocks = 5;

// What counts for a space.
struct Terms {
  uint32_t limit_blocks = 0, weight = 0, guaranteed_blocks = 0;
  v1::PriorityClass priority = v1::PRIORITY_CLASS_UNSPECIFIED;
  bool operator==(const Terms&) const = default;
};
void PrintTo(const Terms& terms, std::ostream* out) {
  *out << "limit " << terms.limit_blocks << ", weight " << terms.weight << ", guaranteed "
       << terms.guaranteed_blocks << ", " << v1::PriorityClass_Name(terms.priority);
}

class SpaceTermsTest : public UpgradeTest {
 protected:
  // Eight slabs. Engines of tenants a, b and c are of one rule.
  void StartWithRules(const std::string& lines) {
    WriteRules(lines);
    StartWithKeeper({"--access=" + access(), "--policy=lru"});
  }
  std::string access() const { return directory_.path() + "/access.conf"; }
  // The file is replaced as a whole, so that a daemon never reads half of it.
  void WriteRules(const std::string& lines) const {
    std::ofstream(access() + ".new") << "[engines]\nuid = *\nrole = engine, operator\ntenant = a, b, c\n"
                                     << lines;
    std::filesystem::rename(access() + ".new", access());
  }
  // The process that was started is the keeper, which a reload is for.
  void Reload(const std::string& lines) const {
    WriteRules(lines);
    daemon_->Signal(SIGHUP);
  }
  SessionOptions OptionsOf(const std::string& tenant) const {
    SessionOptions options = OptionsFor(daemon_->socket());
    options.tenant = options.client_name = tenant;
    options.fingerprint.set_digest(tenant);
    options.give_back = GiveBack::kAnyTime;
    options.magazine_blocks = 0;
    return options;
  }
  // As long as a slab is on its way to an engine its space gives none, which is a matter of milliseconds.
  std::unique_ptr<Session> OpenOnFullDevice(const SessionOptions& options) {
    absl::StatusOr<std::unique_ptr<Session>> session;
    EXPECT_TRUE(Await([&] {
      session = Session::Open(options);
      return !absl::IsResourceExhausted(session.status());
    })) << session.status();
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  // Computes the next chain of the session, which is cached then.
  void ShareOne(Session* session) { Share(session, KeysOf(*session, ++chains_, kSharedBlocks)); }
  // Until the engine has mapped so many slabs, of which any may be used.
  void Fill(Session* session, uint32_t slabs) {
    const Deadline deadline = Soon();
    while (session->mapped_blocks() < slabs * kSlabBlocks) {
      ASSERT_LT(steady_clock::now(), deadline);
      ASSERT_NO_FATAL_FAILURE(ShareOne(session));
    }
    // What is left of the last slab.
    for (uint32_t i = 0; i < kSlabBlocks / kSharedBlocks; ++i) ASSERT_NO_FATAL_FAILURE(ShareOne(session));
  }
  // It has more use for memory than there is, until this is so.
  void ChurnUntil(Session* session, const std::function<bool()>& is_so) {
    const Deadline deadline = Soon();
    while (!is_so()) {
      ASSERT_LT(steady_clock::now(), deadline) << daemon_->Log();
      for (int i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(ShareOne(session));
    }
  }
  template <typename Is>
  static bool Await(const Is& is) {
    const Deadline deadline = Soon();
    while (!is()) {
      if (steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  // The space of a tenant, by its id, which outlives the daemon.
  uint64_t SpaceOf(const std::string& tenant) const { return InfoOf(tenant).space(); }
  v1::SpaceInfo InfoOf(const std::string& tenant) const {
    const auto listed = Operator()->ListSpaces({});
    EXPECT_TRUE(listed.ok()) << listed.status();
    for (const v1::SpaceInfo& space : listed->spaces()) {
      if (space.tenant() == tenant) return space;
    }
    ADD_FAILURE() << "tenant " << tenant << " has no space";
    return {};
  }
  uint32_t SlabsOf(const std::string& tenant) const { return InfoOf(tenant).slabs(); }
  // A call that sets nothing answers what counts.
  Terms TermsOf(const std::string& tenant) const {
    v1::SetShareRequest request;
    request.set_space(SpaceOf(tenant));
    request.set_keep_guaranteed(true);
    const auto answer = Operator()->SetShare(request);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return {.limit_blocks = answer->limit_blocks(),
            .weight = answer->weight(),
            .guaranteed_blocks = answer->guaranteed_blocks(),
            .priority = answer->priority_class()};
  }
  double Evicted(const std::string& tenant) const {
    return daemon_->Metric("kvpool_evicted_blocks_total", absl::StrCat("space=\"", SpaceOf(tenant), "\""));
  }
  ProgramEnd Ctl(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(),
                     {KVPOOL_KVPOOLCTL, "--socket=" + daemon_->socket(), "--deadline=60s"});
    return RunProgram(arguments);
  }
  // An operator says so of the tenant's space.
  void SetShare(const std::string& tenant, const std::vector<std::string>& flags) const {
    std::vector<std::string> arguments = {"share", absl::StrCat("--space=", SpaceOf(tenant))};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const ProgramEnd end = Ctl(arguments);
    EXPECT_EQ(end.exit_code, 0) << end.output;
  }
  // Another daemon serves, with what this one has left.
  void KillDaemon() const {
    const pid_t killed = DaemonPid();
    ASSERT_EQ(kill(killed, SIGKILL), 0);
    ASSERT_TRUE(Await([&] { return DaemonPid() != killed; }));
  }

 private:
  const TemporaryDirectory directory_;
  uint32_t chains_ = 0;
};

TEST_F(SpaceTermsTest, ARuleThatIsReadAgainMovesMemoryAndAnOperatorStaysOnTop) {
  StartWithRules("priority = interactive\nweight = 5\nspace-blocks = 448\n");
  const auto a = Open(OptionsOf("a"));
  ASSERT_NE(a, nullptr);
  ASSERT_NO_FATAL_FAILURE(Fill(a.get(), 7));
  SessionOptions options = OptionsOf("b");
  options.priority_class = v1::PRIORITY_CLASS_STANDARD;
  const auto b = Open(options);
  ASSERT_NE(b, nullptr);
  ASSERT_NO_FATAL_FAILURE(SetShare("b", {"--priority=standard", "--weight=1", "--limit-blocks=384"}));
  const Terms first{.limit_blocks = 447, .weight = 5, .priority = v1::PRIORITY_CLASS_INTERACTIVE};
  const Terms of_operator{.limit_blocks = 383, .weight = 1, .priority = v1::PRIORITY_CLASS_STANDARD};
  ASSERT_EQ(TermsOf("a"), first);
  ASSERT_EQ(TermsOf("b"), of_operator);
  // It makes do with its own.
  ASSERT_NO_FATAL_FAILURE(ChurnUntil(b.get(), [&] { return Evicted("b") >= 2 * kSlabBlocks; }));
  EXPECT_EQ(SlabsOf("a"), 7u);

  // What is wrong changes nothing, and is named.
  Reload("weight = 9\npriority = urgent\n");
  EXPECT_THAT(daemon_->AwaitInLog("access rules refused"),
              HasSubstr(access() + ":6: [engines] priority = urgent: "));
  ASSERT_EQ(TermsOf("a"), first);

  // Of its seven slabs three are too many now.
  Reload("priority = interactive\nweight = 5\nspace-blocks = 256\n");
  EXPECT_TRUE(Await([&] { return SlabsOf("a") == 4; })) << daemon_->Log();
  EXPECT_EQ(TermsOf("a").limit_blocks, 255u);
  EXPECT_EQ(TermsOf("b"), of_operator);
  EXPECT_THAT(daemon_->AwaitInLog("terms of a space changed"),
              AllOf(HasSubstr("category=audit"), HasSubstr("tenant=a rule=engines"),
                    HasSubstr("old_limit_blocks=448 limit_blocks=256")));

  // Of the lowest class it gives what the other may have.
  Reload("priority = batch\nweight = 1000\n");
  EXPECT_TRUE(Await([&] { return TermsOf("a").priority == v1::PRIORITY_CLASS_BATCH; }));
  ASSERT_NO_FATAL_FAILURE(ChurnUntil(b.get(), [&] { return SlabsOf("b") == 6; }));
  EXPECT_EQ(SlabsOf("a"), 2u);
  EXPECT_EQ(TermsOf("b"), of_operator);
  EXPECT_TRUE(a->status().ok()) << a->status();
  EXPECT_TRUE(b->status().ok()) << b->status();
}

TEST_F(SpaceTermsTest, WhatCountsOutlivesTheDaemonAndRulesAreReadAgainByTheNext) {
  StartWithRules("priority = standard\nweight = 5\nspace-blocks = 320\n");
  const auto a = Open(OptionsOf("a"));
  ASSERT_NE(a, nullptr);
  ASSERT_NO_FATAL_FAILURE(Fill(a.get(), 5));
  const auto b = Open(OptionsOf("b"));
  ASSERT_NE(b, nullptr);
  ASSERT_NO_FATAL_FAILURE(SetShare("b", {"--priority=interactive", "--guaranteed-blocks=10"}));
  const Terms of_rule{.limit_blocks = 319, .weight = 5, .priority = v1::PRIORITY_CLASS_STANDARD};
  const Terms of_operator{
      .limit_blocks = 319, .weight = 5, .guaranteed_blocks = 10, .priority = v1::PRIORITY_CLASS_INTERACTIVE};
  ASSERT_NO_FATAL_FAILURE(KillDaemon());
  EXPECT_EQ(TermsOf("a"), of_rule);
  EXPECT_EQ(TermsOf("b"), of_operator);
  // It knows by which rule the space was opened, and that is what the file says now.
  Reload("priority = batch\nspace-blocks = 128\n");
  EXPECT_TRUE(Await([&] { return SlabsOf("a") == 2; })) << daemon_->Log();
  EXPECT_EQ(TermsOf("a"), (Terms{.limit_blocks = 127, .weight = 1, .priority = v1::PRIORITY_CLASS_BATCH}));
  EXPECT_EQ(TermsOf("b").priority, v1::PRIORITY_CLASS_INTERACTIVE);
  // A file that changes while no daemon is there counts from the start on.
  const pid_t killed = DaemonPid();
  ASSERT_EQ(kill(killed, SIGKILL), 0);
  Reload("priority = interactive\nweight = 3\nspace-blocks = 256\n");
  ASSERT_TRUE(Await([&] { return DaemonPid() != killed; }));
  EXPECT_TRUE(Await([&] { return TermsOf("a").limit_blocks == 255; })) << daemon_->Log();
  EXPECT_EQ(TermsOf("a").weight, 3u);
  // And one that changed without a word to anybody.
  WriteRules("weight = 4\n");
  ASSERT_NO_FATAL_FAILURE(KillDaemon());
  EXPECT_EQ(TermsOf("a").weight, 4u);
  EXPECT_EQ(TermsOf("b").guaranteed_blocks, 10u);
  EXPECT_TRUE(a->status().ok()) << a->status();
  EXPECT_TRUE(b->status().ok()) << b->status();
}

// A reload may come at any moment of it: the last file counts.
TEST_F(SpaceTermsTest, RulesThatAreReadAgainDuringAnUpgradeCount) {
  StartWithRules("weight = 1\n");
  const auto a = Open(OptionsOf("a"));
  ASSERT_NE(a, nullptr);
  ShareOne(a.get());
  uint32_t weight = 1;
  for (int round = 0; round < 5; ++round) {
    absl::StatusOr<v1::UpgradeInfo> info = absl::UnknownError("");
    std::atomic<bool> done{false};
    std::thread upgrade([&] {
      info = Upgrade();
      done = true;
    });
    while (!done) {
      weight = weight % 1000 + 1;
      Reload(absl::StrCat("weight = ", weight, "\n"));
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + round));
    }
    upgrade.join();
    ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
    EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE) << info->reason();
    EXPECT_TRUE(Await([&] { return TermsOf("a").weight == weight; }))
        << "round " << round << ": " << TermsOf("a").weight << " is not " << weight << daemon_->Log();
  }
  EXPECT_TRUE(a->status().ok()) << a->status();
}

TEST_F(SpaceTermsTest, AnInteractiveEngineHasTheMemoryOfABatchOneWhichHasItsGuaranteeAlone) {
  StartWithRules("priority = interactive\n");
  SessionOptions options = OptionsOf("a");
  options.priority_class = v1::PRIORITY_CLASS_BATCH;
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  ASSERT_NO_FATAL_FAILURE(Fill(a.get(), 8));
  ASSERT_EQ(SlabsOf("a"), 8u);
  // It is let in though all is in use, and grows.
  const auto b = OpenOnFullDevice(OptionsOf("b"));
  ASSERT_NE(b, nullptr);
  ASSERT_NO_FATAL_FAILURE(ChurnUntil(b.get(), [&] { return SlabsOf("b") == 7; }));
  EXPECT_EQ(SlabsOf("a"), 1u);
  // What it takes back is nothing, however much it asks.
  const double before = Evicted("a");
  ASSERT_NO_FATAL_FAILURE(ChurnUntil(a.get(), [&] { return Evicted("a") >= before + 4 * kSlabBlocks; }));
  EXPECT_EQ(SlabsOf("b"), 7u);
  options = OptionsOf("c");
  options.priority_class = v1::PRIORITY_CLASS_BATCH;
  const auto refused = Session::Open(options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("it is of class interactive, above batch"));
  EXPECT_EQ(SlabsOf("b"), 7u);
  // With the null block and its sink it needs two slabs.
  options.guaranteed_blocks = 100;
  const auto c = OpenOnFullDevice(options);
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(SlabsOf("b"), 5u);
  EXPECT_EQ(SlabsOf("c"), 2u);
  auto all = c->LeaseWithin(100, Soon());
  EXPECT_TRUE(all.ok()) << all.status();
  all->Release();
  // An operator turns it round while all of them work.
  ASSERT_NO_FATAL_FAILURE(SetShare("b", {"--priority=batch"}));
  ASSERT_NO_FATAL_FAILURE(SetShare("a", {"--priority=interactive"}));
  ASSERT_NO_FATAL_FAILURE(ChurnUntil(a.get(), [&] { return SlabsOf("b") == 1; }));
  EXPECT_EQ(SlabsOf("c"), 2u) << "100 blocks are promised to it";
  for (const Session* session : {a.get(), b.get(), c.get()})
    EXPECT_TRUE(session->status().ok()) << session->status();
}

TEST_F(SpaceTermsTest, RefusalsNameFieldValueAndLimit) {
  StartWithRules("priority = standard\nspace-blocks = 128\n");
  SessionOptions options = OptionsOf("a");
  options.priority_class = v1::PRIORITY_CLASS_INTERACTIVE;
  const auto refused = Session::Open(options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("priority_class is interactive; rule [engines] gives priority = standard"));
  const auto a = Open(OptionsOf("a"));
  ASSERT_NE(a, nullptr);
  const Terms before = TermsOf("a");
  const std::string space = absl::StrCat("--space=", SpaceOf("a"));
  const struct {
    std::vector<std::string> flags;
    std::string says;
  } kCases[] = {
      {{space, "--priority=urgent"}, "--priority is urgent; must be batch, standard, interactive or rule"},
      {{space, "--weight=1001"}, "1001"},
      {{space, "--guaranteed-blocks=128"},
       absl::StrCat("guaranteed_blocks is 128; space ", SpaceOf("a"),
                    " can have at most 127 with the limit 128")},
      {{space}, "share needs --guaranteed-blocks=N, --limit-blocks=N, --weight=N or --priority=CLASS"},
      {{"--space=99", "--priority=batch"}, "space 99 is not open"},
  };
  for (const auto& refusal : kCases) {
    std::vector<std::string> arguments = {"share"};
    arguments.insert(arguments.end(), refusal.flags.begin(), refusal.flags.end());
    const ProgramEnd end = Ctl(arguments);
    EXPECT_NE(end.exit_code, 0) << end.output;
    EXPECT_THAT(end.output, HasSubstr(refusal.says));
  }
  EXPECT_EQ(TermsOf("a"), before);
}

}  // namespace
}  // namespace kvpool
