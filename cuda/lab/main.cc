// kvpool-lab: runs policies on tensors from a file, and says which tokens they would drop.
//
// Exit status: 0 done; 1 the input is bad or the policy can't be run on it; 2 usage.
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "cuda/lab/calibrate.h"
#include "cuda/lab/evaluate.h"
#include "cuda/lab/explain.h"
#include "cuda/lab/plan_budgets.h"
#include "cuda/lab/problem.h"
#include "cuda/lab/tensor.h"
#include "cuda/lab/train.h"
#include "cuda/scorers/episodes.h"
#include "cuda/scorers/policies/registry.h"
#include "proto/cli/flags.h"
#include "proto/cli/version.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

struct Arguments {
  std::string verb;
  std::string policy = scorers::kDefaultPolicy;
  std::string input;
  std::vector<std::string> params;
  std::string heads = "uniform";
  double safeguard = 0.2;
  std::string scope = "sequence", over_tokens = "mean", over_heads = "mean", over_layers = "mean";
  uint64_t budget = 0, tokens_per_block = 0, threads = 1;
  std::string weights, explain;
  bool policies_table = false, help = false, version = false;
};

void AddFlags(Arguments* a, Flags* flags) {
  flags->Add("policy", &a->policy, "one of those below; of budgets: uniform, pyramid, cake, d2o or epicache");
  flags->Add("input", &a->input, "tensors as JSON, or as safetensors if the name ends so");
  flags->AddRepeated("param", &a->params, "NAME=VALUE, a parameter of the policy");
  flags->Add("budget", &a->budget, {.max = 1u << 30},
             "tokens that shall stay; of budgets: the mean per layer");
  flags->Add("tokens-per-block", &a->tokens_per_block, {.max = 4096}, "else the input's, else 16");
  flags->Add("scope", &a->scope, "sequence, layer or head: what one decision is for");
  flags->Add("heads", &a->heads,
             "uniform, or with --scope=head: ada, the heads of a layer share its budget by their scores "
             "(AdaKV); curve, by "
             "budget_curve of the input (LU-KV)");
  flags->Add("safeguard", &a->safeguard, 1, "of ada: the share of its budget that each head keeps at least");
  flags->Add("over-tokens", &a->over_tokens, "mean, sum, max or p90: tokens of a block to its score");
  flags->Add("over-heads", &a->over_heads, "mean or max");
  flags->Add("over-layers", &a->over_layers, "mean or max");
  flags->Add("threads", &a->threads, {.min = 1, .max = 1024}, "to compute with");
  flags->Add("weights", &a->weights,
             "safetensors with weights of a policy, beside the input; of train and calibrate: where they go");
  flags->Add("explain", &a->explain, "draw which tokens stay: text or - to the terminal, or a FILE.svg");
  flags->Add("policies-table", &a->policies_table, "the policies as a table in Markdown");
  flags->Add("help", &a->help, "this text");
  flags->Add("version", &a->version, "what this build is");
}

absl::Status PickChoice(const char* flag, const std::string& value,
                        std::initializer_list<const char*> choices, auto* picked) {
  uint8_t index = 0;
  for (const char* choice : choices) {
    if (value == choice)
      return *picked = static_cast<std::decay_t<decltype(*picked)>>(index), absl::OkStatus();
    ++index;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": \"", value, "\" is not ", absl::StrJoin(choices, ", ")));
}

absl::StatusOr<Options> OptionsOf(const Arguments& a) {
  Options options{.policy = a.policy,
                  .budget_tokens = static_cast<uint32_t>(a.budget),
                  .safeguard = a.safeguard,
                  .tokens_per_block = static_cast<uint32_t>(a.tokens_per_block),
                  .threads = static_cast<uint32_t>(a.threads)};
  RETURN_IF_ERROR(PickChoice("scope", a.scope, {"sequence", "layer", "head"}, &options.scope));
  RETURN_IF_ERROR(PickChoice("heads", a.heads, {"uniform", "ada", "curve"}, &options.heads));
  RETURN_IF_ERROR(
      PickChoice("over-tokens", a.over_tokens, {"mean", "sum", "max", "p90"}, &options.over_tokens));
  RETURN_IF_ERROR(PickChoice("over-heads", a.over_heads, {"mean", "max"}, &options.over_heads));
  RETURN_IF_ERROR(PickChoice("over-layers", a.over_layers, {"mean", "max"}, &options.over_layers));
  for (const std::string& param : a.params) {
    const std::pair<std::string, std::string> setting = absl::StrSplit(param, absl::MaxSplits('=', 1));
    if (setting.first.empty() || !absl::StrContains(param, "=")) {
      return absl::InvalidArgumentError(absl::StrCat("--param: \"", param, "\" is not NAME=VALUE"));
    }
    options.settings.push_back(setting);
  }
  return options;
}

std::string JsonNumber(double value) {
  if (std::isnan(value)) return "\"NaN\"";
  if (std::isinf(value)) return value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  return absl::StrFormat("%.9g", value);
}

template <typename Numbers>
std::string JsonList(const Numbers& numbers) {
  return absl::StrCat("[",
                      absl::StrJoin(numbers, ", ",
                                    [](std::string* out, auto number) {
                                      out->append(JsonNumber(static_cast<double>(number)));
                                    }),
                      "]");
}

// One list, or a list of lists if there are several rows.
template <typename T>
std::string JsonRows(const std::vector<T>& values, uint32_t rows) {
  if (rows == 1) return JsonList(values);
  std::vector<std::string> lists;
  const size_t items = values.size() / rows;
  for (uint32_t row = 0; row < rows; ++row) {
    lists.push_back(
        JsonList(std::vector<T>(values.begin() + row * items, values.begin() + (row + 1) * items)));
  }
  return absl::StrCat("[", absl::StrJoin(lists, ",\n    "), "]");
}
std::string JsonRows(const std::vector<std::vector<uint32_t>>& rows) {
  if (rows.size() == 1) return JsonList(rows[0]);
  std::vector<std::string> lists;
  for (const auto& row : rows) lists.push_back(JsonList(row));
  return absl::StrCat("[", absl::StrJoin(lists, ",\n    "), "]");
}

std::string JsonObject(const std::vector<std::pair<std::string, std::string>>& members) {
  return absl::StrCat("{\n  ",
                      absl::StrJoin(members, ",\n  ",
                                    [](std::string* out, const auto& member) {
                                      absl::StrAppend(out, "\"", member.first, "\": ", member.second);
                                    }),
                      "\n}\n");
}

absl::Status Explain(const Arguments& a, const Problem& problem, const Choice& choice, bool of_blocks) {
  if (a.explain.empty()) return absl::OkStatus();
  const scorers::KvShape& shape = problem.kv().shape;
  Picture picture{.title = absl::StrCat("kvpool-lab ", a.verb, " --policy ", a.policy),
                  .tokens = shape.tokens,
                  .tokens_per_block = shape.tokens_per_block,
                  .rows = choice.scores.rows,
                  .scores = choice.scores.tokens,
                  .stays = std::vector<uint8_t>(choice.scores.tokens.size(), 1)};
  for (size_t row = 0; row < choice.victims.size(); ++row) {
    for (const uint32_t victim : choice.victims[row]) {
      const uint64_t first = row * shape.tokens + (of_blocks ? victim * shape.tokens_per_block : victim);
      const uint32_t count = of_blocks ? shape.TokensOf(victim) : 1;
      for (uint32_t i = 0; i < count; ++i) picture.stays[first + i] = 0;
    }
  }
  if (!absl::EndsWith(a.explain, ".svg")) {
    std::fputs(DrawText(picture).c_str(), stderr);
    return absl::OkStatus();
  }
  std::ofstream file(a.explain);
  if (file << DrawSvg(picture) && file.flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("--explain: can't write ", a.explain));
}

absl::StatusOr<std::string> RunGrowth(const Tensors& tensors, const Options& options) {
  ASSIGN_OR_RETURN(const Growth growth, Grow(tensors, options));
  std::vector<std::string> evictions;
  for (const auto& [step, token] : growth.evictions)
    evictions.push_back(absl::StrCat("[", step, ", ", token, "]"));
  return JsonObject({{"policy", absl::StrCat("\"", options.policy, "\"")},
                     {"evictions", absl::StrCat("[", absl::StrJoin(evictions, ", "), "]")},
                     {"final", JsonList(growth.final)}});
}

absl::StatusOr<std::string> RunBudgets(const Tensors& tensors, const Options& options) {
  ASSIGN_OR_RETURN(const Budgets budgets, PlanBudgets(tensors, options));
  std::vector<std::pair<std::string, std::string>> members = {
      {"policy", absl::StrCat("\"", options.policy, "\"")}};
  const auto add = [&members](const char* name, const auto& list) {
    if (!list.empty()) members.emplace_back(name, JsonList(list));
  };
  add("preferences", budgets.preferences);
  add(options.policy == "d2o" ? "ratios" : "shares", budgets.shares);
  add("budgets", budgets.tokens);
  add("as_authors", budgets.as_authors);
  return JsonObject(members);
}

absl::StatusOr<std::string> RunEpisodes(const Tensors& tensors) {
  const Tensor* const segments = tensors.Find("segments");
  if (segments == nullptr || segments->shape.size() != 2) {
    return absl::InvalidArgumentError(
        "segments [segment][dim], embeddings of pieces of the history, are needed");
  }
  const uint64_t dim = segments->shape[1];
  const Tensor* const wanted = tensors.Find("episodes");
  scorers::EpisodeOptions options;
  if (wanted != nullptr && wanted->values.size() == 1 && wanted->values[0] >= 1 &&
      wanted->values[0] <= 65536) {
    options.episodes = static_cast<uint32_t>(wanted->values[0]);
  }
  ASSIGN_OR_RETURN(const scorers::Episodes episodes,
                   scorers::FindEpisodes({.values = segments->values, .dim = dim}, options));
  const auto count = static_cast<uint32_t>(episodes.prompts.size());
  std::vector<std::pair<std::string, std::string>> members = {
      {"of_segment", JsonList(episodes.of_segment)},
      {"prompts", JsonRows(episodes.prompts)},
      {"centroids", JsonRows(episodes.centroids, count)}};
  if (const Tensor* const question = tensors.Find("question"); question != nullptr) {
    ASSIGN_OR_RETURN(const scorers::NearEpisode nearest,
                     scorers::NearestEpisode({.values = episodes.centroids, .dim = dim}, question->values));
    members.emplace_back("nearest", absl::StrCat(nearest.episode));
  }
  return JsonObject(members);
}

absl::StatusOr<std::string> MakeWeights(const Arguments& a, const Tensors& tensors, const Options& options) {
  if (a.weights.empty()) return absl::InvalidArgumentError("--weights FILE is needed: where the weights go");
  const auto make = a.verb == "train" ? Train : Calibrate;
  ASSIGN_OR_RETURN(const Tensors weights, make(tensors, options.policy, options.settings));
  std::ofstream file(a.weights, std::ios::binary);
  if (!(file << SafetensorsOf(weights) && file.flush())) {
    return absl::UnavailableError(absl::StrCat("--weights: can't write ", a.weights));
  }
  uint64_t count = 0;
  for (const auto& [name, tensor] : weights.by_name) count += tensor.values.size();
  return JsonObject({{"policy", absl::StrCat("\"", options.policy, "\"")}, {"weights", absl::StrCat(count)}});
}

absl::StatusOr<std::string> RunVerb(const Arguments& a) {
  ASSIGN_OR_RETURN(const Options options, OptionsOf(a));
  if (a.verb != "budgets") RETURN_IF_ERROR(scorers::FindPolicy(a.policy).status());
  ASSIGN_OR_RETURN(Tensors tensors, ReadTensors(a.input, a.policy));
  if (a.verb == "episodes") return RunEpisodes(tensors);
  if (a.verb == "train" || a.verb == "calibrate") return MakeWeights(a, tensors, options);
  if (!a.weights.empty()) {
    ASSIGN_OR_RETURN(const Tensors weights, ReadTensors(a.weights, a.policy));
    for (const auto& [name, tensor] : weights.by_name) tensors.by_name[name] = tensor;
  }
  if (a.verb == "budgets") return RunBudgets(tensors, options);
  if (IsGrowth(tensors)) return RunGrowth(tensors, options);
  ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem,
                   Problem::Make(tensors, {.tokens_per_block = options.tokens_per_block}));
  ASSIGN_OR_RETURN(const scorers::BoundPolicy policy, BindFor(options, *problem));
  Choice choice;
  const bool of_blocks = a.verb == "prune";
  if (a.verb == "score") {
    ASSIGN_OR_RETURN(choice.scores, Score(*problem, policy, options));
  } else {
    ASSIGN_OR_RETURN(choice,
                     of_blocks ? Prune(*problem, policy, options) : Compact(*problem, policy, options));
  }
  RETURN_IF_ERROR(Explain(a, *problem, choice, of_blocks));
  std::vector<std::pair<std::string, std::string>> members = {
      {"policy", absl::StrCat("\"", a.policy, "\"")},
      {"tokens_per_block", absl::StrCat(problem->kv().shape.tokens_per_block)},
      {"token_scores", JsonRows(choice.scores.tokens, choice.scores.rows)},
      {"block_scores", JsonRows(choice.scores.blocks, choice.scores.rows)}};
  if (a.verb != "score") {
    members.emplace_back(of_blocks ? "victim_blocks" : "victim_tokens", JsonRows(choice.victims));
    members.emplace_back(of_blocks ? "kept_blocks" : "kept_tokens", JsonRows(choice.kept));
  }
  return JsonObject(members);
}

int Main(const std::vector<std::string>& arguments) {
  const auto fail = [](const absl::Status& status, int exit_status) {
    std::fprintf(stderr, "kvpool-lab: %s\n", std::string(status.message()).c_str());
    return exit_status;
  };
  Arguments a;
  Flags flags;
  AddFlags(&a, &flags);
  std::vector<std::string> rest = arguments;
  if (!rest.empty() && !absl::StartsWith(rest[0], "-")) {
    a.verb = rest[0];
    rest.erase(rest.begin());
  }
  const absl::StatusOr<std::vector<std::string>> left = flags.Parse(rest);
  if (!left.ok()) return fail(left.status(), 2);
  if (a.policies_table) {
    std::fputs(scorers::PoliciesTable().c_str(), stdout);
    return 0;
  }
  if (a.version) {
    std::fputs(VersionText("kvpool-lab").c_str(), stdout);
    return 0;
  }
  if (a.help) {
    std::printf(
        "kvpool-lab score|prune|compact|budgets --policy NAME --input FILE [FLAGS]: what a policy would "
        "drop\n"
        "kvpool-lab train --policy NAME --input FILE --weights FILE [FLAGS]: weights of a learned policy\n"
        "kvpool-lab calibrate --policy NAME --input FILE --weights FILE [FLAGS]: weights from statistics of "
        "queries\n"
        "kvpool-lab episodes --input FILE: segments of a history by what they are about, for EpiCache\n\n"
        "Flags:\n%s\nPolicies, with their parameters:\n%s\nExit status: 0 done, 1 bad input, 2 usage.\n",
        flags.Help().c_str(), scorers::PoliciesHelp().c_str());
    return 0;
  }
  if (!left->empty()) {
    return fail(
        absl::InvalidArgumentError(absl::StrCat("unexpected argument ", left->front(), "; see --help")), 2);
  }
  if (a.verb != "score" && a.verb != "prune" && a.verb != "compact" && a.verb != "budgets" &&
      a.verb != "train" && a.verb != "calibrate" && a.verb != "episodes") {
    return fail(absl::InvalidArgumentError("the first argument must be score, prune, compact, budgets, "
                                           "train, calibrate or episodes; see --help"),
                2);
  }
  if (a.input.empty()) return fail(absl::InvalidArgumentError("--input FILE is needed"), 2);
  const absl::StatusOr<std::string> answer = RunVerb(a);
  if (!answer.ok()) return fail(answer.status(), 1);
  std::fputs(answer->c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace kvpool::lab

int main(int argc, char** argv) { return kvpool::lab::Main({argv + 1, argv + argc}); }
