// Several engine processes and one daemon: throughput, and what a kill costs.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/prefix_hasher.h"
#include "client/tools/operator_client.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

// Operators see what the daemon did.
std::unique_ptr<tools::OperatorClient> Operators(const DaemonProcess& daemon) {
  auto opened = tools::OperatorClient::Open({.socket = daemon.socket()});
  KVPOOL_CHECK(opened.ok(), "%s", opened.status().ToString().c_str());
  return *std::move(opened);
}

// Block operations that the daemon has done: keys looked up, blocks leased, sealed, and given back.
double OperationsOf(tools::OperatorClient* operators) {
  const auto stats = operators->GetStats({});
  KVPOOL_CHECK(stats.ok(), "%s", stats.status().ToString().c_str());
  return static_cast<double>(stats->lookup_blocks_total() + stats->leased_total() + stats->sealed_total() +
                             stats->deduplicated_total() + stats->released_total());
}

}  // namespace

void BenchTwoClients(Figures* figures) {
  using Clock = std::chrono::steady_clock;
  const auto daemon = StartDaemon("512MiB", "64MiB");
  const auto operators = Operators(*daemon);
  std::vector<std::unique_ptr<EngineProcess>> engines;
  for (const char* seed : {"1", "2"}) {
    engines.push_back(
        std::make_unique<EngineProcess>(std::vector<std::string>{"serve", daemon->socket(), seed, "5"}));
  }
  for (const auto& engine : engines) KVPOOL_CHECK(engine->ReadLine() == "ready", "bench_engine is not ready");
  for (const auto& engine : engines) engine->WriteLine();
  for (const auto& engine : engines)
    KVPOOL_CHECK(engine->ReadLine() == "counting", "bench_engine does not count");
  const double before = OperationsOf(operators.get());
  const auto start = Clock::now();
  double said_per_s = 0;
  for (const auto& engine : engines) {
    char* rest = nullptr;
    const std::string line = engine->ReadLine();
    const double operations = std::strtod(line.c_str(), &rest);
    said_per_s += operations / std::strtod(rest, nullptr);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const double done_per_s = (OperationsOf(operators.get()) - before) / seconds;
  figures->Note(
      "each serves requests of 64 blocks for 4096 documents of its own, 48 in flight; one "
      "operation is one "
      "key matched, or one block leased from the daemon, sealed, or given back to it; keys are made "
      "beforehand; the "
      "pool holds a quarter of the documents, and the first two seconds are not counted");
  figures->Add("block operations, as the daemon counts them", done_per_s, "1/s", AtLeast(2e6));
  figures->Add("block operations, as the clients count them", said_per_s, "1/s");
}

void BenchKill(Figures* figures) {
  constexpr int kKills = 500;
  constexpr uint32_t kShared = 16;
  const auto daemon = StartDaemon("16MiB", "4MiB");
  const auto operators = Operators(*daemon);
  SessionOptions options = EngineOptions(daemon->socket());
  options.magazine_blocks = 0;
  const auto session = OpenSession(options);
  const uint32_t usable = session->max_blocks() - 2;  // The null block and this session's sink are left out.
  const PrefixHasher hasher(session->hash_seed());
  std::vector<double> ms;
  int corrupt = 0, wrong_sums = 0;
  for (int round = 0; round < kKills; ++round) {
    const std::vector<uint32_t> tokens(kShared * kTokensPerBlock, static_cast<uint32_t>(round));
    const std::vector<PrefixKey> keys = hasher.Chain(tokens, kTokensPerBlock);
    EngineProcess engine({"hold", daemon->socket(), absl::StrCat(usable - kShared - 1), absl::StrCat(round)});
    KVPOOL_CHECK(engine.ReadLine() == "ready", "bench_engine is not ready");
    // This session holds what the engine shared, so that only the engine's own leases have to come back.
    auto hit = session->Match(KeyBytes(keys))->Wait(Patience());
    KVPOOL_CHECK(hit.ok(), "%s", hit.status().ToString().c_str());
    const auto killed = std::chrono::steady_clock::now();
    engine.Kill();
    auto blocks = session->LeaseWithin(usable - kShared, Patience());
    ms.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - killed).count());
    KVPOOL_CHECK(blocks.ok(), "%s", blocks.status().ToString().c_str());
    const Blocks& shared = hit->groups[0];
    corrupt += shared.size() != kShared;
    for (const BlockRef block : blocks->refs()) std::memset(session->data(block), 0x11, kBlockBytes);
    for (size_t i = 0; i < shared.size(); ++i) {
      corrupt += std::memcmp(session->data(shared[i]), keys[i].data(), keys[i].size()) != 0;
    }
    const auto spaces = operators->ListSpaces({});
    KVPOOL_CHECK(spaces.ok(), "%s", spaces.status().ToString().c_str());
    const v1::StateCounts& count = spaces->spaces(0).blocks();
    wrong_sums += count.free() + count.leased() + count.sealed() + count.cached() + count.quarantined() !=
                  count.capacity();
    blocks->Release();
    hit->groups.clear();
    KVPOOL_CHECK(session->Flush(Patience()).ok(), "flush failed");
  }
  figures->Note(absl::StrCat("an engine holds ", usable - kShared, " of ", usable,
                             " blocks; from SIGKILL until another session has leased them all; ", kKills,
                             " rounds"));
  figures->Add("SIGKILL to leasable again, median", Percentile(ms, 0.5), "ms");
  figures->Add("SIGKILL to leasable again, p99", Percentile(ms, 0.99), "ms", AtMost(50));
  figures->Add("corrupt blocks", corrupt, "blocks", AtMost(0));
  figures->Add("states that did not sum to the capacity", wrong_sums, "times", AtMost(0));
}

}  // namespace kvpool::bench
