// What a benchmark measured, and against which bound.
#ifndef KVPOOL_TESTS_BENCH_FIGURES_H_
#define KVPOOL_TESTS_BENCH_FIGURES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvpool::bench {

// At least or at most `limit`.
struct Bound {
  bool at_least;
  double limit;
};
constexpr Bound AtLeast(double limit) { return {.at_least = true, .limit = limit}; }
constexpr Bound AtMost(double limit) { return {.at_least = false, .limit = limit}; }

struct Figure {
  std::string section;
  std::string name;
  double value = 0;
  std::string unit;
  std::optional<Bound> bound;
  std::string skipped;  // Why there is no value.

  bool met() const {
    if (!bound) return true;
    return skipped.empty() && (bound->at_least ? value >= bound->limit : value <= bound->limit);
  }
};

// Collects the figures of the sections that run.
class Figures {
 public:
  // `sessions`: how many BenchSessions opens and closes. `flood_ms`: how long each flood of BenchFlood lasts.
  // `latency_tries`: how often BenchLatency measures a phase, at most. `tier_path`: where BenchTiers has its files; empty: where
  // temporary files are.
  Figures(uint32_t sessions, uint32_t flood_ms, uint32_t latency_tries, std::string tier_path)
      : sessions_(sessions),
        flood_ms_(flood_ms),
        latency_tries_(latency_tries),
        tier_path_(std::move(tier_path)) {}
  uint32_t sessions() const { return sessions_; }
  uint32_t flood_ms() const { return flood_ms_; }
  uint32_t latency_tries() const { return latency_tries_; }
  const std::string& tier_path() const { return tier_path_; }

  void BeginSection(std::string_view section) { section_ = section; }
  void Add(std::string_view name, double value, std::string_view unit, std::optional<Bound> bound = {});
  // A figure that this machine can't measure.
  void Skip(std::string_view name, std::string_view why);
  // The configuration of a section: sizes, counts, mixes.
  void Note(std::string_view text);

  const std::vector<Figure>& all() const { return figures_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  const uint32_t sessions_, flood_ms_, latency_tries_;
  const std::string tier_path_;
  std::string section_;
  std::vector<Figure> figures_;
  std::vector<std::string> notes_;
};

// A part of the bench: a function in a file of its own, and one line in main.cc.
struct Section {
  std::string_view name;
  std::string_view summary;
  void (*run)(Figures* figures);
  bool when_named = false;  // It takes minutes of a machine with nothing else to do: --only has to name it.
};

void BenchPool(Figures* figures);      // pool_bench.cc
void BenchEvict(Figures* figures);     // evict_bench.cc
void BenchScore(Figures* figures);     // score_bench.cc
void BenchMagazine(Figures* figures);  // client_bench.cc
void BenchRequest(Figures* figures);   // client_bench.cc
void BenchStep(Figures* figures);
void BenchKeeper(Figures* figures);      // step_bench.cc
void BenchTraffic(Figures* figures);     // traffic_bench.cc
void BenchTwoClients(Figures* figures);  // engines_bench.cc
void BenchLatency(Figures* figures);     // latency_bench.cc
void BenchFlood(Figures* figures);       // flood_bench.cc
void BenchPrune(Figures* figures);       // prune_bench.cc
void BenchKill(Figures* figures);        // engines_bench.cc
void BenchSessions(Figures* figures);    // sessions_bench.cc
void BenchRestart(Figures* figures);     // restart_bench.cc
void BenchGoodput(Figures* figures);     // goodput_bench.cc
void BenchTiers(Figures* figures);       // tiers_bench.cc

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_FIGURES_H_
