// How long one tenant's Match takes beside a flood of each verb by another.
//
// The victim matches one key every millisecond. The flooder is another process (bench_engine.cc): streams that each have batches of
// one verb under way, or calls, one at a time. Nothing is bounded here: on a machine of few cores the two processes of engines and
// the daemon wait for a core more than for one another. What a flood may do is asserted by tests/process/flood_test.cc, in numbers.
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"
#include "tests/bench/prober.h"
#include "tests/support/each_verb.h"

namespace kvpool::bench {
namespace {

constexpr char kStreams[] = "8";

void Report(Figures* figures, const std::string& what, const std::vector<double>& ms) {
  for (const auto& [name, share] :
       {std::pair("p50", 0.5), std::pair("p99", 0.99), std::pair("longest", 1.0)}) {
    figures->Add(absl::StrCat(what, ", ", name), Percentile(ms, share), "ms");
  }
}

}  // namespace

void BenchFlood(Figures* figures) {
  const auto daemon = StartDaemon("256MiB", "8MiB");
  SessionOptions options = SmallBlocks(daemon->socket());
  options.guaranteed_blocks = 1024;
  const auto victim = OpenSession(options);
  CacheChain(victim.get());
  const std::chrono::milliseconds phase(figures->flood_ms());
  figures->Note(absl::StrCat("a Match of one key a millisecond, beside ", kStreams,
                             " streams or callers of another tenant; each for ", phase.count(), " ms"));
  const auto probe = [&] {
    Prober prober(victim.get(), 1);
    std::this_thread::sleep_for(phase);
    return prober.Stop();
  };
  Report(figures, "quiet", probe());
  std::vector<std::string> floods = {"large touch"};
  for (const auto& [verb, row] : VerbRows()) floods.push_back(verb);
  for (const std::string& flood : floods) {
    EngineProcess flooder({"flood", daemon->socket(), flood, kStreams});
    KVPOOL_CHECK(flooder.ReadLine() == "ready", "bench_engine is not ready");
    const std::vector<double> ms = probe();
    flooder.WriteLine();
    Report(figures, flood, ms);
    figures->Note(absl::StrCat(flood, ": ", flooder.ReadLine(), " beside ", ms.size(), " matches"));
    flooder.Kill();
  }
}

}  // namespace kvpool::bench
