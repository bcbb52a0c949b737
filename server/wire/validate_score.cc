#include "server/wire/validate_score.h"

#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "cuda/scorers/parts/fold_rows.h"
#include "cuda/scorers/parts/signals.h"
#include "kvpool/v1/layout.pb.h"
#include "proto/support/block_ref.h"
#include "proto/support/limits.h"
#include "proto/support/low_layout.h"
#include "proto/support/status_macros.h"
#include "server/wire/field_checks.h"

namespace kvpool {
namespace {

using google::protobuf::RepeatedField;

constexpr size_t kMaxInlinedBytes = 1 << 20;
constexpr int kMaxSettings = 32;
constexpr size_t kMaxSettingBytes = 256;
constexpr int kMaxSignals = std::size(scorers::kSignals);
constexpr int kMaxRanges = 1024;
constexpr uint32_t kMaxHiddenDim = 65536;
constexpr size_t kMaxWeightsNameBytes = 64;
constexpr size_t kMaxEpisodeNameBytes = 128;
constexpr int kMaxEmbeddingDim = 4096;

// The blocks of a sequence and of what is read beside it. No list names a block twice, and no other list
// names one of the sequence.
class NamedBlocks {
 public:
  absl::Status Add(const std::string& field, const RepeatedField<uint64_t>& blocks, bool shared) {
    const int list = ++lists_;
    by_id_.reserve(by_id_.size() + blocks.size());
    for (const uint64_t wire : blocks) {
      const uint32_t id = Index(BlockRef::Unpack(wire).id);
      const auto [it, is_new] = by_id_.try_emplace(id, Place{list, shared});
      if (!is_new && (it->second.list == list || !shared || !it->second.shared)) {
        return Invalid(
            absl::StrCat(field, " names block ", id, " twice",
                         it->second.list == list ? "" : ", or one that something else is read from"));
      }
      it->second.list = list;
    }
    return absl::OkStatus();
  }

 private:
  struct Place {
    int list;
    bool shared;
  };
  int lists_ = 0;
  absl::flat_hash_map<uint32_t, Place> by_id_;
};

absl::Status CheckEnum(const char* field, bool valid, int value) {
  if (valid) return absl::OkStatus();
  return Invalid(absl::StrCat(field, " is ", value, ", which is none of its values"));
}

absl::Status Check(const v1::Sequence& sequence, uint32_t groups, NamedBlocks* named) {
  RETURN_IF_ERROR(CheckKnown("sequence", sequence));
  RETURN_IF_ERROR(CheckRange("sequence.blocks", sequence.blocks_size(), 1, kMaxNames));
  if (sequence.group() >= groups) {
    return Invalid(
        absl::StrCat("sequence.group is ", sequence.group(), "; the layout has ", groups, " groups"));
  }
  return named->Add("sequence.blocks", sequence.blocks(), /*shared=*/false);
}

// Errors quote them.
absl::Status CheckParams(const std::string& field,
                         const google::protobuf::Map<std::string, std::string>& params) {
  RETURN_IF_ERROR(CheckRange(field, params.size(), 0, kMaxSettings));
  for (const auto& [name, value] : params) {
    RETURN_IF_ERROR(CheckSize(absl::StrCat("a name in ", field), name, 1, kMaxSettingBytes));
    RETURN_IF_ERROR(CheckSize(absl::StrCat("a value in ", field), value, 0, kMaxSettingBytes));
  }
  return absl::OkStatus();
}

absl::Status Check(const v1::Policy& policy) {
  RETURN_IF_ERROR(CheckKnown("policy", policy));
  RETURN_IF_ERROR(CheckSize("policy.name", policy.name(), 0, kMaxSettingBytes));
  return CheckParams("policy.params", policy.params());
}

absl::Status Check(const std::string& field, const v1::Data& data, bool counted, NamedBlocks* named) {
  RETURN_IF_ERROR(CheckKnown(field, data));
  RETURN_IF_ERROR(CheckSize(field + ".inlined", data.inlined(), 0, kMaxInlinedBytes));
  RETURN_IF_ERROR(CheckRange(field + ".blocks", data.blocks_size(), 0, kMaxNames));
  if (data.inlined().empty() == data.blocks().empty()) {
    return Invalid(absl::StrCat(field, " has ", data.inlined().size(), " bytes inlined and ",
                                data.blocks_size(), " blocks; must have one of the two"));
  }
  if (data.blocks().empty() && data.offset_bytes() != 0) {
    return Invalid(
        absl::StrCat(field, ".offset_bytes is ", data.offset_bytes(), "; must be 0 without blocks"));
  }
  if (data.bytes() != 0 && (!counted || data.blocks().empty())) {
    return Invalid(absl::StrCat(field, ".bytes is ", data.bytes(), "; must be 0 where the shape says it"));
  }
  return named->Add(field + ".blocks", data.blocks(), /*shared=*/true);
}

// Blocks that something is written to.
absl::Status CheckInto(const std::string& field, const v1::Data& data, NamedBlocks* named) {
  RETURN_IF_ERROR(CheckKnown(field, data));
  RETURN_IF_ERROR(CheckSize(field + ".inlined", data.inlined(), 0, 0));
  RETURN_IF_ERROR(CheckRange(field + ".blocks", data.blocks_size(), 1, kMaxNames));
  if (data.bytes() != 0) return Invalid(absl::StrCat(field, ".bytes is ", data.bytes(), "; must be 0"));
  return named->Add(field + ".blocks", data.blocks(), /*shared=*/false);
}

absl::Status Check(const v1::QueryWindow& window, NamedBlocks* named) {
  RETURN_IF_ERROR(CheckKnown("window", window));
  RETURN_IF_ERROR(CheckRange("window.queries", window.queries(), 1, kMaxQueries));
  RETURN_IF_ERROR(CheckRange("window.q_heads", window.q_heads(), 1, kMaxQueryHeads));
  RETURN_IF_ERROR(CheckRange("window.dtype", window.dtype(), 0, v1::Dtype_MAX));
  if (!(window.scale() >= 0 && std::isfinite(window.scale()))) {
    return Invalid(absl::StrCat("window.scale is ", window.scale(), "; must be finite and not negative"));
  }
  return Check("window.data", window.data(), /*counted=*/false, named);
}

absl::Status Check(const v1::Signal& signal, const v1::Signals& signals, NamedBlocks* named) {
  RETURN_IF_ERROR(CheckKnown("signals.signals", signal));
  const scorers::SignalFacts* const facts = scorers::FindSignal(signal.kind());
  RETURN_IF_ERROR(CheckEnum("signals.kind", facts != nullptr, signal.kind()));
  const std::string& name = v1::SignalKind_Name(signal.kind());
  const bool weights = facts->shape == scorers::SignalShape::kWeights;
  const bool hidden = facts->shape == scorers::SignalShape::kHidden;
  if (signal.per_head() && weights) return Invalid(absl::StrCat(name, ".per_head must not be set"));
  if (signal.per_layer() && weights) return Invalid(absl::StrCat(name, ".per_layer must not be set"));
  if (hidden) RETURN_IF_ERROR(CheckRange("signals.hidden_dim", signals.hidden_dim(), 1, kMaxHiddenDim));
  if (facts->shape == scorers::SignalShape::kWindow) {
    if (signals.has_window())
      return Invalid(absl::StrCat(name, " comes in place of signals.window, not with it"));
    RETURN_IF_ERROR(CheckRange("signals.window_queries", signals.window_queries(), 1, kMaxQueries));
  }
  return Check(name + ".data", signal.data(), weights, named);
}

absl::Status Check(const v1::Signals& signals, NamedBlocks* named) {
  RETURN_IF_ERROR(CheckKnown("signals", signals));
  RETURN_IF_ERROR(CheckRange("signals.signals", signals.signals_size(), 0, kMaxSignals));
  RETURN_IF_ERROR(CheckRange("signals.window_queries", signals.window_queries(), 0, kMaxQueries));
  if (!std::isfinite(signals.now())) return Invalid(absl::StrCat("signals.now is ", signals.now()));
  uint64_t seen = 0;
  for (const v1::Signal& signal : signals.signals()) {
    RETURN_IF_ERROR(Check(signal, signals, named));
    const uint64_t bit = uint64_t{1} << signal.kind();
    if ((seen & bit) != 0)
      return Invalid(absl::StrCat("signals has ", v1::SignalKind_Name(signal.kind()), " twice"));
    seen |= bit;
  }
  return signals.has_window() ? Check(signals.window(), named) : absl::OkStatus();
}

absl::Status Check(const v1::Reductions& reductions) {
  RETURN_IF_ERROR(CheckKnown("reductions", reductions));
  RETURN_IF_ERROR(CheckEnum("reductions.over_tokens", v1::TokenReduction_IsValid(reductions.over_tokens()),
                            reductions.over_tokens()));
  RETURN_IF_ERROR(CheckEnum("reductions.over_heads", v1::PlaneReduction_IsValid(reductions.over_heads()),
                            reductions.over_heads()));
  return CheckEnum("reductions.over_layers", v1::PlaneReduction_IsValid(reductions.over_layers()),
                   reductions.over_layers());
}

// Checks the fields that the scoring verbs have in common.
template <typename Request>
absl::Status CheckScoring(const Request& request, uint32_t groups, NamedBlocks* named) {
  RETURN_IF_ERROR(Check(request.sequence(), groups, named));
  RETURN_IF_ERROR(Check(request.policy()));
  RETURN_IF_ERROR(Check(request.signals(), named));
  return Check(request.reductions());
}
template <typename Request>
absl::Status CheckScoring(const Request& request, uint32_t groups) {
  NamedBlocks named;
  return CheckScoring(request, groups, &named);
}

absl::Status CheckRanges(const std::string& field,
                         const google::protobuf::RepeatedPtrField<v1::TokenRange>& ranges) {
  RETURN_IF_ERROR(CheckRange(field, ranges.size(), 0, kMaxRanges));
  for (const v1::TokenRange& range : ranges) {
    RETURN_IF_ERROR(CheckKnown(field, range));
    if (range.begin() >= range.end()) {
      return Invalid(
          absl::StrCat(field, " begins at ", range.begin(), "; must be below its end, ", range.end()));
    }
  }
  return absl::OkStatus();
}

template <typename Request>
absl::Status CheckProtected(const std::string& verb, const Request& request) {
  RETURN_IF_ERROR(CheckRanges(verb + ".protect", request.protect()));
  RETURN_IF_ERROR(CheckRanges(verb + ".discard", request.discard()));
  const v1::Protection& protection = request.protection();
  RETURN_IF_ERROR(CheckKnown("protection", protection));
  for (const auto& [field, value] : {std::pair("first_tokens", protection.first_tokens()),
                                     std::pair("last_tokens", protection.last_tokens()),
                                     std::pair("first_blocks", protection.first_blocks()),
                                     std::pair("last_blocks", protection.last_blocks())}) {
    RETURN_IF_ERROR(CheckRange(absl::StrCat("protection.", field), value, 0, kMaxSequenceTokens));
  }
  return absl::OkStatus();
}

// Checks that groups are in order. *before is the group of the last call, or -1 before the first.
absl::Status CheckAscending(const char* field, uint32_t group, int* before) {
  if (static_cast<int>(group) <= *before) {
    return Invalid(
        absl::StrCat(field, " has group ", group, " behind ", *before, "; groups must be ascending"));
  }
  *before = static_cast<int>(group);
  return absl::OkStatus();
}

absl::Status CheckEmbedding(const char* field, const RepeatedField<float>& values) {
  RETURN_IF_ERROR(CheckRange(field, values.size(), 1, kMaxEmbeddingDim));
  for (const float value : values) {
    if (!std::isfinite(value)) return Invalid(absl::StrCat(field, " has ", value, "; must be finite"));
  }
  return absl::OkStatus();
}

absl::Status CheckMergeTerms(const v1::Compact& compact) {
  if (!compact.has_merge()) return absl::OkStatus();
  const v1::MergeTerms& terms = compact.merge();
  RETURN_IF_ERROR(CheckKnown("compact.merge", terms));
  if (compact.disposition() != v1::DISPOSITION_MERGE) {
    return Invalid(absl::StrCat("compact.merge goes with DISPOSITION_MERGE; disposition is ",
                                v1::Disposition_Name(compact.disposition())));
  }
  RETURN_IF_ERROR(CheckRange("compact.merge.thresholds", terms.thresholds_size(), 0, 262144));
  for (const float threshold : terms.thresholds()) {
    if (!std::isfinite(threshold)) {
      return Invalid(absl::StrCat("compact.merge.thresholds has ", threshold, "; must be finite"));
    }
  }
  if (!(terms.smoothing() >= 0 && terms.smoothing() <= 1)) {
    return Invalid(absl::StrCat("compact.merge.smoothing is ", terms.smoothing(), "; must be 0 to 1"));
  }
  if (terms.thresholds().empty() && terms.smoothing() != 0) {
    return Invalid(
        absl::StrCat("compact.merge.smoothing is ", terms.smoothing(), "; must be 0 without thresholds"));
  }
  return absl::OkStatus();
}

absl::Status CheckLessTerms(const v1::Compact& compact, NamedBlocks* named) {
  const bool folds = compact.disposition() == v1::DISPOSITION_LESS;
  if (compact.has_less() != folds) {
    return Invalid(absl::StrCat("compact.less goes with DISPOSITION_LESS, and that with it; disposition is ",
                                v1::Disposition_Name(compact.disposition()), ", and less is ",
                                folds ? "absent" : "there"));
  }
  if (!folds) return absl::OkStatus();
  const v1::LessTerms& terms = compact.less();
  RETURN_IF_ERROR(CheckKnown("compact.less", terms));
  RETURN_IF_ERROR(CheckRange("compact.less.rank", terms.rank(), 1, scorers::FoldTile::kMostFeatures));
  RETURN_IF_ERROR(CheckRange("compact.less.hidden", terms.hidden(), 1, scorers::FoldTile::kMostHidden));
  RETURN_IF_ERROR(CheckSize("compact.less.weights_name", terms.weights_name(), 1, kMaxWeightsNameBytes));
  RETURN_IF_ERROR(Check("compact.less.weights", terms.weights(), /*counted=*/false, named));
  if (terms.has_previous()) {
    RETURN_IF_ERROR(Check("compact.less.previous", terms.previous(), /*counted=*/false, named));
  }
  return CheckInto("compact.less.state", terms.state(), named);
}

absl::Status CheckLowTerms(const v1::Compact& compact, NamedBlocks* named) {
  const bool is_low = compact.disposition() == v1::DISPOSITION_LOW;
  if (is_low != compact.has_low()) {
    return Invalid(absl::StrCat("compact.low is ", compact.has_low() ? "" : "not ",
                                "set; it goes with DISPOSITION_LOW, and disposition is ",
                                v1::Disposition_Name(compact.disposition())));
  }
  if (!is_low) return absl::OkStatus();
  const v1::LowTerms& low = compact.low();
  RETURN_IF_ERROR(CheckKnown("compact.low", low));
  if (low.bits() != 0 && !LowLayout::CanHave(low.bits())) {
    return Invalid(absl::StrCat("compact.low.bits is ", low.bits(), "; must be 2, 4, 8, or 0 for ",
                                LowLayout::kDefaultBits));
  }
  RETURN_IF_ERROR(CheckRange("compact.low.blocks", low.blocks_size(), 0, kMaxNames));
  return named->Add("compact.low.blocks", low.blocks(), /*shared=*/false);
}

absl::Status CheckHeads(const v1::Compact& compact) {
  RETURN_IF_ERROR(CheckEnum("compact.heads", v1::Heads_IsValid(compact.heads()), compact.heads()));
  const bool is_given = compact.heads() == v1::HEADS_GIVEN;
  if (compact.heads() != v1::HEADS_ADA && !is_given) {
    if (!compact.has_ada()) return absl::OkStatus();
    return Invalid(absl::StrCat("compact.ada goes with HEADS_ADA and HEADS_GIVEN; heads is ",
                                v1::Heads_Name(compact.heads())));
  }
  const bool drops =
      compact.disposition() == v1::DISPOSITION_UNSPECIFIED || compact.disposition() == v1::DISPOSITION_DROP;
  if (compact.scope() != v1::SCOPE_HEAD || !drops || compact.has_keep()) {
    return Invalid(absl::StrCat("compact.heads is ", v1::Heads_Name(compact.heads()),
                                "; must go with budget_tokens, SCOPE_HEAD and DISPOSITION_DROP: scope is ",
                                v1::Scope_Name(compact.scope()), ", disposition ",
                                v1::Disposition_Name(compact.disposition()),
                                compact.has_keep() ? ", and keep is set" : ""));
  }
  const v1::AdaTerms& ada = compact.ada();
  RETURN_IF_ERROR(CheckKnown("compact.ada", ada));
  if (!(ada.least_share() >= 0 && ada.least_share() <= 1)) {
    return Invalid(absl::StrCat("compact.ada.least_share is ", ada.least_share(), "; must be 0 to 1"));
  }
  if (is_given && (ada.least_share() != 0 || ada.most_tokens() != 0)) {
    return Invalid(absl::StrCat("compact.ada.least_share is ", ada.least_share(), " and most_tokens ",
                                ada.most_tokens(), "; must be 0 with HEADS_GIVEN"));
  }
  RETURN_IF_ERROR(
      CheckRange("compact.ada.tokens", ada.tokens_size(), is_given ? 1 : 0, is_given ? 262144 : 0));
  for (const uint32_t tokens : ada.tokens())
    RETURN_IF_ERROR(CheckRange("compact.ada.tokens", tokens, 1, kMaxSequenceTokens));
  if (ada.most_tokens() != 0) {
    RETURN_IF_ERROR(CheckRange("compact.ada.most_tokens", ada.most_tokens(), compact.budget_tokens(),
                               kMaxSequenceTokens));
  }
  RETURN_IF_ERROR(CheckRange("compact.ada.counts", ada.counts_size(), 0, 262144));
  if (ada.counts().empty() && ada.counted_tokens() != 0) {
    return Invalid(
        absl::StrCat("compact.ada.counted_tokens is ", ada.counted_tokens(), "; must be 0 without counts"));
  }
  for (const uint32_t count : ada.counts()) {
    if (count <= ada.counted_tokens()) continue;
    return Invalid(absl::StrCat("compact.ada.counts has ", count, "; must be at most counted_tokens, ",
                                ada.counted_tokens()));
  }
  return absl::OkStatus();
}

absl::Status CheckKeep(const v1::Compact& compact) {
  const RepeatedField<uint32_t>& positions = compact.keep().positions();
  RETURN_IF_ERROR(CheckKnown("compact.keep", compact.keep()));
  RETURN_IF_ERROR(CheckRange("compact.keep.positions", positions.size(), 1, 262144));
  for (int i = 1; i < positions.size(); ++i) {
    if (positions[i - 1] < positions[i]) continue;
    return Invalid(absl::StrCat("compact.keep.positions has ", positions[i], " behind ", positions[i - 1],
                                "; must be ascending"));
  }
  if (compact.has_policy() || compact.has_signals() || compact.has_reductions() || compact.has_protection() ||
      !compact.protect().empty() || !compact.discard().empty() || compact.scope() != v1::SCOPE_UNSPECIFIED) {
    return Invalid(
        "compact has keep: policy, signals, reductions, scope, protection and discard must not be set");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateScore(const v1::Score& score, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("score", score));
  RETURN_IF_ERROR(CheckScoring(score, groups));
  RETURN_IF_ERROR(CheckEnum("score.scope", v1::Scope_IsValid(score.scope()), score.scope()));
  RETURN_IF_ERROR(CheckRange("score.budget_tokens", score.budget_tokens(), 0, kMaxSequenceTokens));
  if (score.token_scores() || score.block_scores()) return absl::OkStatus();
  return Invalid("score: neither token_scores nor block_scores is set; at least one must be");
}

absl::Status ValidateSelect(const v1::Select& select, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("select", select));
  NamedBlocks named;
  RETURN_IF_ERROR(Check(select.sequence(), groups, &named));
  if (!select.has_window())
    return Invalid("select has no window: its queries are what blocks are selected for");
  RETURN_IF_ERROR(Check(select.window(), &named));
  if (select.has_into()) RETURN_IF_ERROR(CheckInto("select.into", select.into(), &named));
  RETURN_IF_ERROR(CheckRange("select.first_blocks", select.first_blocks(), 0, kMaxNames));
  RETURN_IF_ERROR(CheckRange("select.last_blocks", select.last_blocks(), 0, kMaxNames));
  switch (select.budget_case()) {
    case v1::Select::kBudgetTokens:
      return CheckRange("select.budget_tokens", select.budget_tokens(), 1, kMaxSequenceTokens);
    case v1::Select::kBudgetBlocks:
      return CheckRange("select.budget_blocks", select.budget_blocks(), 1, kMaxNames);
    case v1::Select::BUDGET_NOT_SET:
      break;
  }
  return Invalid("select has no budget: budget_tokens or budget_blocks must be set");
}

absl::Status ValidatePrune(const v1::Prune& prune, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("prune", prune));
  RETURN_IF_ERROR(CheckScoring(prune, groups));
  RETURN_IF_ERROR(CheckProtected("prune", prune));
  switch (prune.budget_case()) {
    case v1::Prune::kBudgetTokens:
      return CheckRange("prune.budget_tokens", prune.budget_tokens(), 1, kMaxSequenceTokens);
    case v1::Prune::kBudgetBlocks:
      return CheckRange("prune.budget_blocks", prune.budget_blocks(), 1, kMaxNames);
    case v1::Prune::BUDGET_NOT_SET:
      break;
  }
  return Invalid("prune has no budget: budget_tokens or budget_blocks must be set");
}

absl::Status ValidateCompact(const v1::Compact& compact, uint32_t groups) {
  NamedBlocks named;
  RETURN_IF_ERROR(CheckKnown("compact", compact));
  RETURN_IF_ERROR(CheckScoring(compact, groups, &named));
  RETURN_IF_ERROR(CheckEnum("compact.scope", v1::Scope_IsValid(compact.scope()), compact.scope()));
  RETURN_IF_ERROR(CheckEnum("compact.disposition", v1::Disposition_IsValid(compact.disposition()),
                            compact.disposition()));
  RETURN_IF_ERROR(CheckMergeTerms(compact));
  RETURN_IF_ERROR(CheckLowTerms(compact, &named));
  RETURN_IF_ERROR(CheckLessTerms(compact, &named));
  RETURN_IF_ERROR(CheckHeads(compact));
  switch (compact.choice_case()) {
    case v1::Compact::kBudgetTokens:
      RETURN_IF_ERROR(CheckRange("compact.budget_tokens", compact.budget_tokens(), 1, kMaxSequenceTokens));
      return CheckProtected("compact", compact);
    case v1::Compact::kKeep:
      return CheckKeep(compact);
    case v1::Compact::CHOICE_NOT_SET:
      break;
  }
  return Invalid("compact chooses nothing: budget_tokens or keep must be set");
}

absl::Status ValidatePlanBudgets(const v1::PlanBudgets& plan, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("plan_budgets", plan));
  RETURN_IF_ERROR(
      CheckEnum("plan_budgets.method",
                v1::BudgetMethod_IsValid(plan.method()) && plan.method() != v1::BUDGET_METHOD_UNSPECIFIED,
                plan.method()));
  RETURN_IF_ERROR(CheckRange("plan_budgets.tokens_per_layer", plan.tokens_per_layer(), 1, kMaxLayerTokens));
  RETURN_IF_ERROR(CheckParams("plan_budgets.params", plan.params()));
  RETURN_IF_ERROR(CheckRange("plan_budgets.statistics", plan.statistics_size(), 0, 2048));
  RETURN_IF_ERROR(CheckRange("plan_budgets.sequences", plan.sequences_size(), 0, kMaxGroups));
  if (plan.sequences().empty()) return absl::OkStatus();
  const bool observes = plan.method() == v1::BUDGET_METHOD_CAKE || plan.method() == v1::BUDGET_METHOD_D2O;
  if (!observes || !plan.statistics().empty()) {
    return Invalid(
        "plan_budgets.sequences: only BUDGET_METHOD_CAKE and BUDGET_METHOD_D2O take them, and in place of "
        "statistics");
  }
  int before = -1;
  for (const v1::GroupSequence& group : plan.sequences()) {
    NamedBlocks named;
    RETURN_IF_ERROR(CheckKnown("plan_budgets.sequences", group));
    RETURN_IF_ERROR(Check(group.sequence(), groups, &named));
    RETURN_IF_ERROR(Check(group.window(), &named));
    RETURN_IF_ERROR(CheckAscending("plan_budgets.sequences", group.sequence().group(), &before));
  }
  return absl::OkStatus();
}

absl::Status ValidatePutEpisode(const v1::PutEpisode& put, uint32_t groups) {
  RETURN_IF_ERROR(CheckKnown("put_episode", put));
  RETURN_IF_ERROR(CheckSize("put_episode.name", put.name(), 1, kMaxEpisodeNameBytes));
  RETURN_IF_ERROR(CheckRange("put_episode.sequences", put.sequences_size(), 0, kMaxGroups));
  if (put.sequences().empty()) {
    return put.centroid().empty() ? absl::OkStatus()
                                  : Invalid("put_episode removes a set: centroid must be empty");
  }
  RETURN_IF_ERROR(CheckEmbedding("put_episode.centroid", put.centroid()));
  NamedBlocks named;
  int before = -1;
  for (const v1::Sequence& sequence : put.sequences()) {
    RETURN_IF_ERROR(Check(sequence, groups, &named));
    if (sequence.fresh()) return Invalid("put_episode.sequences.fresh must not be set");
    RETURN_IF_ERROR(CheckAscending("put_episode.sequences", sequence.group(), &before));
  }
  return absl::OkStatus();
}

absl::Status ValidateChooseEpisode(const v1::ChooseEpisode& choose) {
  RETURN_IF_ERROR(CheckKnown("choose_episode", choose));
  RETURN_IF_ERROR(CheckSize("choose_episode.name", choose.name(), 0, kMaxEpisodeNameBytes));
  if (choose.name().empty() == choose.embedding().empty()) {
    return Invalid(absl::StrCat("choose_episode has a name of ", choose.name().size(),
                                " bytes and an embedding of ", choose.embedding_size(),
                                " numbers; must have one of the two"));
  }
  return choose.embedding().empty() ? absl::OkStatus()
                                    : CheckEmbedding("choose_episode.embedding", choose.embedding());
}

}  // namespace kvpool
