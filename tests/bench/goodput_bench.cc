// What two models with bursts have of one pool, against two halves of it: figures in virtual time, the same on every machine.
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/replay/conversation.h"
#include "server/base/log.h"
#include "tests/bench/figures.h"
#include "tests/service/goodput.h"

namespace kvpool::bench {
namespace {

constexpr uint32_t kBlocks = 12000;
// A slab's worth of requests may go the other way.
constexpr double kNoLessBy = 0.1;

}  // namespace

void BenchGoodput(Figures* figures) {
  SetLog({.level = LogLevel::kWarning});
  const auto trace = replay::FindConversationTrace();
  figures->Note(
      absl::StrCat("goodput: ", trace.ok() ? "the public conversation trace" : "a made conversation", " on ",
                   kBlocks, " blocks of ", replay::kTokensPerBlock, " tokens"));
  for (const uint64_t burst_s : {360, 900}) {
    for (const uint64_t seed : {1, 2, 3}) {
      const goodput::Arrivals requests =
          trace.ok() ? replay::ReadTrace(*trace).value() : replay::GenerateConversation({.seed = seed});
      const auto models = goodput::SplitInBursts(requests, {.seed = seed, .burst_ms = burst_s * 1000});
      const goodput::ServeOptions options = {.slabs = kBlocks / goodput::kSlabBlocks, .weight = 1};
      std::vector<goodput::Outcome> halves = goodput::ServeByHalves(models, options);
      std::vector<goodput::Outcome> elastic = goodput::Serve(models, options);
      halves.push_back(goodput::Sum(halves));
      elastic.push_back(goodput::Sum(elastic));
      const char* const names[] = {"a", "b", "sum"};
      for (size_t i = 0; i < halves.size(); ++i) {
        const std::string name = absl::StrCat("bursts of ", burst_s, " s, seed ", seed, ", ", names[i]);
        const double less = i + 1 == halves.size() ? 0 : kNoLessBy;
        figures->Add(absl::StrCat(name, ": saved, halves"), halves[i].saved_percent(), "%");
        figures->Add(absl::StrCat(name, ": saved"), elastic[i].saved_percent(), "%",
                     AtLeast(halves[i].saved_percent() - less));
        figures->Add(absl::StrCat(name, ": in time, halves"), halves[i].in_time_percent(), "%");
        figures->Add(absl::StrCat(name, ": in time"), elastic[i].in_time_percent(), "%",
                     AtLeast(halves[i].in_time_percent() - less));
      }
    }
  }
  SetLog({});
}

}  // namespace kvpool::bench
