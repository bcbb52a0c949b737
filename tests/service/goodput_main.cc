// bench_goodput [FLAGS]: what two models with bursts have of one pool, against two halves of it, a line each:
//
//   which TAB saved, halves TAB saved TAB in time, halves TAB in time      all in %
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/replay/conversation.h"
#include "proto/cli/flags.h"
#include "server/base/log.h"
#include "tests/service/goodput.h"

namespace kvpool::goodput {
namespace {

int Main(const std::vector<std::string>& arguments) {
  uint32_t blocks = 12000, weight = 1;
  Flags flags;
  flags.Add("blocks", &blocks, {.min = 1024, .max = 1'000'000}, "how many there are for both together");
  flags.Add("weight", &weight, {.min = 0, .max = 1000}, "each model's; 0: what blocks save decides alone");
  const auto rest = flags.Parse(arguments);
  if (!rest.ok() || !rest->empty()) {
    std::fprintf(stderr, "bench_goodput: %s\n%s",
                 rest.ok() ? "it takes no arguments but these" : rest.status().ToString().c_str(),
                 flags.Help().c_str());
    return 2;
  }
  SetLog({.level = LogLevel::kWarning});
  const auto trace = replay::FindConversationTrace();
  std::printf("%s on %u blocks of %u tokens, weight %u each\n",
              trace.ok() ? "the public conversation trace" : "a made conversation", blocks,
              replay::kTokensPerBlock, weight);
  for (const uint64_t burst_s : {360, 900}) {
    for (const uint64_t seed : {1, 2, 3}) {
      const Arrivals requests =
          trace.ok() ? replay::ReadTrace(*trace).value() : replay::GenerateConversation({.seed = seed});
      const auto models = SplitInBursts(requests, {.seed = seed, .burst_ms = burst_s * 1000});
      const ServeOptions options = {.slabs = blocks / kSlabBlocks, .weight = weight};
      std::vector<Outcome> halves = ServeByHalves(models, options), elastic = Serve(models, options);
      halves.push_back(Sum(halves));
      elastic.push_back(Sum(elastic));
      const char* const names[] = {"a", "b", "sum"};
      for (size_t i = 0; i < halves.size(); ++i) {
        std::printf("bursts of %u s, seed %u, %s\t%.4f\t%.4f\t%.4f\t%.4f\n", static_cast<unsigned>(burst_s),
                    static_cast<unsigned>(seed), names[i], halves[i].saved_percent(),
                    elastic[i].saved_percent(), halves[i].in_time_percent(), elastic[i].in_time_percent());
      }
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvpool::goodput

int main(int argc, char** argv) { return kvpool::goodput::Main({argv + 1, argv + argc}); }
