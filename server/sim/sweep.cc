#include "server/sim/sweep.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/support/status_macros.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policy.h"
#include "server/sim/progress_bar.h"

namespace kvpool::sim {
namespace {

constexpr uint64_t kMostBlocks = 1u << 28;

std::shared_ptr<const Weights> WeightsFor(const std::string& policy, const SweepOptions& options) {
  return options.weights != nullptr && options.weights->policy() == policy ? options.weights : nullptr;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParsePolicies(absl::string_view text) {
  std::vector<std::string> known;
  for (const PolicyEntry& entry : ReplacementPolicies()) known.emplace_back(entry.name);
  known.insert(known.end(), {"opt", "infinite"});
  if (text == "all") return known;
  std::vector<std::string> policies = absl::StrSplit(text, ',', absl::SkipEmpty());
  for (const std::string& policy : policies) {
    if (std::find(known.begin(), known.end(), policy) != known.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("\"", policy, "\" is unknown; there are: all, ", absl::StrJoin(known, ", ")));
  }
  if (policies.empty()) return absl::InvalidArgumentError("no policy is named");
  return policies;
}

absl::StatusOr<std::vector<uint32_t>> ParseCapacities(absl::string_view text) {
  std::vector<uint32_t> capacities;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    uint64_t blocks;
    if (!absl::SimpleAtoi(part, &blocks) || blocks == 0 || blocks > kMostBlocks) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", part, "\" is not a whole number of blocks, 1 to ", kMostBlocks));
    }
    capacities.push_back(static_cast<uint32_t>(blocks));
  }
  if (capacities.empty()) return absl::InvalidArgumentError("no capacity is given");
  return capacities;
}

std::vector<uint32_t> SpreadCapacities(const Workload& workload, int points_per_decade) {
  std::vector<uint32_t> capacities;
  const uint64_t least = std::max<uint64_t>(workload.largest_request(), 16);
  const double step = std::pow(10.0, 1.0 / points_per_decade);
  double c = std::pow(10.0, std::floor(std::log10(static_cast<double>(least))));
  for (; c < 1e9; c *= step) {
    // Two digits are enough.
    const double unit = std::pow(10.0, std::floor(std::log10(c)) - 1);
    const auto blocks = static_cast<uint64_t>(std::llround(c / unit) * std::llround(unit));
    if (blocks < least) continue;
    capacities.push_back(static_cast<uint32_t>(blocks));
    if (blocks >= workload.distinct) break;
  }
  return capacities;
}

absl::StatusOr<std::vector<Result>> Sweep(const Workload& workload, const SweepOptions& options) {
  std::vector<ReplayOptions> jobs;
  for (const std::string& policy : options.policies) {
    for (const uint32_t capacity : options.capacities) {
      jobs.push_back({.policy = policy,
                      .capacity_blocks = capacity,
                      .seed = options.seed,
                      .cost = options.cost,
                      .weights = WeightsFor(policy, options)});
      if (policy == "infinite") break;
    }
  }
  std::vector<absl::StatusOr<Result>> answers(jobs.size(), absl::UnknownError("not replayed"));
  std::atomic<size_t> next = 0, done = 0;
  const auto work = [&](ProgressBar* bar) {
    for (size_t i; (i = next.fetch_add(1)) < jobs.size();) {
      answers[i] = Replay(workload, jobs[i]);
      const size_t finished = done.fetch_add(1) + 1;
      if (bar != nullptr) bar->Draw(finished);
    }
  };
  {
    ProgressBar bar(options.progress, jobs.size(), "replays");
    std::vector<std::thread> threads;
    for (uint32_t t = 1; t < options.threads && t < jobs.size(); ++t) threads.emplace_back(work, nullptr);
    work(&bar);
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<Result> results;
  for (absl::StatusOr<Result>& answer : answers) {
    RETURN_IF_ERROR(answer.status());
    results.push_back(*std::move(answer));
  }
  return results;
}

}  // namespace kvpool::sim
