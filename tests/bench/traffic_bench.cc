// Verbs of an engine whose blocks are resident, beside one whose blocks go down to files and come up again at a fixed rate. Both
// are engines of one daemon, in spaces of their own. Slices with the traffic and without take turns: without, the other engine says as
// much, of blocks that are below already and need not come up.
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/layouts.h"
#include "client/session.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"
#include "tests/bench/pairs.h"
#include "tests/bench/raw_session.h"
#include "tests/support/daemon_process.h"

namespace kvpool::bench {
namespace {

using std::chrono::steady_clock;

constexpr double kBytesPerSecond = 200e6;  // Half of them go down.
constexpr uint64_t kLargeBlockBytes = 1 << 20;
constexpr uint32_t kTickBlocks = 5;  // So many go down, and so many come up.
constexpr uint32_t kPoolBlocks = 127;
// What came up was sealed so many ticks ago, and has left the pool since.
constexpr uint64_t kTicksBack = 2 * kPoolBlocks / kTickBlocks;
// 150 ticks: both kinds of slices look back at most 100.
constexpr auto kWarmUp = std::chrono::seconds(8);

class Traffic {
 public:
  // All that the engine does is done on `cpu`, unless it is negative.
  Traffic(const std::string& socket, int cpu)
      : thread_([this, socket, cpu] {
          if (cpu >= 0) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cpu, &set);
            KVPOOL_CHECK(sched_setaffinity(0, sizeof(set), &set) == 0, "sched_setaffinity: cpu %d", cpu);
          }
          Run(socket);
        }) {}
  ~Traffic() {
    stop_ = true;
    thread_.join();
  }
  // False: from now on nothing goes down and comes up but what is under way.
  void Set(bool on) { on_ = on; }
  uint64_t blocks_up() const { return blocks_up_; }
  uint64_t blocks_asked() const { return blocks_asked_; }

 private:
  void Run(const std::string& socket) {
    SessionOptions options = EngineOptions(socket);
    options.layout = OpaqueLayout({.block_bytes = kLargeBlockBytes, .tokens_per_block = kTokensPerBlock});
    options.fingerprint.set_digest("blocks that come and go");
    options.magazine_blocks = 0;
    const std::unique_ptr<Session> session = OpenSession(options);
    const auto period = std::chrono::duration_cast<steady_clock::duration>(
        std::chrono::duration<double>(2.0 * kTickBlocks * kLargeBlockBytes / kBytesPerSecond));
    for (auto next = steady_clock::now(); !stop_; std::this_thread::sleep_until(next)) {
      next += period;
      if (on_) {
        Seal(session.get(), Keys(tick_++));
        if (tick_ <= kTicksBack) continue;
        blocks_asked_ += kTickBlocks;
        blocks_up_ += Match(session.get(), Keys(tick_ - kTicksBack));
      } else {
        const std::string keys = Keys(tick_ - 2 * kTicksBack + again_++ % kTicksBack);
        Seal(session.get(), keys);
        Match(session.get(), keys);
      }
    }
  }
  static std::string Keys(uint64_t tick) {
    std::string keys;
    for (uint32_t i = 0; i < kTickBlocks; ++i) keys += KeyOf(tick * kTickBlocks + i);
    return keys;
  }
  static void Seal(Session* session, const std::string& keys) {
    auto blocks = session->LeaseWithin(kTickBlocks, Patience());
    Check(blocks.status());
    auto seal = session->Seal({.blocks = blocks->refs(), .keys = keys});
    Check(seal.status());
    Check(seal->Wait(Patience()).status());
  }
  // How many are found.
  static size_t Match(Session* session, const std::string& keys) {
    auto match = session->Match(keys, {.wait_ms = 1000});
    Check(match.status());
    const auto hit = match->Wait(Patience());
    Check(hit.status());
    return hit->groups[0].size();
  }

  uint64_t tick_ = 0, again_ = 0;
  std::atomic<bool> on_{true}, stop_{false};
  std::atomic<uint64_t> blocks_up_{0}, blocks_asked_{0};
  std::thread thread_;  // It uses the others.
};

// An engine's verbs of blocks that are there.
class Resident {
 public:
  explicit Resident(const std::string& socket) : session_(socket, StepBy::kFrames) {
    v1::StepRequest request = session_.NextBatch();
    const v1::StepResponse response = session_.Say(request);
    session_.Take(response);
    for (const v1::Operation& operation : request.operations()) {
      if (operation.has_seal()) keys_.push_back(operation.seal().keys());
    }
  }
  double Lease() {
    const auto start = steady_clock::now();
    session_.LeaseAndRelease(1);
    return UsSince(start);
  }
  // A prefix of blocks that were sealed, and they are given back.
  double Match() {
    v1::StepRequest request = session_.Begin();
    for (const std::string& key : keys_) Ask(key, &request);
    const auto start = steady_clock::now();
    const v1::StepResponse response = session_.Say(request);
    const double us = UsSince(start);
    GiveBack(response);
    return us;
  }
  // What a step of many sequences has: each matches a block, and leases one.
  double Step() {
    v1::StepRequest request = session_.Begin();
    for (const std::string& key : keys_) {
      Ask(key, &request);
      request.add_operations()->mutable_lease()->set_count(1);
    }
    if (!held_.empty())
      request.add_operations()->mutable_release()->mutable_blocks()->Add(held_.begin(), held_.end());
    const auto start = steady_clock::now();
    const v1::StepResponse response = session_.Say(request);
    const double us = UsSince(start);
    held_ = Blocks(response);
    return us;
  }

 private:
  static void Ask(const std::string& key, v1::StepRequest* request) {
    v1::GroupKeys& asked = *request->add_operations()->mutable_match()->add_groups();
    asked.set_key_bytes(32);
    asked.set_keys(key);
  }
  std::vector<uint64_t> Blocks(const v1::StepResponse& response) {
    std::vector<uint64_t> blocks;
    size_t matched = 0;
    for (const v1::OperationResult& result : response.results()) {
      KVPOOL_CHECK(result.code() == 0, "%s", result.message().c_str());
      blocks.insert(blocks.end(), result.lease().blocks().begin(), result.lease().blocks().end());
      if (!result.has_match()) continue;
      const auto& hit = result.match().groups(0).blocks();
      blocks.insert(blocks.end(), hit.begin(), hit.end());
      matched += static_cast<size_t>(hit.size());
    }
    KVPOOL_CHECK(matched == keys_.size(), "%zu of %zu blocks found", matched, keys_.size());
    return blocks;
  }
  void GiveBack(const v1::StepResponse& response) {
    v1::StepRequest request = session_.Begin();
    const std::vector<uint64_t> blocks = Blocks(response);
    request.add_operations()->mutable_release()->mutable_blocks()->Add(blocks.begin(), blocks.end());
    session_.Say(request);
  }
  RawSession session_;
  std::vector<std::string> keys_;
  std::vector<uint64_t> held_;
};

struct Verb {
  const char* name;
  double (Resident::*once)();
};
constexpr std::array<Verb, 3> kVerbs = {
    {{"Lease and Release", &Resident::Lease}, {"Match", &Resident::Match}, {"Step", &Resident::Step}}};
constexpr std::array<double, 2> kShares = {.5, .99};

// Percent more that each share of each verb takes beside the traffic, a pair of slices each.
using Losses = std::array<std::array<std::vector<double>, kShares.size()>, kVerbs.size()>;

struct Placement {
  const char* name;
  int verbs, tiers;  // CPUs; negative: all are for all.
};

struct Measured {
  Losses losses;
  double bytes_per_second = 0, found = 0;
};

Measured Measure(const Placement& placement, const std::string& folder) {
  // Of a share of 1 % there are some hundred verbs then.
  constexpr auto kSlice = std::chrono::milliseconds(500);
  const auto daemon =
      StartDaemon("256MiB", "128MiB",
                  {"--policy=lru", absl::StrCat("--tier=file:", folder, ",capacity=1GiB,write=seal")});
  const bool apart = placement.verbs >= 0;
  std::unique_ptr<Pinned> client, server;
  if (apart) {
    client = std::make_unique<Pinned>(getpid(), placement.verbs);
    server = std::make_unique<Pinned>(daemon->pid(), placement.verbs);
    KVPOOL_CHECK(server->PinThreads("tier-mover", placement.tiers) == 1, "no tier-mover");
    KVPOOL_CHECK(server->PinThreads("file-tier", placement.tiers) > 0, "no file-tier");
  }
  Resident resident(daemon->socket());
  Traffic traffic(daemon->socket(), placement.tiers);
  Measured measured;
  // Files that are made, and blocks that are not below yet, are no part of it.
  std::this_thread::sleep_for(kWarmUp);
  const uint64_t up = traffic.blocks_up(), asked = traffic.blocks_asked();
  double flowed_bytes = 0, flowed_seconds = 0;
  for (int pair = 0; pair < kPairs; ++pair) {
    double us[2][kVerbs.size()][kShares.size()];
    for (const int with : {pair % 2, 1 - pair % 2}) {
      traffic.Set(with == 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
      const double bytes = daemon->Metric("kvpool_tier_bytes_total");
      const auto start = steady_clock::now();
      for (size_t verb = 0; verb < kVerbs.size(); ++verb) {
        std::vector<double> took;
        for (const auto end = steady_clock::now() + kSlice; steady_clock::now() < end;) {
          took.push_back((resident.*kVerbs[verb].once)());
        }
        for (size_t share = 0; share < kShares.size(); ++share) {
          us[with][verb][share] = Percentile(took, kShares[share]);
        }
      }
      if (with == 0) continue;
      flowed_seconds += UsSince(start) * 1e-6;
      flowed_bytes += daemon->Metric("kvpool_tier_bytes_total") - bytes;
    }
    for (size_t verb = 0; verb < kVerbs.size(); ++verb) {
      for (size_t share = 0; share < kShares.size(); ++share) {
        measured.losses[verb][share].push_back(100 * (us[1][verb][share] / us[0][verb][share] - 1));
      }
    }
  }
  measured.bytes_per_second = flowed_bytes / flowed_seconds;
  measured.found =
      static_cast<double>(traffic.blocks_up() - up) / static_cast<double>(traffic.blocks_asked() - asked);
  return measured;
}

}  // namespace

void BenchTraffic(Figures* figures) {
  const std::vector<int> cpus = UsableCpus();
  const TemporaryDirectory folder;
  figures->Note(absl::StrCat("a space of ", kPoolBlocks, " blocks of 1 MiB, of which ", kTickBlocks,
                             " are sealed and ", kTickBlocks, " come up at a time; ", kPairs,
                             " pairs of slices with that traffic and without"));
  for (const Placement& placement :
       {Placement{.name = "tiers on a core of their own", .verbs = cpus[0], .tiers = cpus[cpus.size() - 1]},
        Placement{.name = "all on all cores", .verbs = -1, .tiers = -1}}) {
    const bool apart = placement.verbs >= 0;
    if (apart && cpus.size() < 2) {
      figures->Skip(placement.name, "there is one core");
      continue;
    }
    const Measured measured = Measure(placement, absl::StrCat(folder.path(), "/", apart));
    figures->Add(absl::StrCat("traffic, ", placement.name), measured.bytes_per_second * 1e-6, "MB/s");
    figures->Add(absl::StrCat("of it found below, ", placement.name), measured.found, "");
    for (size_t verb = 0; verb < kVerbs.size(); ++verb) {
      for (size_t share = 0; share < kShares.size(); ++share) {
        const std::string name =
            absl::StrCat(kVerbs[verb].name, ", p", 100 * kShares[share], ", ", placement.name);
        const std::vector<double>& losses = measured.losses[verb][share];
        figures->Add(absl::StrCat(name, ": loss"), Percentile(losses, .5), "%",
                     apart ? std::optional<Bound>(AtMost(3)) : std::nullopt);
        figures->Add(absl::StrCat(name, ": upper end"), UpperEnd(losses), "%");
      }
    }
  }
}

}  // namespace kvpool::bench
