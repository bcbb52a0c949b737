// What holding a budget costs an engine: Prune through the daemon, from the call to the new table.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/layouts.h"
#include "client/live_sequence.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

using Clock = std::chrono::steady_clock;

// A quarter of Llama-3.1-8B's layers: blocks of 512 KiB, and 128 MiB for 4,096 tokens.
constexpr PagedLayoutOptions kLayout = {.layers = 8, .kv_heads = 8, .head_dim = 128};
constexpr uint32_t kTokens = 4096;
constexpr uint32_t kBlocks = kTokens / 16;

Deadline Soon() { return Clock::now() + std::chrono::seconds(60); }

// One block more, written and full.
void Grow(Session* session, LiveSequence* sequence) {
  auto block = session->LeaseWithin(1, Soon());
  Check(block.status());
  // bf16 numbers around 1, a little different in each block.
  const auto seed = static_cast<uint16_t>(Index((*block)[0].id) * 2654435761u >> 20);
  auto* words = reinterpret_cast<uint16_t*>(session->data((*block)[0]));
  const uint64_t count = session->layout().block_bytes() / sizeof(uint16_t);
  for (uint64_t i = 0; i < count; ++i) words[i] = static_cast<uint16_t>(0x3f80 + ((i * 7 + seed) & 127));
  Check(sequence->Append(*std::move(block)));
  const std::vector<uint32_t> tokens(16, 7);
  Check(sequence->Extend(tokens));
}

double TimedPrune(LiveSequence* sequence, const v1::Prune& request) {
  const auto start = Clock::now();
  const absl::StatusOr<v1::PruneResult> result = sequence->Prune(request, Soon());
  const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  Check(result.status());
  return us;
}

}  // namespace

void BenchPrune(Figures* figures) {
  constexpr int kSteps = 300, kCold = 7;
  const auto daemon = StartDaemon("192MiB", "192MiB");
  SessionOptions options = EngineOptions(daemon->socket());
  options.layout = PagedLayout(kLayout);
  options.magazine_blocks = 8;
  const auto session = OpenSession(options);
  LiveSequence sequence(session.get());
  for (uint32_t i = 0; i < kBlocks; ++i) Grow(session.get(), &sequence);

  v1::Prune cold;
  cold.set_budget_tokens(kTokens - 16);
  cold.set_dry_run(true);
  std::vector<double> cold_us, kept_us, within_us;
  for (int i = 0; i < kCold; ++i) {
    *cold.mutable_sequence() = sequence.ToProto();
    cold.mutable_sequence()->set_fresh(true);
    const auto start = Clock::now();
    auto pending = session->Prune(cold);
    Check(pending.status());
    Check(pending->Wait(Soon()).status());
    cold_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  v1::Prune decode;
  decode.set_budget_tokens(kTokens - 16);
  TimedPrune(&sequence, decode);
  for (int i = 0; i < kSteps; ++i) {
    within_us.push_back(TimedPrune(&sequence, decode));
    Grow(session.get(), &sequence);
    kept_us.push_back(TimedPrune(&sequence, decode));
  }
  figures->Note(absl::StrCat("paged_eviction over ", kTokens, " tokens in blocks of 16, ", kLayout.layers,
                             " layers of 8 heads of 128 in bf16, from the call to the answer; medians of ",
                             kCold, " and ", kSteps));
  figures->Add("Prune that reads every block, median", Percentile(cold_us, 0.5), "us");
  figures->Add("Prune with features kept, median", Percentile(kept_us, 0.5), "us");
  figures->Add("Prune with features kept, p99", Percentile(kept_us, 0.99), "us");
  figures->Add("Prune with features kept, per token", Percentile(kept_us, 0.5) / 16, "us");
  figures->Add("Prune that has nothing to drop, median", Percentile(within_us, 0.5), "us");
}

}  // namespace kvpool::bench
