// How long a verb waits beside everything else that a daemon does, at a million cached blocks.
//
// One engine, a process of its own (bench_engine.cc), matches one key every millisecond and gives the block back. Beside it
// the daemon is asked for one thing after the other, each over and over again for some seconds: operator calls, openings
// that make 4 GiB of slabs, ends of sessions that hold a million blocks, scrapes. What counts is how much longer a
// Match takes than while nothing else goes on, and how long the mutex of its space was held.
//
// Those who ask run as idle threads: they stand for other machines and for engines with processors of their own, and have
// what the daemon and the one engine leave of this machine's. What they ask for the daemon does as ever.
#include <sched.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tools/operator_client.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPhase = std::chrono::seconds(4);
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr double kMostP99AboveQuietMs = 2;
constexpr double kMostMs = 25;

// Threads and processes that `work` starts are idle ones too. One that is merely nice would still compute for a slice before
// another gets its processor.
void WhereIdle(const std::function<void()>& work) {
  std::thread([&work] {
    const sched_param none{};
    KVPOOL_CHECK(sched_setscheduler(0, SCHED_IDLE, &none) == 0, "sched_setscheduler: %s", strerror(errno));
    work();
  }).join();
}

class Latency {
 public:
  Latency(Figures* figures, const DaemonProcess* daemon) : figures_(figures), daemon_(daemon) {
    KVPOOL_CHECK(engine_.ReadLine() == "ready", "bench_engine is not ready");
  }

  // Measures beside `disturb`, which is done over and over again, at least once.
  void Beside(const std::string& what, const std::function<void()>& disturb) {
    const Holds before = LongHolds();
    engine_.WriteLine();
    int times = 0;
    WhereIdle([&] {
      for (const auto end = Clock::now() + kPhase; times == 0 || Clock::now() < end; ++times) disturb();
    });
    engine_.WriteLine();
    const std::string found = engine_.ReadLine();
    int matches = 0;
    double p99 = 0, longest = 0;
    KVPOOL_CHECK(std::sscanf(found.c_str(), "%d %lf %lf", &matches, &p99, &longest) == 3,
                 "bench_engine says %s", found.c_str());
    figures_->Note(absl::StrCat(what, ": ", times, " times, ", matches, " matches beside it"));
    if (!quiet_p99_ms_) {
      quiet_p99_ms_ = p99;
      figures_->Add(absl::StrCat("Match, p99, ", what), p99, "ms");
    } else {
      figures_->Add(absl::StrCat("Match, p99 above quiet, ", what), p99 - *quiet_p99_ms_, "ms",
                    AtMost(kMostP99AboveQuietMs));
    }
    figures_->Add(absl::StrCat("Match, longest, ", what), longest, "ms", AtMost(kMostMs));
    const Holds after = LongHolds();
    figures_->Add(absl::StrCat("holds above 2 ms of processor time, ", what), after.by_work - before.by_work,
                  "holds", AtMost(0));
    // Those in which the kernel, or a host that runs other machines too, stopped the thread.
    figures_->Add(absl::StrCat("holds above 2 ms of time, ", what), after.by_clock - before.by_clock,
                  "holds");
  }

 private:
  struct Holds {
    double by_work = 0, by_clock = 0;
  };
  // Of one scrape: holds go on between two.
  Holds LongHolds() const {
    const absl::StatusOr<std::string> text = daemon_->Metrics();
    Check(text.status());
    const auto above = [&](const std::string& histogram) {
      return MetricIn(*text, histogram + "_count") - MetricIn(*text, histogram + "_bucket", "le=\"0.002\"");
    };
    return {.by_work = above("kvpool_space_mutex_work_seconds"),
            .by_clock = above("kvpool_space_mutex_hold_seconds")};
  }

  Figures* const figures_;
  const DaemonProcess* const daemon_;
  EngineProcess engine_{{"probe", daemon_->socket(), absl::StrCat(kMillion / kChainBlocks), ""}};
  std::optional<double> quiet_p99_ms_;  // The first phase sets it.
};

}  // namespace

void BenchLatency(Figures* figures) {
  const auto daemon = StartDaemon("5632MiB", "64MiB", {"--metrics-detail=debug"});
  const std::string& socket = daemon->socket();
  auto opened = tools::OperatorClient::Open({.socket = socket, .deadline = absl::Seconds(60)});
  Check(opened.status());
  tools::OperatorClient& operators = **opened;
  SessionOptions options = SmallBlocks(socket);
  options.max_space_bytes = 2 * kMillion * kSmallBlockBytes + (64 << 20);
  const auto session = OpenSession(options);
  CacheMillion(session.get());
  const auto space = operators.ListSpaces({})->spaces(0).space();
  figures->Note(absl::StrCat("a Match of one key a millisecond; ", kMillion, " cached blocks in chains of ",
                             kChainBlocks, "; each disturbance for ", kPhase.count(), " s"));

  Latency latency(figures, daemon.get());
  latency.Beside("quiet", [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  uint64_t evicted_chain = kMillion;
  latency.Beside("evict of a chain by key", [&] {
    v1::EvictRequest request;
    evicted_chain -= kChainBlocks;
    request.set_key(KeyOf(evicted_chain));
    Check(operators.Evict(request).status());
  });
  latency.Beside("lists of spaces, sessions and blocks", [&] {
    Check(operators.ListSpaces({}).status());
    Check(operators.ListSessions({}).status());
    v1::ListBlocksRequest request;
    request.set_space(space);
    request.set_state(v1::BLOCK_STATE_QUARANTINED);
    Check(operators.ListBlocks(request).status());
  });
  latency.Beside("explain", [&] {
    v1::ExplainRequest request;
    request.set_key(KeyOf(63));
    Check(operators.Explain(request).status());
  });
  const char* policies[] = {"lru", "learned"};
  int changes = 0;
  latency.Beside("policy set", [&] {
    v1::SetPolicyRequest request;
    request.set_policy(policies[changes++ % 2]);
    Check(operators.SetPolicy(request).status());
  });
  latency.Beside("scrapes", [&] { Check(daemon->Metrics().status()); });
  int models = 0;
  const int before = operators.ListSessions({})->sessions_size();
  latency.Beside("openings of 4 GiB", [&] {
    EngineProcess engine({"open", socket, absl::StrCat(kMillion), absl::StrCat("model ", ++models)});
    KVPOOL_CHECK(engine.ReadLine() == "ready", "bench_engine is not ready");
    engine.Kill();
    // The next one needs its memory.
    while (operators.ListSessions({})->sessions_size() > before) std::this_thread::sleep_for(kPause);
  });
  latency.Beside("leases and ends of sessions of a million blocks", [&] {
    const auto other = OpenSession(SmallBlocks(socket));
    const std::vector<Blocks> leases = LeaseMillion(other.get());
    Check(other->Close(Patience()));
  });
  SessionOptions of_another = SmallBlocks(socket);
  of_another.tenant = "flooder";
  std::vector<std::unique_ptr<Session>> flooders;
  std::string chain;
  WhereIdle([&] {
    for (int i = 0; i < 8; ++i) flooders.push_back(OpenSession(of_another));
    chain = CacheChain(flooders.front().get());
  });
  latency.Beside("another tenant's matches of 64 keys, 8 streams, 1,024 under way", [&] {
    std::vector<PendingMatch> pending;
    for (int i = 0; i < 1024; ++i) {
      auto match = flooders[static_cast<size_t>(i) % flooders.size()]->Match(chain);
      Check(match.status());
      pending.push_back(*std::move(match));
    }
    for (PendingMatch& match : pending) Check(match.Wait(Patience()).status());
  });
  latency.Beside("another tenant's leases and releases", [&] {
    Check(flooders.front()
              ->LeaseWithin(1024, Patience())
              .status());  // They are given back at the end of the line.
  });
}

}  // namespace kvpool::bench
