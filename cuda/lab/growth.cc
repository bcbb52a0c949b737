#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cuda/lab/evaluate.h"
#include "cuda/scorers/select.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

constexpr uint32_t kMaxSteps = 1 << 16;

class Generator {
 public:
  explicit Generator(uint64_t seed) : x_(seed) {}
  double Normal() {
    double sum = -2;
    for (int i = 0; i < 4; ++i) {
      x_ = x_ * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<double>(x_ >> 11) / 9007199254740992.0;
    }
    return sum * std::sqrt(3.0);
  }

 private:
  uint64_t x_;
};

struct Resident {
  uint32_t token = 0;
  double mass = 0, mass_square = 0, latest = 0, last = 0, interval = 0, hits = 0;
  uint32_t steps = 0;  // steps that it has been resident
};

struct Range {
  uint64_t min, max;
};

// A whole number from the input, or `fallback` if the input has none of this name; without a fallback
// an error.
absl::StatusOr<uint64_t> WholeOf(const Tensors& tensors, const char* name, Range range,
                                 std::optional<uint64_t> fallback) {
  const Tensor* const tensor = tensors.Find(name);
  if (tensor == nullptr && fallback.has_value()) return *fallback;
  const double value = tensor == nullptr || tensor->values.size() != 1 ? -1 : tensor->values[0];
  if (value >= static_cast<double>(range.min) && value <= static_cast<double>(range.max) &&
      value == std::floor(value)) {
    return static_cast<uint64_t>(value);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be one whole number from ", range.min, " to ", range.max));
}

// Adds the parameters that a growing sequence's input has for the policy. They come before those of the
// command line, which override them.
absl::Status AddSettings(const Tensors& tensors, Options* options) {
  ASSIGN_OR_RETURN(const scorers::PolicyId id, scorers::FindPolicy(options->policy));
  // The reference runs of RoCo protect this many of the newest tokens.
  constexpr uint64_t kProtectLast = 3;
  for (const scorers::ParamFacts& param : scorers::FactsOf(id).params) {
    const std::string name(param.name);
    const bool protect_last = name == "protect_last";
    if (!protect_last && (name != "recent" || tensors.Find("recent") == nullptr)) continue;
    ASSIGN_OR_RETURN(const uint64_t value,
                     WholeOf(tensors, name.c_str(), {0, kMaxSteps},
                             protect_last ? std::optional(kProtectLast) : std::nullopt));
    options->settings.emplace(options->settings.begin(), name, absl::StrCat(value));
  }
  return absl::OkStatus();
}

// Reads or draws the newest query's attention over the resident tokens.
absl::StatusOr<std::vector<double>> RowOf(const std::vector<std::vector<double>>& rows, uint32_t step,
                                          size_t residents, Generator* generator) {
  if (!rows.empty()) {
    if (step < rows.size() && rows[step].size() == residents) return rows[step];
    return absl::InvalidArgumentError(
        absl::StrCat("rows: step ", step, " must have the attention of ", residents, " resident tokens"));
  }
  std::vector<double> row(residents);
  for (double& x : row) x = 2 * generator->Normal();
  const double most = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (double& x : row) sum += x = std::exp(x - most);
  for (double& x : row) x /= sum;
  return row;
}

// The residents as a problem of their own.
absl::StatusOr<std::unique_ptr<Problem>> ProblemOf(const std::vector<Resident>& residents, uint32_t step) {
  Tensors tensors;
  const auto add = [&](const char* name, auto value) {
    Tensor& tensor = tensors.by_name[name];
    tensor.shape = {residents.size()};
    for (const Resident& resident : residents) tensor.values.push_back(static_cast<double>(value(resident)));
  };
  add("mass", [](const Resident& r) { return r.mass; });
  add("mass_square", [](const Resident& r) { return r.mass_square; });
  add("counts", [](const Resident& r) { return r.steps; });
  add("latest", [](const Resident& r) { return r.latest; });
  add("last_attended", [](const Resident& r) { return r.last; });
  add("interval", [](const Resident& r) { return r.interval; });
  add("hits", [](const Resident& r) { return r.hits; });
  tensors.by_name["now"] = {.shape = {}, .values = {static_cast<double>(step)}};
  return Problem::Make(tensors, {});
}

}  // namespace

bool IsGrowth(const Tensors& tensors) { return tensors.Find("T") != nullptr && tensors.Find("K") == nullptr; }

absl::StatusOr<Growth> Grow(const Tensors& tensors, const Options& options) {
  ASSIGN_OR_RETURN(const uint64_t steps, WholeOf(tensors, "T", {1, kMaxSteps}, std::nullopt));
  ASSIGN_OR_RETURN(const uint64_t seed, WholeOf(tensors, "seed", {0, uint64_t{1} << 53}, 3));
  uint64_t budget = options.budget_tokens;
  if (budget == 0) {
    ASSIGN_OR_RETURN(budget, WholeOf(tensors, "budget", {1, kMaxSteps}, std::nullopt));
  }
  Options each = options;
  each.budget_tokens = static_cast<uint32_t>(budget);
  RETURN_IF_ERROR(AddSettings(tensors, &each));
  const Tensor* const threshold = tensors.Find("threshold");
  const double attended = threshold != nullptr && threshold->values.size() == 1 ? threshold->values[0] : 5e-4;

  Generator generator(seed);
  const std::vector<std::vector<double>> rows = tensors.FindRows("rows");
  Growth growth;
  std::vector<Resident> residents;
  for (uint32_t step = 0; step < steps; ++step) {
    residents.push_back({.token = step, .last = static_cast<double>(step)});
    ASSIGN_OR_RETURN(const std::vector<double> row, RowOf(rows, step, residents.size(), &generator));
    for (size_t i = 0; i < residents.size(); ++i) {
      Resident& resident = residents[i];
      resident.mass += row[i];
      resident.mass_square += row[i] * row[i];
      resident.latest = row[i];
      ++resident.steps;
      if (row[i] <= attended) continue;
      resident.interval = std::max(resident.interval, step - resident.last);
      resident.last = step;
      resident.hits += 1;
    }
    if (residents.size() <= budget) continue;
    ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem, ProblemOf(residents, step));
    ASSIGN_OR_RETURN(const scorers::BoundPolicy policy, BindFor(each, *problem));
    ASSIGN_OR_RETURN(const Choice choice, Compact(*problem, policy, each));
    for (const uint32_t victim : choice.victims[0])
      growth.evictions.emplace_back(step, residents[victim].token);
    std::vector<Resident> left;
    for (const uint32_t i : choice.kept[0]) left.push_back(residents[i]);
    residents = std::move(left);
  }
  for (const Resident& resident : residents) growth.final.push_back(resident.token);
  return growth;
}

}  // namespace kvpool::lab
