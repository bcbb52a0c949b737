#include "server/sim/advise.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_format.h"

namespace kvpool::sim {
namespace {

constexpr double kEnough = 0.9;

struct Choice {
  const Result* best = nullptr;
  const Result* lru = nullptr;
};

std::string Time(double us) {
  const double s = us / 1e6;
  if (s >= 36000) return absl::StrFormat("%.1f h", s / 3600);
  if (s >= 600) return absl::StrFormat("%.1f min", s / 60);
  return absl::StrFormat("%.1f s", s);
}

}  // namespace

std::string Advise(const Workload& workload, const std::vector<Result>& results, uint64_t block_bytes) {
  std::map<uint64_t, Choice> choices;
  const Result* infinite = nullptr;
  for (const Result& r : results) {
    if (r.policy == "infinite") infinite = &r;
    if (r.policy == "infinite" || r.policy == "opt") continue;
    Choice& choice = choices[r.capacity_blocks];
    if (choice.best == nullptr || r.prefill_saved_us > choice.best->prefill_saved_us) choice.best = &r;
    if (r.policy == "lru") choice.lru = &r;
  }
  if (infinite == nullptr || choices.empty()) return "nothing was replayed\n";
  if (infinite->prefill_saved_us == 0) {
    return "No request of this trace shares a prefix with an earlier one: a cache of any size saves "
           "nothing.\n";
  }
  const auto gib = [&](uint64_t blocks) { return static_cast<double>(blocks * block_bytes) / (1u << 30); };
  const Choice* advised = &choices.rbegin()->second;
  for (const auto& [capacity, choice] : choices) {
    if (choice.best->prefill_saved_us < kEnough * infinite->prefill_saved_us) continue;
    advised = &choice;
    break;
  }
  const Result& a = *advised->best;
  const double span_s =
      static_cast<double>(workload.requests.back().now_ms - workload.requests.front().now_ms) / 1e3;
  std::string text = absl::StrFormat(
      "Take %.1f GiB (%d blocks) and the policy %s: of %s of prefill in this trace it saves %s (%.1f %%), "
      "where "
      "memory without end would save %.1f %%, and %.1f %% of the blocks are found (%.1f %% at most).",
      gib(a.capacity_blocks), a.capacity_blocks, a.policy, Time(a.prefill_us), Time(a.prefill_saved_us),
      100 * a.prefill_saved_us / a.prefill_us, 100 * infinite->prefill_saved_us / a.prefill_us,
      100 * a.block_ratio(), 100 * infinite->block_ratio());
  if (advised->lru != nullptr && advised->lru != &a) {
    absl::StrAppendFormat(&text, " LRU would save %s with the same memory.",
                          Time(advised->lru->prefill_saved_us));
  }
  if (span_s > 0) {
    absl::StrAppendFormat(&text, " Over the %s of the trace that is the work of %.2f devices.",
                          Time(span_s * 1e6), a.prefill_saved_us / 1e6 / span_s);
  }
  absl::StrAppendFormat(&text, "\n\n%10s %10s  %-15s %12s %8s %12s %10s\n", "GiB", "blocks", "best policy",
                        "saved", "of all", "LRU saves", "of blocks");
  for (const auto& [capacity, choice] : choices) {
    absl::StrAppendFormat(&text, "%10.1f %10d  %-15s %12s %6.1f %% %12s %8.1f %%%s\n", gib(capacity),
                          capacity, choice.best->policy, Time(choice.best->prefill_saved_us),
                          100 * choice.best->prefill_saved_us / choice.best->prefill_us,
                          choice.lru == nullptr ? "" : Time(choice.lru->prefill_saved_us),
                          100 * choice.best->block_ratio(), &choice == advised ? "  <- advised" : "");
  }
  return text;
}

}  // namespace kvpool::sim
