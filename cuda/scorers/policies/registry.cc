#include "cuda/scorers/policies/registry.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvpool_policies/all.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool::scorers {
namespace {

#define KVPOOL_FACTS(Policy) &Policy::kFacts,
constexpr const PolicyFacts* kPolicies[] = {KVPOOL_POLICIES(KVPOOL_FACTS)};
#undef KVPOOL_FACTS

// std::string_view and absl::string_view are two types in this Abseil.
absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

struct NeedName {
  Needs needs;
  const char* name;
};
// Signals have their words in kSignals; all those of a query window share one text here.
constexpr NeedName kNeedNames[] = {
    {kNeedNorms | kNeedUnitAnchor | kNeedMeanAnchor | kNeedKeyBounds | kNeedKeys, "K"},
    {kNeedValues | kNeedValueNorms, "V"},
    {kNeedQueries | NeedsOf(SignalShape::kWindow), "a query window"},
    {kNeedHost, "a host policy"},
};

std::string Wanted(const ParamFacts& param) {
  switch (param.type) {
    case ParamType::kBool:
      return "true or false";
    case ParamType::kChoice:
      return absl::StrJoin(absl::StrSplit(View(param.choices), '|'), ", ");
    case ParamType::kInt:
      return absl::StrCat(param.choices == "odd" ? "an odd integer" : "an integer", " from ", param.min,
                          " to ", static_cast<int64_t>(param.max));
    case ParamType::kFloat:
      return absl::StrCat("a number from ", param.min, " to ", param.max);
  }
  return "";
}

bool ParseValue(const ParamFacts& param, const std::string& text, float* value) {
  switch (param.type) {
    case ParamType::kBool: {
      bool parsed;
      if (!absl::SimpleAtob(text, &parsed)) return false;
      *value = parsed ? 1 : 0;
      return true;
    }
    case ParamType::kChoice: {
      const std::vector<absl::string_view> choices = absl::StrSplit(View(param.choices), '|');
      const auto found = std::find(choices.begin(), choices.end(), absl::string_view(text));
      if (found == choices.end()) return false;
      *value = static_cast<float>(found - choices.begin());
      return true;
    }
    case ParamType::kInt: {
      // A float holds integers of up to 24 bits exactly; all limits above that are round numbers.
      int64_t parsed;
      if (!absl::SimpleAtoi(text, &parsed)) return false;
      *value = static_cast<float>(parsed);
      return *value >= param.min && *value <= param.max && (param.choices != "odd" || parsed % 2 != 0);
    }
    case ParamType::kFloat:
      return absl::SimpleAtof(text, value) && *value >= param.min && *value <= param.max;
  }
  return false;
}

Params Defaults(const PolicyFacts& facts) {
  KVPOOL_CHECK(facts.params.size() <= kMaxParams, "%s has too many parameters", facts.name.data());
  Params params;
  for (size_t i = 0; i < facts.params.size(); ++i) params.values[i] = facts.params[i].default_value;
  return params;
}

// True if the policy has a parameter "host".
bool TakesHost(const PolicyFacts& facts) { return !facts.default_host.empty(); }

absl::Status SetParam(const PolicyFacts& facts, absl::string_view prefix, absl::string_view name,
                      const std::string& text, Params* params) {
  for (size_t i = 0; i < facts.params.size(); ++i) {
    const ParamFacts& param = facts.params[i];
    if (name != View(param.name)) continue;
    if (ParseValue(param, text, &params->values[i])) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("parameter ", prefix, name, " of policy ",
                                                   View(facts.name), ": \"", text, "\" is not ",
                                                   Wanted(param)));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "policy ", View(facts.name), " has no parameter \"", name, "\"; ",
      facts.params.empty()
          ? "it has none"
          : absl::StrCat("there are: ",
                         absl::StrJoin(facts.params, ", ", [](std::string* out, const ParamFacts& param) {
                           absl::StrAppend(out, View(param.name));
                         }))));
}

std::string DefaultText(const PolicyFacts& facts, const ParamFacts& param) {
  if (param.name == "host") return std::string(facts.default_host);
  switch (param.type) {
    case ParamType::kBool:
      return param.default_value != 0 ? "true" : "false";
    case ParamType::kChoice: {
      const std::vector<std::string> choices = absl::StrSplit(View(param.choices), '|');
      return choices[static_cast<size_t>(param.default_value)];
    }
    case ParamType::kInt:
    case ParamType::kFloat:
      return absl::StrCat(param.default_value);
  }
  return "";
}

}  // namespace

absl::Span<const PolicyFacts* const> Policies() { return kPolicies; }

const PolicyFacts& FactsOf(PolicyId id) { return *kPolicies[static_cast<uint32_t>(id)]; }

absl::StatusOr<PolicyId> FindPolicy(absl::string_view name) {
  for (size_t i = 0; i < std::size(kPolicies); ++i) {
    if (View(kPolicies[i]->name) == name) return PolicyId{static_cast<uint32_t>(i)};
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "policy \"", name, "\" is unknown; there are: ",
      absl::StrJoin(kPolicies, ", ", [](std::string* out, const PolicyFacts* p) { out->append(p->name); })));
}

Needs BoundPolicy::needs() const {
  return facts().NeedsOf(params) | (has_host() ? FactsOf(host).NeedsOf(host_params) : 0);
}

absl::StatusOr<BoundPolicy> BindPolicy(absl::string_view name,
                                       absl::Span<const std::pair<std::string, std::string>> settings) {
  BoundPolicy bound;
  ASSIGN_OR_RETURN(bound.id, FindPolicy(name));
  const PolicyFacts& facts = bound.facts();
  bound.params = Defaults(facts);
  if (TakesHost(facts)) {
    std::string host(facts.default_host);
    for (const auto& [key, value] : settings) {
      if (key == "host") host = value;
    }
    ASSIGN_OR_RETURN(bound.host, FindPolicy(host));
    if (TakesHost(FactsOf(bound.host))) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter host of policy ", name, ": \"", host, "\" is itself over another policy"));
    }
    bound.host_params = Defaults(FactsOf(bound.host));
  }
  for (const auto& [key, value] : settings) {
    absl::string_view rest = key;
    if (TakesHost(facts) && rest == "host") continue;
    if (TakesHost(facts) && absl::ConsumePrefix(&rest, "host.")) {
      RETURN_IF_ERROR(SetParam(FactsOf(bound.host), "host.", rest, value, &bound.host_params));
    } else {
      RETURN_IF_ERROR(SetParam(facts, "", rest, value, &bound.params));
    }
  }
  return bound;
}

std::string DescribeNeeds(Needs needs) {
  std::vector<absl::string_view> names;
  for (const NeedName& entry : kNeedNames) {
    if ((needs & entry.needs) != 0) names.push_back(entry.name);
  }
  for (const SignalFacts& facts : kSignals) {
    if (facts.shape != SignalShape::kWindow && (needs & facts.need()) != 0) names.push_back(facts.words);
  }
  if (names.empty()) return "nothing";
  const std::string last(names.back());
  names.pop_back();
  return names.empty() ? last : absl::StrCat(absl::StrJoin(names, ", "), " and ", last);
}

std::string DescribeReads(Needs needs) {
  constexpr Needs kAnchors = kNeedUnitAnchor | kNeedMeanAnchor;
  constexpr Needs kWindow = NeedsOf(SignalShape::kWindow);
  // As LayOutRecord has it: the norms of K and V are computed together.
  const char* const once = (needs & (kNeedNorms | kNeedValueNorms | kAnchors)) != 0 ? "K + V once"
                           : (needs & kNeedKeyBounds) != 0                          ? "K once"
                                                                                    : nullptr;
  const int keys = ((needs & kWindow) != 0 ? 2 : 0) + ((needs & kAnchors) != 0) + ((needs & kNeedKeys) != 0);
  std::vector<std::string> each;
  if (keys > 0) each.push_back(keys == 1 ? "K" : absl::StrCat(keys, " K"));
  if ((needs & kNeedValues) != 0) each.push_back("V");
  const std::string of_each = absl::StrJoin(each, " + ");
  if (once == nullptr) return each.empty() ? "nothing" : of_each;
  return each.empty() ? once : absl::StrCat(once, ", ", of_each);
}

std::string PoliciesHelp() {
  std::string text;
  for (const PolicyFacts* facts : kPolicies) {
    absl::StrAppend(&text, "  ", View(facts->name), ": ", View(facts->description), " Needs ",
                    DescribeNeeds(facts->NeedsOf(Defaults(*facts))), ". ", View(facts->source), ".\n");
    for (const ParamFacts& param : facts->params) {
      absl::StrAppend(&text, "      ", View(param.name), "=", DefaultText(*facts, param), ": ",
                      View(param.help));
      if (param.name != "host") absl::StrAppend(&text, " (", Wanted(param), ")");
      absl::StrAppend(&text, "\n");
    }
  }
  return text;
}

std::string PoliciesTable() {
  std::string text =
      "| policy | what stays | needs | reads | parameters | source |\n| --- | --- | --- | --- | --- | --- "
      "|\n";
  for (const PolicyFacts* facts : kPolicies) {
    absl::StrAppend(&text, "| `", View(facts->name), "` | ", View(facts->description), " | ",
                    DescribeNeeds(facts->NeedsOf(Defaults(*facts))), " | ",
                    DescribeReads(facts->NeedsOf(Defaults(*facts))), " | ",
                    absl::StrJoin(facts->params, "<br>",
                                  [facts](std::string* out, const ParamFacts& param) {
                                    absl::StrAppend(out, "`", View(param.name), "=",
                                                    DefaultText(*facts, param), "` ", View(param.help));
                                  }),
                    " | ", View(facts->title), ", ", View(facts->source), " |\n");
  }
  return text;
}

}  // namespace kvpool::scorers
