// How long a million cached blocks are away when the daemon is killed, with a keeper, and how long an engine's verbs wait when
// another program takes over.
//
// An engine asks for one key over and over again; while the daemon is gone nothing is found. What counts of a kill is the time
// from the SIGKILL to the first match that finds its block, and how much of it the recovery of the table took, as the daemon's
// log has it; of an upgrade, how long the slowest verb took that was said before it was over.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/tools/operator_client.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kKills = 20, kUpgrades = 50;
constexpr double kMostRecoveryMs = 200;
constexpr double kMostGapMs = 1000;
constexpr double kMostAnswerMs = 250;

// The daemon's pid, as kvpoold.json has it; 0: none serves.
pid_t ServingPid(const DaemonProcess& daemon) {
  std::ifstream file(daemon.directory() + "/kvpoold.json");
  std::stringstream text;
  text << file.rdbuf();
  const size_t at = text.str().find("\"pid\":");
  return at == std::string::npos ? 0 : atoi(text.str().c_str() + at + 6);
}

// The daemon serves before it says so in its file, and is back for a session before that.
pid_t AwaitServing(const DaemonProcess& daemon) {
  for (const auto deadline = Patience(); Clock::now() < deadline;) {
    if (const pid_t pid = ServingPid(daemon); pid > 0) return pid;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 0;
}

std::vector<double> RecoveriesIn(const std::string& log) {
  constexpr std::string_view kField = "recovery_ms=";
  std::vector<double> ms;
  for (size_t at = 0; (at = log.find(kField, at)) != std::string::npos;) {
    at += kField.size();
    ms.push_back(atof(log.c_str() + at));
  }
  return ms;
}

// The same program takes over from itself, again and again, while the engine leases, releases and asks for what is cached. No
// verb fails, or the bench does.
void BenchUpgrades(const DaemonProcess& daemon, Session* session, Figures* figures) {
  std::atomic<bool> over = false;
  std::thread upgrades([&] {
    auto client = tools::OperatorClient::Open({.socket = daemon.socket(), .deadline = absl::Minutes(1)});
    Check(client.status());
    for (int i = 0; i < kUpgrades; ++i) {
      const auto before = (*client)->Upgrade({});
      Check(before.status());
      const auto after = (*client)->AwaitAfter(before->daemon_epoch(), absl::Now() + absl::Minutes(1));
      Check(after.status());
      KVPOOL_CHECK(after->last_upgrade().outcome() == v1::UPGRADE_OUTCOME_DONE, "an upgrade failed: %s",
                   after->last_upgrade().reason().c_str());
    }
    over = true;
  });
  std::vector<double> lease_ms, match_ms;
  const auto timed = [](std::vector<double>* ms, const auto& verb) {
    const auto begin = Clock::now();
    verb();
    ms->push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  };
  for (uint64_t i = 0; !over; ++i) {
    timed(&lease_ms, [&] {
      // They are given back at the end of the line.
      Check(session->LeaseWithin(1, Patience()).status());
    });
    timed(&match_ms, [&] {
      auto pending = session->Match(KeyOf(i * kChainBlocks % kMillion));
      Check(pending.status());
      Check(pending->Wait(Patience()).status());
    });
  }
  upgrades.join();
  figures->Note(absl::StrCat(kUpgrades, " upgrades under ", lease_ms.size(), " leases and ", match_ms.size(),
                             " matches, none of which failed"));
  figures->Add("an upgrade: longest Match", Percentile(match_ms, 1), "ms", AtMost(kMostAnswerMs));
  figures->Add("an upgrade: longest Lease and Release", Percentile(lease_ms, 1), "ms", AtMost(kMostAnswerMs));
}

}  // namespace

void BenchRestart(Figures* figures) {
  const auto daemon =
      StartDaemon("640MiB", "64MiB",
                  {"--keeper=on", "--keeper-deaths=1000000", "--low-watermark=0", "--high-watermark=0"});
  // The daemon would outlive its keeper.
  const absl::Cleanup end = [&daemon] {
    const pid_t serving = AwaitServing(*daemon);
    daemon->Kill();
    if (serving > 0) kill(serving, SIGKILL);
  };
  const auto session = OpenSession(SmallBlocks(daemon->socket()));
  CacheMillion(session.get());
  std::vector<double> gap_ms;
  for (int i = 0; i < kKills; ++i) {
    const std::string key = KeyOf(uint64_t{kChainBlocks} * i);
    const pid_t serving = AwaitServing(*daemon);
    KVPOOL_CHECK(serving > 0 && kill(serving, SIGKILL) == 0, "no daemon serves");
    const auto begin = Clock::now();
    // Until the engine finds nothing, it is the old daemon that answers.
    bool away = false, found = false;
    while (!found) {
      auto pending = session->Match(key);
      Check(pending.status());
      auto hit = pending->Wait(Patience());
      Check(hit.status());
      away = away || hit->groups[0].size() == 0;
      found = away && hit->groups[0].size() == 1;
    }
    gap_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  // A thread of the daemon's own writes the log; the next kill may take its last line with it.
  std::vector<double> recovery_ms;
  for (const auto deadline = Patience(); recovery_ms.size() < kKills / 2 && Clock::now() < deadline;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    recovery_ms = RecoveriesIn(daemon->Log());
  }
  KVPOOL_CHECK(!recovery_ms.empty(), "no recovery in the log");
  figures->Note(absl::StrCat(kKills, " kills; ", kMillion, " cached blocks in chains of ", kChainBlocks));
  figures->Add("recovery of the table, p50", Percentile(recovery_ms, 0.5), "ms");
  figures->Add("recovery of the table, longest", Percentile(recovery_ms, 1), "ms", AtMost(kMostRecoveryMs));
  figures->Add("SIGKILL to a Match that finds, p50", Percentile(gap_ms, 0.5), "ms");
  figures->Add("SIGKILL to a Match that finds, longest", Percentile(gap_ms, 1), "ms", AtMost(kMostGapMs));
  BenchUpgrades(*daemon, session.get(), figures);
}

}  // namespace kvpool::bench
