#include "server/scoring/quality_guard.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"

namespace kvpool {
namespace {

constexpr uint32_t kWholeOperation = 1'000'000;  // millionths
constexpr size_t kMostFailureBytes = 256;

// Lengths of the output.
constexpr double kDriftBounds[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2,
                                   0.3,   0.4,   0.5,   0.7,  1,    1.5,  2,   5};

}  // namespace

QualityGuard::QualityGuard(const GuardOptions& options)
    : options_(options),
      share_millionths_(static_cast<uint32_t>(std::lround(options.share * kWholeOperation))) {}

QualityGuard::Sample QualityGuard::Entry::Judged() const {
  Sample judged;
  for (const Sample& sample : samples) {
    judged.mean += sample.mean / static_cast<double>(samples.size());
    judged.greatest = std::max(judged.greatest, sample.greatest);
  }
  return judged;
}

GuardedPolicy QualityGuard::Show(const Key& key, const Entry& entry) {
  const Sample judged = entry.Judged();
  return {.space = key.first,
          .policy = key.second,
          .samples = static_cast<uint32_t>(entry.samples.size()),
          .mean = judged.mean,
          .greatest = judged.greatest,
          .off = entry.off,
          .operations = entry.operations,
          .refused = entry.refused,
          .last_failure = entry.last_failure};
}

QualityGuard::Policy& QualityGuard::PolicyOf(std::string_view policy) {
  const auto found = policies_.find(policy);
  if (found != policies_.end()) return found->second;
  return policies_.emplace(policy, Policy{.drift = Histogram(kDriftBounds)}).first->second;
}

void QualityGuard::Count(GuardOutcome outcome, std::string_view policy, Entry* entry) {
  ++entry->operations[static_cast<size_t>(outcome)];
  ++PolicyOf(policy).operations[static_cast<size_t>(outcome)];
}

absl::Status QualityGuard::Admit(uint64_t space, std::string_view policy) {
  if (options_.bound == 0) return absl::OkStatus();
  MutexLock lock(&mu_);
  const auto found = entries_.find({space, std::string(policy)});
  if (found == entries_.end() || !found->second.off) return absl::OkStatus();
  Entry& entry = found->second;
  ++entry.refused;
  ++PolicyOf(policy).refused;
  const std::string name(policy);
  return absl::FailedPreconditionError(
      absl::StrCat("policy ", name, " is off in space ", space, ": in its newest ", entry.samples.size(),
                   " measurements attention outputs moved by ", entry.Judged().mean,
                   " of their length in the mean; the bound is ", options_.bound,
                   " (--guard-bound). Another policy may do it; an operator turns this one on again "
                   "(kvpoolctl guard --on=",
                   name, " --space=", space, ")"));
}

std::optional<uint32_t> QualityGuard::Take(uint64_t space, std::string_view policy, GuardOutcome can) {
  if (share_millionths_ == 0) return std::nullopt;
  MutexLock lock(&mu_);
  // The first operation that can be measured is.
  Entry& entry =
      entries_.try_emplace({space, std::string(policy)}, Entry{.credit = kWholeOperation - share_millionths_})
          .first->second;
  if (can != GuardOutcome::kMeasured) {
    Count(can, policy, &entry);
    return std::nullopt;
  }
  entry.credit += share_millionths_;
  if (entry.credit < kWholeOperation) {
    Count(GuardOutcome::kPassedOver, policy, &entry);
    return std::nullopt;
  }
  entry.credit -= kWholeOperation;
  return entry.taken++;
}

void QualityGuard::Add(uint64_t space, std::string_view policy, double mean, double greatest) {
  Sample judged;
  {
    MutexLock lock(&mu_);
    Entry& entry = entries_[{space, std::string(policy)}];
    Count(GuardOutcome::kMeasured, policy, &entry);
    PolicyOf(policy).drift.Observe(mean);
    // What was under way when it was turned off changes no more of what it was turned off for.
    if (entry.off) return;
    if (entry.samples.size() < options_.samples) {
      entry.samples.push_back({mean, greatest});
    } else {
      entry.samples[entry.next] = {mean, greatest};
    }
    entry.next = (entry.next + 1) % options_.samples;
    judged = entry.Judged();
    if (options_.bound == 0 || entry.samples.size() < options_.samples || judged.mean <= options_.bound)
      return;
    entry.off = true;
  }
  LogWarning("pruning policy turned off: it moves attention outputs too far",
             {{"space", space},
              {"policy", policy},
              {"drift", judged.mean},
              {"greatest", judged.greatest},
              {"bound", options_.bound},
              {"samples", options_.samples}});
}

void QualityGuard::Fail(uint64_t space, std::string_view policy, const absl::Status& why) {
  MutexLock lock(&mu_);
  Entry& entry = entries_[{space, std::string(policy)}];
  Count(GuardOutcome::kFailed, policy, &entry);
  entry.last_failure = why.ToString().substr(0, kMostFailureBytes);
}

std::vector<GuardedPolicy> QualityGuard::List(uint64_t space, std::string_view policy) {
  std::vector<GuardedPolicy> all;
  MutexLock lock(&mu_);
  for (const auto& [key, entry] : entries_) {
    if ((space == 0 || key.first == space) && (policy.empty() || key.second == policy))
      all.push_back(Show(key, entry));
  }
  return all;
}

std::vector<GuardedPolicy> QualityGuard::Reset(uint64_t space, std::string_view policy) {
  std::vector<GuardedPolicy> all;
  MutexLock lock(&mu_);
  for (auto& [key, entry] : entries_) {
    if ((space != 0 && key.first != space) || (!policy.empty() && key.second != policy)) continue;
    all.push_back(Show(key, entry));
    entry.samples.clear();
    entry.next = 0;
    entry.off = false;
  }
  return all;
}

void QualityGuard::Forget(uint64_t space) {
  MutexLock lock(&mu_);
  entries_.erase(entries_.lower_bound({space, ""}), entries_.lower_bound({space + 1, ""}));
}

std::map<std::string, GuardTotals> QualityGuard::Totals() {
  std::map<std::string, GuardTotals> totals;
  MutexLock lock(&mu_);
  for (const auto& [name, policy] : policies_) {
    totals[name] = {
        .drift = policy.drift.Snapshot(), .operations = policy.operations, .refused = policy.refused};
  }
  for (const auto& [key, entry] : entries_) totals[key.second].off_spaces += entry.off ? 1 : 0;
  return totals;
}

}  // namespace kvpool
