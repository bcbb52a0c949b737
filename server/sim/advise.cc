#include "server/sim/advise.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_format.h"

namespace kvpool::sim {
namespace {

constexpr double kEnough = 0.9;
// Shares of the prefill of the whole trace: the least that the table shows, and the least gain that is worth
// another policy than LRU.
constexpr double kNothing = 0.0005, kLittle = 0.005;

struct Choice {
  uint64_t capacity_blocks = 0;
  const Result* best = nullptr;
  const Result* lru = nullptr;
};

// A unit of time that makes a number neither tiny nor huge.
struct Unit {
  const char* name;
  double us;
};
Unit UnitFor(double us) {
  constexpr Unit kUnits[] = {{"days", 86400e6}, {"h", 3600e6}, {"min", 60e6}, {"s", 1e6}};
  for (const Unit& unit : kUnits) {
    if (us >= 2 * unit.us) return unit;
  }
  return {"ms", 1e3};
}

// To about three digits.
std::string Number(double x) {
  return x >= 100 ? absl::StrFormat("%.0f", x)
         : x >= 1 ? absl::StrFormat("%.1f", x)
                  : absl::StrFormat("%.2f", x);
}

std::string Time(double us) {
  const Unit unit = UnitFor(us);
  return absl::StrFormat("%s %s", Number(us / unit.us), unit.name);
}

// One choice per capacity, up to the first that saves as much as infinite memory.
std::vector<Choice> ChoicesOf(const std::vector<Result>& results, const Result& infinite) {
  std::map<uint64_t, Choice> choices;
  for (const Result& r : results) {
    if (r.policy == "infinite" || r.policy == "opt") continue;
    Choice& choice = choices[r.capacity_blocks];
    choice.capacity_blocks = r.capacity_blocks;
    if (choice.best == nullptr || r.prefill_saved_us > choice.best->prefill_saved_us) choice.best = &r;
    if (r.policy == "lru") choice.lru = &r;
  }
  std::vector<Choice> kept;
  for (auto& [capacity, choice] : choices) {
    const double gained = choice.lru == nullptr
                              ? infinite.prefill_us
                              : choice.best->prefill_saved_us - choice.lru->prefill_saved_us;
    if (gained < kLittle * infinite.prefill_us) choice.best = choice.lru;
    kept.push_back(choice);
    if (choice.best->prefill_saved_us >= infinite.prefill_saved_us - kNothing * infinite.prefill_us) break;
  }
  return kept;
}

class Advice {
 public:
  Advice(const Workload& workload, const Result& infinite, std::vector<Choice> choices, uint64_t block_bytes)
      : workload_(workload), infinite_(infinite), choices_(std::move(choices)), block_bytes_(block_bytes) {
    advised_ = choices_.size() - 1;
    for (size_t i = choices_.size(); i-- > 0;) {
      if (choices_[i].best->prefill_saved_us >= kEnough * infinite.prefill_saved_us) advised_ = i;
    }
  }

  std::string Paragraph() const {
    const Choice& choice = choices_[advised_];
    const Result& a = *choice.best;
    std::string text = absl::StrFormat(
        "Take %s GiB (%d blocks) and the policy %s: of %s of prefill in this trace it saves %s (%.1f %%), "
        "where "
        "memory without end would save %.1f %%, and %.1f %% of the blocks are found (%.1f %% at most).",
        Gib(a.capacity_blocks), a.capacity_blocks, a.policy, Time(a.prefill_us), Time(a.prefill_saved_us),
        Percent(a), Percent(infinite_), 100 * a.block_ratio(), 100 * infinite_.block_ratio());
    if (choice.lru != nullptr && choice.lru != &a) {
      absl::StrAppendFormat(&text, " LRU would save %s with the same memory.",
                            Time(choice.lru->prefill_saved_us));
    }
    const double span_us =
        1e3 * static_cast<double>(workload_.requests.back().now_ms - workload_.requests.front().now_ms);
    if (span_us > 0) {
      absl::StrAppendFormat(&text, " In the %s of the trace, %s devices would be busy with what is saved.",
                            Time(span_us), Number(a.prefill_saved_us / span_us));
    }
    return text + Beyond() + "\n";
  }

  std::string Table() const {
    const Unit unit = UnitFor(infinite_.prefill_saved_us);
    std::string text =
        absl::StrFormat("%8s %10s  %-16s %10s %8s %13s %12s\n", "GiB", "blocks", "best policy",
                        absl::StrFormat("saved, %s", unit.name), "of all", "LRU, of all", "blocks hit");
    for (size_t i = 0; i < choices_.size(); ++i) {
      const auto& [capacity, best, lru] = choices_[i];
      absl::StrAppendFormat(&text, "%8s %10d  %-16s %10s %6.1f %% %13s %10.1f %%%s\n", Gib(capacity),
                            capacity, best->policy, Number(best->prefill_saved_us / unit.us), Percent(*best),
                            lru == nullptr ? "" : absl::StrFormat("%.1f %%", Percent(*lru)),
                            100 * best->block_ratio(), i == advised_ ? "  <- advised" : "");
    }
    return text;
  }

 private:
  std::string Gib(uint64_t blocks) const {
    return Number(static_cast<double>(blocks) * static_cast<double>(block_bytes_) / (1u << 30));
  }
  static double Percent(const Result& r) { return 100 * r.prefill_saved_us / r.prefill_us; }

  // The sentence about what more memory than advised would save.
  std::string Beyond() const {
    const Choice& last = choices_.back();
    const double left_us = infinite_.prefill_saved_us - last.best->prefill_saved_us;
    const bool complete = left_us <= kNothing * infinite_.prefill_us;
    if (complete && advised_ + 1 == choices_.size()) return " A bigger cache buys nothing.";
    if (complete) {
      return absl::StrFormat(" With %s GiB it would save %s more, and a bigger cache buys nothing.",
                             Gib(last.capacity_blocks),
                             Time(last.best->prefill_saved_us - choices_[advised_].best->prefill_saved_us));
    }
    return absl::StrFormat(" More memory than the largest size tried, %s GiB, would save up to %s more.",
                           Gib(last.capacity_blocks), Time(left_us));
  }

  const Workload& workload_;
  const Result& infinite_;
  const std::vector<Choice> choices_;
  const uint64_t block_bytes_;
  size_t advised_ = 0;
};

}  // namespace

std::string Advise(const Workload& workload, const std::vector<Result>& results, uint64_t block_bytes) {
  const auto infinite =
      std::find_if(results.begin(), results.end(), [](const Result& r) { return r.policy == "infinite"; });
  if (infinite == results.end()) return "nothing was replayed\n";
  std::vector<Choice> choices = ChoicesOf(results, *infinite);
  if (choices.empty()) return "nothing was replayed\n";
  if (infinite->prefill_saved_us == 0) {
    return "No request of this trace shares a prefix with an earlier one: a cache of any size saves "
           "nothing.\n";
  }
  const Advice advice(workload, *infinite, std::move(choices), block_bytes);
  return advice.Paragraph() + "\n" + advice.Table();
}

}  // namespace kvpool::sim
