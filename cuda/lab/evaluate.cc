#include "cuda/lab/evaluate.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cuda/lab/staged_sequence.h"
#include "cuda/scorers/select.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

using scorers::BoundPolicy;
using scorers::KvShape;
using scorers::Needs;

absl::Status CheckKeys(const Problem& problem, const BoundPolicy& policy) {
  constexpr Needs kKeys = scorers::kNeedNorms | scorers::kNeedUnitAnchor | scorers::kNeedMeanAnchor |
                          scorers::kNeedKeyBounds | scorers::kNeedKeys | scorers::kNeedQueries;
  // kNeedValueNorms is not among these: CAOTE reads norms of V alone, to leave out tokens that are NaN.
  const bool needs = (policy.needs() & kKeys) != 0 || problem.signals().window.data != nullptr;
  if (problem.has_keys() || !needs) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("policy ", std::string(policy.facts().name), " needs K, not given"));
}

uint32_t BudgetOf(const Problem& problem, const Options& options) {
  return options.budget_tokens != 0 ? options.budget_tokens : problem.budget_tokens();
}

absl::Status CheckBudget(uint32_t budget_tokens) {
  if (budget_tokens != 0) return absl::OkStatus();
  return absl::InvalidArgumentError("no budget: give --budget TOKENS, or budget in the input; 1 or more");
}

struct Chosen {
  uint32_t count = 0;
  std::vector<uint8_t> marks;
};

// Appends the victims of a row, which are ascending, and the others as kept.
void Append(std::vector<uint32_t> victims, uint32_t items, Choice* choice) {
  std::vector<uint32_t> kept;
  size_t next = 0;
  for (uint32_t i = 0; i < items; ++i) {
    if (next < victims.size() && victims[next] == i) {
      ++next;
    } else {
      kept.push_back(i);
    }
  }
  choice->victims.push_back(std::move(victims));
  choice->kept.push_back(std::move(kept));
}

// How many leave of each row: `count`, or what a curve says of its head.
absl::StatusOr<std::vector<uint32_t>> CountsOf(const Problem& problem, const Chosen& chosen,
                                               const Options& options, uint32_t rows) {
  std::vector<uint32_t> counts(rows, chosen.count);
  if (options.heads != HeadBudgets::kCurve || chosen.count == 0) return counts;
  const auto items = static_cast<uint32_t>(chosen.marks.size());
  const uint32_t heads = problem.kv().shape.kv_heads;
  if (problem.budget_curve().empty()) {
    return absl::InvalidArgumentError("--heads=curve needs budget_curve, not given");
  }
  const absl::Span<const float> lost = problem.BudgetCurveAt(static_cast<double>(chosen.count) / items);
  const auto protected_items =
      static_cast<uint32_t>(items - std::count(chosen.marks.begin(), chosen.marks.end(), 0));
  for (uint32_t first = 0; first < rows; first += heads) {
    const std::vector<uint32_t> kept =
        scorers::KeptByShares(lost.subspan(first, heads), items, std::max(1u, protected_items));
    for (uint32_t head = 0; head < heads; ++head) counts[first + head] = items - kept[head];
  }
  return counts;
}

// Chooses the `count` lowest of each row, as many on average where the rows of a layer, its heads, share a budget, or what a
// curve says of each.
absl::Status Choose(const Problem& problem, const std::vector<float>& scores, const Chosen& chosen,
                    const Options& options, Choice* choice) {
  const auto items = static_cast<uint32_t>(chosen.marks.size());
  const uint32_t heads = problem.kv().shape.kv_heads;
  if (options.heads != HeadBudgets::kUniform && options.scope != scorers::Scope::kHead) {
    return absl::InvalidArgumentError(
        absl::StrCat("--heads=", options.heads == HeadBudgets::kAda ? "ada" : "curve",
                     " needs --scope=head: rows of heads share a budget"));
  }
  if (options.heads == HeadBudgets::kAda) {
    for (uint32_t first = 0; first < choice->scores.rows; first += heads) {
      ASSIGN_OR_RETURN(
          std::vector<std::vector<uint32_t>> victims,
          scorers::SelectShared(scores.data() + size_t{first} * items,
                                {.rows = heads, .count = chosen.count, .safeguard = options.safeguard},
                                chosen.marks));
      for (std::vector<uint32_t>& of_head : victims) Append(std::move(of_head), items, choice);
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<uint32_t> counts,
                   CountsOf(problem, chosen, options, choice->scores.rows));
  std::vector<uint64_t> keys(items);
  for (size_t row = 0; row < choice->scores.rows; ++row) {
    std::vector<uint32_t> victims(counts[row]);
    RETURN_IF_ERROR(scorers::SelectVictims(absl::MakeConstSpan(scores).subspan(row * items, items),
                                           chosen.marks, counts[row], absl::MakeSpan(keys),
                                           absl::MakeSpan(victims)));
    Append(std::move(victims), items, choice);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BoundPolicy> BindFor(const Options& options, const Problem& problem) {
  std::vector<std::pair<std::string, std::string>> settings = options.settings;
  bool host_named = false;
  for (const auto& [key, value] : settings) host_named = host_named || key == "host";
  ASSIGN_OR_RETURN(const scorers::PolicyId id, scorers::FindPolicy(options.policy));
  if (!scorers::FactsOf(id).default_host.empty() && !host_named &&
      problem.signals().importance.values != nullptr) {
    settings.emplace_back("host", "importance");
  }
  return scorers::BindPolicy(options.policy, settings);
}

absl::StatusOr<Scores> Score(const Problem& problem, const BoundPolicy& policy, const Options& options) {
  RETURN_IF_ERROR(CheckKeys(problem, policy));
  std::unique_ptr<KvCompute> host;
  if (options.compute == nullptr) host = MakeHostKvCompute({.host_threads = options.threads});
  KvCompute* const compute = options.compute != nullptr ? options.compute : host.get();
  ASSIGN_OR_RETURN(const StagedSequence staged,
                   StagedSequence::Make(compute, problem.kv(), problem.signals()));
  ASSIGN_OR_RETURN(ScoredSequence scored, ScoreStaged(compute, staged,
                                                      {.policy = policy,
                                                       .shape = problem.kv().shape,
                                                       .scope = options.scope,
                                                       .over_tokens = options.over_tokens,
                                                       .over_heads = options.over_heads,
                                                       .over_layers = options.over_layers,
                                                       .budget_tokens = BudgetOf(problem, options)}));
  return Scores{.rows = scored.plan.rows,
                .tokens = std::move(scored.tokens),
                .blocks = std::move(scored.blocks),
                .spreads = std::move(scored.spreads)};
}

absl::StatusOr<Choice> Prune(const Problem& problem, const BoundPolicy& policy, const Options& options) {
  const uint32_t budget = BudgetOf(problem, options);
  const KvShape& shape = problem.kv().shape;
  RETURN_IF_ERROR(CheckBudget(budget));
  Choice choice;
  ASSIGN_OR_RETURN(choice.scores, Score(problem, policy, options));
  Chosen chosen{.count = scorers::BlocksOverBudget(shape, budget),
                .marks = std::vector<uint8_t>(shape.blocks())};
  scorers::MarkProtectedBlocks(
      scorers::ProtectionOf(policy, shape, problem.signals().window.own_tokens(), budget), {}, shape,
      absl::MakeSpan(chosen.marks));
  RETURN_IF_ERROR(Choose(problem, choice.scores.blocks, chosen, options, &choice));
  return choice;
}

absl::StatusOr<Choice> Compact(const Problem& problem, const BoundPolicy& policy, const Options& options) {
  const uint32_t budget = BudgetOf(problem, options);
  const KvShape& shape = problem.kv().shape;
  RETURN_IF_ERROR(CheckBudget(budget));
  Choice choice;
  ASSIGN_OR_RETURN(choice.scores, Score(problem, policy, options));
  Chosen chosen{.count = scorers::TokensOverBudget(policy, shape, budget),
                .marks = std::vector<uint8_t>(shape.tokens)};
  scorers::MarkProtectedTokens(
      scorers::ProtectionOf(policy, shape, problem.signals().window.own_tokens(), budget), {}, shape,
      absl::MakeSpan(chosen.marks));
  RETURN_IF_ERROR(Choose(problem, choice.scores.tokens, chosen, options, &choice));
  return choice;
}

}  // namespace kvpool::lab
