// A daemon with a keeper gives way to another program, under its engines: no verb fails, and what can't take over does not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/space/space_table.h"
#include "tests/client/upgrade_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(UpgradeTest, SessionsGoOnAndWhatIsCachedIsFound) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8), marks = KeysOf(*session, 2, 4);
  Share(session.get(), keys);
  auto mine = session->LeaseWithin(4, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  for (size_t i = 0; i < 4; ++i) Stamp(session->data((*mine)[i]), marks[i]);
  std::set<pid_t> daemons = {DaemonPid()};
  for (int i = 0; i < 5; ++i) {
    const auto info = Upgrade();
    ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
    EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE) << info->reason();
    EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
    EXPECT_TRUE(daemons.insert(DaemonPid()).second);
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(HasStamp(session->data((*mine)[i]), marks[i])) << i;
  EXPECT_TRUE(session->status().ok()) << session->status();
  const std::string log = daemon_->AwaitInLog("method=Upgrade");
  EXPECT_THAT(log, Not(HasSubstr("daemon ended"))) << "an upgrade counts as a death";
  EXPECT_THAT(log, Not(HasSubstr("session not resumed")));
  EXPECT_THAT(log, HasSubstr("operator call category=audit method=Upgrade"));
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
}

TEST_F(UpgradeTest, TheNextDaemonHasTheTiersOfItsFlagsAndThatIsSaid) {
  StartWithKeeper({"--tier=host:capacity=4MiB"});
  const std::string spec = "file:" + daemon_->directory() + "/tier,capacity=64MiB";
  v1::AttachTierRequest attach;
  attach.set_spec(spec);
  attach.set_timeout_ms(50000);
  ASSERT_TRUE(Operator()->AttachTier(attach).ok());
  const auto before = Operator()->Upgrade({});
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_THAT(before->tier_changes(), testing::ElementsAre("it does not have " + spec));
  ASSERT_TRUE(Operator()->AwaitAfter(before->daemon_epoch(), absl::Now() + absl::Seconds(60)).ok());
  const auto tiers = Operator()->ListTiers({});
  ASSERT_TRUE(tiers.ok()) << tiers.status();
  ASSERT_EQ(tiers->tiers_size(), 1);
  EXPECT_EQ(tiers->tiers(0).tier(), "host");
  EXPECT_THAT(daemon_->AwaitInLog("the next daemon has other tiers"), HasSubstr("it does not have " + spec));
}

// More of them than deaths that a keeper forgives.
TEST_F(UpgradeTest, IsNoDeath) {
  StartWithKeeper({"--keeper-deaths=2"});
  for (int i = 0; i < 4; ++i) {
    const auto info = Upgrade();
    ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
    EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE);
  }
}

TEST_F(UpgradeTest, WhatIsUnderWayIsAnswered) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0}, rounds{0};
  std::thread engine([&] {
    for (uint32_t seed = 10; !stop; ++seed, ++rounds) {
      const std::vector<PrefixKey> keys = KeysOf(*session, seed % 40, 3);
      auto blocks = session->LeaseWithin(3, Soon());
      if (!blocks.ok()) {
        ++failed;
        ADD_FAILURE() << "lease: " << blocks.status();
        break;
      }
      for (size_t i = 0; i < keys.size(); ++i) Stamp(session->data((*blocks)[i]), keys[i]);
      auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
      const auto outcome = seal.ok() ? seal->Wait(Soon()) : seal.status();
      if (!outcome.ok() || !outcome->refused.empty()) {
        ++failed;
        ADD_FAILURE() << "seal: "
                      << (outcome.ok() ? outcome->refused[0].message() : outcome.status().ToString());
      }
      blocks->Release();
    }
  });
  for (int i = 0; i < 5; ++i) {
    const auto info = Upgrade();
    EXPECT_TRUE(info.ok()) << info.status() << daemon_->Log();
    for (const int enough = rounds + 20; rounds < enough && failed == 0;) std::this_thread::yield();
  }
  stop = true;
  engine.join();
  EXPECT_EQ(failed, 0) << session->status() << daemon_->Log();
}

TEST_F(UpgradeTest, AProgramThatDoesNotServeIsReplacedByTheOneBefore) {
  StartWithKeeper({"--reattach-timeout=8s"});
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  const std::string fails = CopyOf(KVPOOL_UPGRADE_STUB, "fails"),
                    hangs = CopyOf(KVPOOL_UPGRADE_STUB, "hangs");
  auto info = UpgradeTo(fails);
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_FAILED);
  EXPECT_THAT(info->reason(), HasSubstr("ended with status 3"));
  EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
  info = UpgradeTo(hangs);
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_FAILED);
  EXPECT_THAT(info->reason(), HasSubstr("did not serve within 4000 ms"));
  EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
  EXPECT_THAT(daemon_->AwaitInLog("upgrade failed"), HasSubstr("upgrade failed"));
  // What was before is what is upgraded next.
  info = Upgrade();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE);
  EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
}

TEST_F(UpgradeTest, TheFileThatIsAtThePathTakesOver) {
  StartWithKeeper();
  const std::string next = CopyOf(DaemonProcess::Program(), "next");
  auto info = UpgradeTo(next);
  ASSERT_TRUE(info.ok()) << info.status();
  const auto running = [this] {
    return std::filesystem::read_symlink(absl::StrCat("/proc/", DaemonPid(), "/exe")).string();
  };
  EXPECT_EQ(running(), next);
  // As a package does it: the old file is gone, but runs.
  CopyOf(DaemonProcess::Program(), "newer");
  std::filesystem::rename(daemon_->directory() + "/newer", next);
  EXPECT_EQ(running(), next + " (deleted)");
  info = Upgrade();
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE);
  EXPECT_EQ(running(), next);
}

TEST_F(UpgradeTest, WhatMayNotRunIsRefused) {
  StartWithKeeper();
  EXPECT_THAT(RefusalOf("bin/kvpoold"), HasSubstr("must be an absolute path"));
  EXPECT_THAT(RefusalOf("/nonexistent"), HasSubstr("cannot open it"));
  EXPECT_THAT(RefusalOf("/tmp"), HasSubstr("is no executable file"));
  EXPECT_THAT(RefusalOf("/bin/sh"), HasSubstr("is no kvpoold"));
  const std::string stub = CopyOf(KVPOOL_UPGRADE_STUB, "stub");
  ASSERT_EQ(chmod(stub.c_str(), 0775), 0);
  EXPECT_THAT(RefusalOf(stub), HasSubstr("has mode 0775: others may write to it"));
  ASSERT_EQ(chmod(stub.c_str(), 0644), 0);
  EXPECT_THAT(RefusalOf(stub), HasSubstr("is no executable file"));
  if (geteuid() == 0) {
    ASSERT_EQ(chmod(stub.c_str(), 0755), 0);
    ASSERT_EQ(chown(stub.c_str(), 4242, 0), 0);
    EXPECT_THAT(RefusalOf(stub), HasSubstr("belongs to uid 4242; must be root's, or uid 0's"));
  }
}

TEST_F(UpgradeTest, AProgramOfAnotherVersionIsRefusedAndBothAreNamedUnlessItStartsCold) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  std::string program = TextOf(DaemonProcess::Program());
  const size_t mark = program.find("kvpoold takes over from");
  ASSERT_NE(mark, std::string::npos);
  // Behind the mark's 24 bytes come the version of the keeper's frames, that of the state, and the oldest state that is read.
  program[mark + 28] = program[mark + 32] = 99;
  const std::string path = CopyOf(KVPOOL_UPGRADE_STUB, "other");
  std::ofstream(path, std::ios::binary | std::ios::trunc) << program;
  EXPECT_THAT(RefusalOf(path), HasSubstr("reads versions 99 to 99 of the state; what is kept has version "));
  EXPECT_EQ(Found(session.get(), keys), 8u);
  const auto write = [&](uint32_t version, uint32_t oldest) {
    program[mark + 28] = static_cast<char>(version);
    program[mark + 32] = static_cast<char>(oldest);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << program;
  };
  // The one before may be able to: what is kept says from which version on.
  write(kOldestTableReader - 1, kOldestTableReader - 1);
  EXPECT_THAT(RefusalOf(path), HasSubstr(absl::StrCat("reads versions ", kOldestTableReader - 1, " to ",
                                                      kOldestTableReader - 1, " of the state")));
  write(kSpaceTableVersion + 1, kSpaceTableVersion + 1);
  EXPECT_THAT(RefusalOf(path), HasSubstr("of the state"));
  write(kSpaceTableVersion + 1, kSpaceTableVersion);
  v1::UpgradeRequest to_next;
  to_next.set_binary(path);
  const auto next = Upgrade(to_next);
  ASSERT_TRUE(next.ok()) << next.status() << daemon_->Log();
  EXPECT_EQ(next->outcome(), v1::UPGRADE_OUTCOME_DONE);
  EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
  write(99, 99);
  v1::UpgradeRequest request;
  request.set_binary(path);
  request.set_cold(true);
  const auto info = Upgrade(request);
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE);
  EXPECT_FALSE(session->LeaseWithin(session->most_leased_blocks(), Soon()).ok());
  const auto stats = Operator()->GetStats({});
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->spaces(), 0u);
  program[mark + 24] = 99;
  std::ofstream(path + "er", std::ios::binary) << program;
  ASSERT_EQ(chmod((path + "er").c_str(), 0755), 0);
  request.set_binary(path + "er");
  EXPECT_THAT(Refusal(request), HasSubstr("speaks version 99 with its keeper"));
}

// One of before takes its locks before it asks the keeper, and binds for itself.
TEST_F(UpgradeTest, OnlyAProgramThatTakesThePlaceOverFindsIt) {
  StartWithKeeper();
  const auto sockets = [this] {
    struct stat socket, attach_socket;
    EXPECT_EQ(lstat(daemon_->socket().c_str(), &socket), 0);
    EXPECT_EQ(lstat(daemon_->attach_socket().c_str(), &attach_socket), 0);
    return std::make_pair(socket.st_ctim.tv_nsec, attach_socket.st_ctim.tv_nsec);
  };
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  const auto first = sockets();
  ASSERT_TRUE(Upgrade().ok());
  EXPECT_EQ(sockets(), first);

  std::string program = TextOf(DaemonProcess::Program());
  const size_t mark = program.find("kvpoold takes over from");
  ASSERT_NE(mark, std::string::npos);
  const size_t place = program.find("+ place.", mark);
  ASSERT_LT(place, mark + 64);
  program[place] = '-';
  const std::string path = CopyOf(KVPOOL_UPGRADE_STUB, "before");
  std::ofstream(path, std::ios::binary | std::ios::trunc) << program;
  const auto info = UpgradeTo(path);
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE) << info->reason() << daemon_->Log();
  EXPECT_NE(sockets(), first);
  EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
}

// Of a cold start that fails all comes back.
TEST_F(UpgradeTest, AColdStartThatFailsLosesNothing) {
  StartWithKeeper();
  auto session = Open();
  ASSERT_NE(session, nullptr);
  const std::vector<PrefixKey> keys = KeysOf(*session, 1, 8);
  Share(session.get(), keys);
  v1::UpgradeRequest request;
  request.set_binary(CopyOf(KVPOOL_UPGRADE_STUB, "fails"));
  request.set_cold(true);
  const auto info = Upgrade(request);
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_FAILED);
  EXPECT_EQ(Found(session.get(), keys), 8u) << daemon_->Log();
}

TEST_F(UpgradeTest, IsRefusedByADaemonThatWasAskedToEnd) {
  StartWithKeeper({"--shutdown-grace=60s"});
  auto session = Open();
  ASSERT_NE(session, nullptr);
  kill(DaemonPid(), SIGTERM);
  EXPECT_THAT(daemon_->AwaitInLog("shutting down"), HasSubstr("shutting down"));
  EXPECT_THAT(Refusal({}), HasSubstr("this process was asked to end"));
  // Engines are answered, so that it can end.
  EXPECT_TRUE(session->Close(Soon()).ok());
  EXPECT_EQ(daemon_->End(0), 0);
}

TEST_F(UpgradeTest, NeedsAKeeper) {
  StartDaemon();
  EXPECT_THAT(Refusal({}), HasSubstr("an upgrade needs --keeper=on"));
}

TEST_F(UpgradeTest, IsRefusedIfTheProgramOfTodayCouldNotComeBack) {
  const TemporaryDirectory directory;
  const std::string config = directory.path() + "/kvpoold.conf";
  std::ofstream(config) << "pin-budget = 0.5\n";
  StartWithKeeper({"--config=" + config});
  std::ofstream(config) << "\npin-budget = much\n";
  EXPECT_THAT(Refusal({}),
              HasSubstr("could not start again, if the next one failed: " + config + ":2: --pin-budget"));
  std::ofstream(config) << "pin-budget = 0.4\n";
  const auto info = Upgrade();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE);
}

// A scheduler whose rank has not joined is not ready, and would be gone.
TEST_F(UpgradeTest, IsRefusedIfASessionCouldNotComeBackUnlessThatIsMeant) {
  StartWithKeeper({"--device=host,host"});
  SessionOptions options = RankOptions(0);
  options.role.set_scheduler(true);
  auto scheduler = Open(options);
  ASSERT_NE(scheduler, nullptr);
  EXPECT_THAT(Refusal({}), HasSubstr("some sessions could not come back, and nothing has changed: session 1 "
                                     "(session_test): not all of its members have joined"));
  EXPECT_TRUE(scheduler->status().ok()) << scheduler->status();
  v1::UpgradeRequest request;
  request.set_end_sessions(true);
  const auto info = Upgrade(request);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE);
  EXPECT_THAT(daemon_->AwaitInLog("session not resumed"), HasSubstr("session not resumed"));
}

// Whom a rule makes an operator has the daemon started again, but names no program for it to run.
TEST_F(UpgradeTest, OnlyRootAndTheDaemonsUserNameAProgram) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  const TemporaryDirectory directory;
  const std::string access = directory.path() + "/access.conf";
  std::ofstream(access) << "[operators]\nuid = *\nrole = operator\n";
  StartWithKeeper({"--access=" + access});
  std::filesystem::permissions(daemon_->directory(), std::filesystem::perms(0755));
  const auto upgrade = [this](const std::string& flag) {
    return RunProgram({"/usr/bin/setpriv", "--reuid=54321", "--regid=0", "--clear-groups", KVPOOL_KVPOOLCTL,
                       "--socket=" + daemon_->socket(), "upgrade", flag});
  };
  const ProgramEnd named = upgrade("--binary=" + DaemonProcess::Program());
  EXPECT_EQ(named.exit_code, 1) << named.output;
  EXPECT_THAT(named.output, HasSubstr("only root and uid 0, as which the daemon runs, may name a program"));
  const ProgramEnd unnamed = upgrade("--timeout=1m");
  EXPECT_EQ(unnamed.exit_code, 0) << unnamed.output << daemon_->Log();
  EXPECT_THAT(unnamed.output, HasSubstr("serves in place of"));
}

}  // namespace
}  // namespace kvpool
