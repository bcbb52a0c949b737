// What the client library costs an engine: its magazine, and whole requests.
#include <time.h>

#include <chrono>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/prefix_hasher.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

using Clock = std::chrono::steady_clock;

double ThreadCpuUs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double UsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

}  // namespace

void BenchMagazine(Figures* figures) {
  constexpr int kRounds = 2000, kPairs = 1000;
  const auto daemon = StartDaemon("64MiB", "64MiB");
  SessionOptions options = EngineOptions(daemon->socket());
  options.guaranteed_blocks = 64;
  const auto session = OpenSession(options);
  std::vector<double> ns;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < kPairs; ++i) {
      auto block = session->Lease(1);
      KVPOOL_CHECK(block.ok(), "%s", block.status().ToString().c_str());
    }
    ns.push_back(UsSince(start) * 1e3 / kPairs);
  }
  figures->Note(absl::StrCat("Lease(1) and its release by the handle's destructor; median of ", kRounds,
                             " runs of ", kPairs));
  figures->Add("Lease plus Release of one block, median", Percentile(ns, 0.5), "ns", AtMost(60));
}

void BenchRequest(Figures* figures) {
  constexpr int kRequests = 4000;
  const auto daemon = StartDaemon("256MiB", "64MiB");
  SessionOptions options = EngineOptions(daemon->socket());
  options.magazine_blocks = 512;
  const auto session = OpenSession(options);
  std::vector<double> cpu_us, wait_us, lease_wait_us;
  std::vector<uint32_t> tokens(kRequestBlocks * kTokensPerBlock);
  for (int request = 0; request < kRequests; ++request) {
    std::iota(tokens.begin(), tokens.end(), static_cast<uint32_t>(request) * 10'000);
    const double before_match = ThreadCpuUs();
    const PrefixHasher hasher(session->hash_seed());
    const std::vector<PrefixKey> keys = hasher.Chain(tokens, kTokensPerBlock);
    auto pending = session->Match(KeyBytes(keys));
    double cpu = ThreadCpuUs() - before_match;
    KVPOOL_CHECK(pending.ok(), "%s", pending.status().ToString().c_str());

    const auto asked = Clock::now();
    auto hit = pending->Wait(Patience());
    wait_us.push_back(UsSince(asked));
    KVPOOL_CHECK(hit.ok() && hit->tokens == 0, "a new prompt was found");

    const double before_lease = ThreadCpuUs();
    auto blocks = session->Lease(kRequestBlocks);
    cpu += ThreadCpuUs() - before_lease;
    if (!blocks.ok()) {  // The refill was not quick enough: an engine would serve another request meanwhile.
      const auto short_of = Clock::now();
      blocks = session->LeaseWithin(kRequestBlocks, Patience());
      lease_wait_us.push_back(UsSince(short_of));
      KVPOOL_CHECK(blocks.ok(), "%s", blocks.status().ToString().c_str());
    }
    const double before_seal = ThreadCpuUs();
    {
      auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
      KVPOOL_CHECK(seal.ok(), "%s", seal.status().ToString().c_str());
      blocks->Release();
    }
    cpu += ThreadCpuUs() - before_seal;
    cpu_us.push_back(cpu);
  }
  KVPOOL_CHECK(session->Flush(Patience()).ok() && session->counters().refused == 0,
               "the daemon refused blocks");
  const double mean = std::accumulate(cpu_us.begin(), cpu_us.end(), 0.0) / kRequests;
  figures->Note(absl::StrCat("", kRequests,
                             " prompts of 1024 new tokens, 64 blocks each: hash, Match, Lease of 64, "
                             "Seal of 64, Release of 64, one after another; the pool evicts from request ",
                             (256 << 20) / kBlockBytes / kRequestBlocks, " on; Lease had to wait in ",
                             lease_wait_us.size(), " of them"));
  figures->Add("thread's CPU time of a request, mean", mean, "us", AtMost(25));
  figures->Add("thread's CPU time of a request, median", Percentile(cpu_us, 0.5), "us");
  figures->Add("wait for the Match answer, median", Percentile(wait_us, 0.5), "us");
  figures->Add("wait for the Match answer, p99", Percentile(wait_us, 0.99), "us");
}

}  // namespace kvpool::bench
