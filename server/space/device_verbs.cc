#include "server/space/device_verbs.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/scorers/fold.h"
#include "cuda/scorers/policies/registry.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/scoring/budget_plan.h"
#include "server/scoring/drift_sample.h"
#include "server/scoring/sequence_shape.h"
#include "server/space/in_parts.h"

namespace kvpool {
namespace {

using scorers::Scope;

// A session may have a quarter of a device's queue.
constexpr size_t kSharesOfQueue = 4;
// An answer has at most so many scores or kept positions: it stays below gRPC's 4 MiB.
constexpr uint64_t kMostNumbers = 262144;
// Scores of tokens that heads share a budget by. They are ranked on the runner's thread, some 100 ns each.
constexpr uint64_t kMostShared = 1 << 25;
// Places of a compaction's tokens, those of padding among them.
constexpr uint64_t kMostPlaces = 1 << 22;
absl::StatusOr<scorers::BoundPolicy> Bind(const v1::Policy& policy) {
  std::vector<std::pair<std::string, std::string>> settings(policy.params().begin(), policy.params().end());
  std::sort(settings.begin(), settings.end());
  return scorers::BindPolicy(policy.name().empty() ? scorers::kDefaultPolicy : policy.name(), settings);
}

Scope ScopeOf(v1::Scope scope) {
  if (scope == v1::SCOPE_LAYER) return Scope::kLayer;
  return scope == v1::SCOPE_HEAD ? Scope::kHead : Scope::kSequence;
}

scorers::PlaneReduction ReductionOf(v1::PlaneReduction reduction) {
  return reduction == v1::PLANE_REDUCTION_MAX ? scorers::PlaneReduction::kMax
                                              : scorers::PlaneReduction::kMean;
}

scorers::TokenReduction ReductionOf(v1::TokenReduction reduction) {
  switch (reduction) {
    case v1::TOKEN_REDUCTION_SUM:
      return scorers::TokenReduction::kSum;
    case v1::TOKEN_REDUCTION_MAX:
      return scorers::TokenReduction::kMax;
    case v1::TOKEN_REDUCTION_P90:
      return scorers::TokenReduction::kP90;
    default:
      return scorers::TokenReduction::kMean;
  }
}

template <typename Request>  // Prune or Compact.
void SetProtection(const Request& request, const SequenceWork& work, DeviceOperation* operation) {
  operation->protection = scorers::ProtectionOf(
      work.request.policy, work.shape(), work.signals.relative.window.own_tokens(), operation->budget_tokens);
  if (request.has_protection()) {
    operation->protection = {.first_tokens = request.protection().first_tokens(),
                             .last_tokens = request.protection().last_tokens(),
                             .first_blocks = request.protection().first_blocks(),
                             .last_blocks = request.protection().last_blocks()};
  }
  for (const v1::TokenRange& range : request.protect()) {
    operation->protect.push_back({.begin = range.begin(), .end = range.end()});
  }
  for (const v1::TokenRange& range : request.discard()) {
    operation->discard.push_back({.begin = range.begin(), .end = range.end()});
  }
}

absl::Status CheckRanges(const std::string& field,
                         const google::protobuf::RepeatedPtrField<v1::TokenRange>& ranges,
                         const scorers::KvShape& shape) {
  for (const v1::TokenRange& range : ranges) {
    if (range.end() <= shape.tokens) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(field, " ends at ", range.end(), "; the sequence has ", shape.tokens, " tokens"));
  }
  return absl::OkStatus();
}

absl::Status CheckThresholds(const v1::MergeTerms& terms, uint64_t planes) {
  const auto given = static_cast<uint64_t>(terms.thresholds_size());
  if (given <= 1 || given == planes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("compact.merge.thresholds has ", given,
                                                 " numbers; must have none, 1, or one for each of ", planes,
                                                 " planes"));
}

absl::Status CheckNumbers(const char* what, uint64_t numbers) {
  if (numbers <= kMostNumbers) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": the answer would have ", numbers, " numbers; the limit is ", kMostNumbers));
}

const char* WhyShort(Shortfall shortfall) {
  switch (shortfall) {
    case Shortfall::kNone:
      return "none";
    case Shortfall::kPressure:
      return "nothing free and nothing that may be reclaimed";
    case Shortfall::kCredit:
      return "the rest is promised to other sessions";
    case Shortfall::kCap:
      return "max_blocks of the session";
    case Shortfall::kReclaiming:
      return "the rest is being reclaimed";
  }
  return "";
}

}  // namespace

absl::Status DeviceVerbs::CheckCanRun() const {
  const v1::Layout& layout = state_.facts.layout;
  if (layout.encoding() != v1::ENCODING_STRIDED) {
    return absl::FailedPreconditionError(
        absl::StrCat("the layout is ", layout.encoding() == v1::ENCODING_PACKED ? "packed" : "opaque",
                     ": only strided layouts can be scored, pruned and compacted"));
  }
  for (const RunnerOrWhy& rank : runners_) {
    if (rank.runner == nullptr) return rank.why;
  }
  return absl::OkStatus();
}

absl::Status DeviceVerbs::CheckGuard(const DeviceOperation& operation) const {
  QualityGuard* const guard = runners_[0].runner->options().guard;
  if (guard == nullptr || !IsGuarded(operation.request)) return absl::OkStatus();
  return guard->Admit(operation.space, operation.policy);
}

absl::StatusOr<std::shared_ptr<DeviceOperation>> DeviceVerbs::Prepare(Turn& turn, Session* session,
                                                                      const v1::Operation& request) {
  RETURN_IF_ERROR(CheckCanRun());
  auto operation = std::make_shared<DeviceOperation>();
  operation->session = session->shared_from_this();
  operation->request = request;
  operation->space = state_.facts.id;
  operation->tenant = state_.facts.tenant;
  for (const RunnerOrWhy& rank : runners_) operation->ranks.push_back({.runner = rank.runner});
  absl::Status status;
  const v1::Operation& own = operation->request;  // What is staged out of the request is read when it runs.
  if (own.has_score()) {
    status = PrepareScore(turn, own.score(), operation.get());
  } else if (own.has_select()) {
    status = PrepareSelect(turn, own.select(), operation.get());
  } else if (own.has_prune()) {
    status = PreparePrune(turn, own.prune(), operation.get());
  } else if (own.has_compact()) {
    status = PrepareCompact(turn, own.compact(), operation.get());
  } else {
    status = PreparePlanBudgets(turn, own.plan_budgets(), operation.get());
  }
  RETURN_IF_ERROR(status);
  return operation;
}

absl::Status DeviceVerbs::Submit(Turn& turn, std::shared_ptr<DeviceOperation> operation) {
  Session* session = operation->session.get();
  operation->id = session->next_operation++;
  // One session leaves room in the queue for others.
  const size_t share = std::max<size_t>(1, runners_[0].runner->options().queue_limit / kSharesOfQueue);
  const size_t own = session->device_operations.size();
  absl::Status status;
  if (own < share) {
    status = DeviceRunner::Submit(operation);
  } else {
    runners_[0].runner->CountSessionRefusal();
    status = absl::ResourceExhaustedError(absl::StrCat(own, " operations of session ", session->terms.id,
                                                       " wait for the device; limit ", share));
  }
  if (status.ok()) {
    session->device_operations.push_back(std::move(operation));
  } else {
    operation->status = status;
    RETURN_IF_ERROR(Commit(turn, operation.get()));
  }
  return status;
}

absl::Status DeviceVerbs::Commit(Turn& turn, DeviceOperation* operation) {
  std::vector<BlockRef> released(operation->destinations);
  if (operation->status.ok()) {
    released.erase(released.begin(), released.begin() + operation->destinations_used);
    // Where holds outlive the daemon, these go when the member has heard of it.
    if (!state_.facts.kept)
      released.insert(released.end(), operation->released.begin(), operation->released.end());
    if (!operation->places.empty()) {
      const absl::Span<const float> places(operation->places);
      RETURN_IF_ERROR(InParts(turn, *operation->session, absl::MakeConstSpan(operation->sequences[0].refs),
                              [&](size_t first, absl::Span<const uint64_t> part) {
                                refs_.clear();
                                for (const uint64_t ref : part) refs_.push_back(BlockRef::Unpack(ref));
                                state_.pool.SetScores(turn.now, refs_, places.subspan(first, part.size()));
                              }));
    }
  }
  return Release(turn, *operation, released);
}

absl::Status DeviceVerbs::Release(Turn& turn, const DeviceOperation& operation,
                                  absl::Span<const BlockRef> refs) {
  const Session& session = *operation.session;
  while (!refs.empty()) {
    const absl::Span<const BlockRef> part = refs.last(std::min(refs.size(), Turn::kNames));
    refs.remove_suffix(part.size());
    verdicts_.assign(part.size(), Verdict::kDone);
    state_.pool.Release(session.holder, turn.now, part, absl::MakeSpan(verdicts_));
    for (size_t i = 0; i < part.size(); ++i) {
      KVPOOL_CHECK(verdicts_[i] == Verdict::kDone,
                   "space %lu block %u generation %u was lost to operation %lu", state_.facts.id,
                   Index(part[i].id), part[i].generation, operation.id);
    }
    turn.Worked(part.size());
    turn.Breathe();
    if (session.ended) return absl::AbortedError(session.end_reason);
  }
  return absl::OkStatus();
}

// ----------------------------------------------------------------------------------------------- sequences

absl::Status DeviceVerbs::CheckRefs(Turn& turn, const Session& session, std::string_view field,
                                    std::optional<uint32_t> group, absl::Span<const uint64_t> refs) {
  return InParts(turn, session, refs, [&](size_t first, absl::Span<const uint64_t> part) {
    refs_.clear();
    for (const uint64_t ref : part) refs_.push_back(BlockRef::Unpack(ref));
    verdicts_.assign(refs_.size(), Verdict::kDone);
    state_.pool.CheckHeld(session.holder, group, refs_, absl::MakeSpan(verdicts_));
    for (size_t i = 0; i < refs_.size(); ++i) {
      if (verdicts_[i] == Verdict::kDone && refs_[i] != session.sink) continue;
      const absl::Status why = verbs_.WhyRefused(session, refs_[i], verdicts_[i]);
      std::string wanted;
      if (verdicts_[i] == Verdict::kWrongState) {
        wanted = group.has_value() ? absl::StrCat(", in another group than ", *group) : "; must be leased";
      }
      return absl::Status(why.code(), absl::StrCat(std::string(field), "[", first + i,
                                                   "]: ", std::string(why.message()), wanted));
    }
    return absl::OkStatus();
  });
}

absl::Status DeviceVerbs::PrepareSequence(Turn& turn, const Session& session, const v1::Sequence& sequence,
                                          SequenceWork* work) {
  const v1::LayerGroup& group = state_.facts.layout.groups(static_cast<int>(sequence.group()));
  ASSIGN_OR_RETURN(const scorers::KvView view, ViewOfGroup(group, sequence));
  const absl::Span<const uint64_t> refs(sequence.blocks().data(), sequence.blocks_size());
  RETURN_IF_ERROR(CheckRefs(turn, session, "sequence.blocks", sequence.group(), refs));
  work->group = sequence.group();
  work->fresh = sequence.fresh();
  work->refs.assign(refs.begin(), refs.end());
  work->shares.resize(runners_.size());
  for (size_t rank = 0; rank < runners_.size(); ++rank) {
    SequenceShare& share = work->shares[rank];
    share.addresses.reserve(refs.size());
    // Its blocks stay where they are and held: nothing of the session that could give them back goes on meanwhile.
    RETURN_IF_ERROR(InParts(
        turn, session, refs,
        [&](size_t, absl::Span<const uint64_t> part) {
          for (const uint64_t ref : part) {
            share.addresses.push_back(state_.growth.AddressOf(BlockRef::Unpack(ref).id, rank));
          }
        },
        kAddressesOfName));
    share.kv = view;
    share.kv.blocks = share.addresses.data();
  }
  work->request.shape = view.shape;
  return absl::OkStatus();
}

absl::Status DeviceVerbs::PlanWork(const ScoreTerms& terms, SequenceWork* work) const {
  scorers::ScoreRequest& request = work->request;
  ASSIGN_OR_RETURN(request.policy, Bind(*terms.policy));
  request.scope = ScopeOf(terms.scope);
  request.over_tokens = ReductionOf(terms.reductions->over_tokens());
  request.over_heads = ReductionOf(terms.reductions->over_heads());
  request.over_layers = ReductionOf(terms.reductions->over_layers());
  request.budget_tokens = terms.budget_tokens;
  request.first_model_layer = state_.facts.layout.groups(static_cast<int>(work->group)).layers(0);
  const auto ranks = static_cast<uint32_t>(runners_.size());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    ASSIGN_OR_RETURN(work->shares[rank].plan,
                     runners_[rank].runner->compute().Plan(scorers::RequestOfRank(request, rank, ranks),
                                                           work->signals.relative));
  }
  return absl::OkStatus();
}

// --------------------------------------------------------------------------------------------------- verbs

absl::Status DeviceVerbs::PrepareScore(Turn& turn, const v1::Score& score, DeviceOperation* operation) {
  SequenceWork& work = operation->sequences.emplace_back();
  RETURN_IF_ERROR(PrepareSequence(turn, *operation->session, score.sequence(), &work));
  RETURN_IF_ERROR(StageSignals(turn, *operation->session, score.signals(), &work));
  RETURN_IF_ERROR(PlanWork({.policy = &score.policy(),
                            .reductions = &score.reductions(),
                            .scope = score.scope(),
                            .budget_tokens = score.budget_tokens()},
                           &work));
  operation->policy = work.request.policy.facts().name;
  const uint64_t rows = work.rows();
  return CheckNumbers("score", (score.token_scores() ? rows * work.shape().tokens : 0) +
                                   (score.block_scores() ? rows * work.shape().blocks() : 0));
}

absl::Status DeviceVerbs::PrepareSelect(Turn& turn, const v1::Select& select, DeviceOperation* operation) {
  SequenceWork& work = operation->sequences.emplace_back();
  RETURN_IF_ERROR(PrepareSequence(turn, *operation->session, select.sequence(), &work));
  RETURN_IF_ERROR(StageWindow(turn, *operation->session, select.window(), &work));
  v1::Policy policy;
  policy.set_name("quest");
  v1::Reductions reductions;
  reductions.set_over_tokens(v1::TOKEN_REDUCTION_MAX);  // All of a block's tokens have its bound.
  RETURN_IF_ERROR(PlanWork({.policy = &policy, .reductions = &reductions, .scope = v1::SCOPE_HEAD}, &work));
  operation->policy = work.request.policy.facts().name;
  const uint32_t per_block = work.shape().tokens_per_block;
  if (select.has_budget_tokens() && select.budget_tokens() < per_block) {
    return absl::InvalidArgumentError(absl::StrCat("select.budget_tokens is ", select.budget_tokens(),
                                                   "; must be at least the tokens of a block, ", per_block));
  }
  const uint32_t budget =
      select.has_budget_blocks() ? select.budget_blocks() : select.budget_tokens() / per_block;
  const uint32_t blocks = work.shape().blocks();
  const uint32_t first = std::min(select.first_blocks(), blocks);
  const uint32_t always = first + std::min(select.last_blocks(), blocks - first);
  if (always > budget) {
    return absl::InvalidArgumentError(absl::StrCat("select: first_blocks and last_blocks are ", always,
                                                   " blocks of this sequence; the budget is ", budget));
  }
  operation->selected_blocks = std::min(budget, blocks);
  // They are ranked on the runner's thread, some 100 ns each.
  constexpr uint64_t kMostRanked = 1 << 25;
  if (uint64_t{work.rows()} * blocks > kMostRanked) {
    return absl::ResourceExhaustedError(absl::StrCat("select ranks ", uint64_t{work.rows()} * blocks,
                                                     " blocks, ", blocks, " of each plane; the limit is ",
                                                     kMostRanked));
  }
  RETURN_IF_ERROR(
      CheckNumbers("select", uint64_t{work.rows()} * operation->selected_blocks * (select.bounds() ? 2 : 1)));
  if (!select.has_into()) return absl::OkStatus();
  const ArrayShape positions = {
      .bytes = uint64_t{work.shape().planes()} * operation->selected_blocks * sizeof(int32_t),
      .element_bytes = sizeof(int32_t)};
  const Session& session = *operation->session;
  RETURN_IF_ERROR(CheckInBlocks(turn, session, "select.into", select.into(), positions));
  for (size_t rank = 0; rank < operation->ranks.size(); ++rank) {
    ASSIGN_OR_RETURN(operation->ranks[rank].into,
                     PiecesOf(turn, session, select.into(), positions.bytes, rank));
  }
  return absl::OkStatus();
}

absl::Status DeviceVerbs::PreparePrune(Turn& turn, const v1::Prune& prune, DeviceOperation* operation) {
  SequenceWork& work = operation->sequences.emplace_back();
  RETURN_IF_ERROR(PrepareSequence(turn, *operation->session, prune.sequence(), &work));
  RETURN_IF_ERROR(CheckRanges("prune.protect", prune.protect(), work.shape()));
  RETURN_IF_ERROR(CheckRanges("prune.discard", prune.discard(), work.shape()));
  RETURN_IF_ERROR(StageSignals(turn, *operation->session, prune.signals(), &work));
  const v1::LayerGroup& group = state_.facts.layout.groups(static_cast<int>(work.group));
  // Both limits were checked: at most 65536 blocks of 4096 tokens.
  operation->budget_tokens =
      prune.has_budget_blocks() ? prune.budget_blocks() * group.tokens_per_block() : prune.budget_tokens();
  RETURN_IF_ERROR(PlanWork({.policy = &prune.policy(),
                            .reductions = &prune.reductions(),
                            .budget_tokens = operation->budget_tokens},
                           &work));
  operation->policy = work.request.policy.facts().name;
  SetProtection(prune, work, operation);
  return CheckGuard(*operation);
}

absl::Status DeviceVerbs::PrepareCompact(Turn& turn, const v1::Compact& compact, DeviceOperation* operation) {
  SequenceWork& work = operation->sequences.emplace_back();
  RETURN_IF_ERROR(PrepareSequence(turn, *operation->session, compact.sequence(), &work));
  const scorers::KvShape& shape = work.shape();
  const bool merges = compact.disposition() == v1::DISPOSITION_MERGE;
  const uint64_t planes =
      uint64_t{shape.planes()} * operation->ranks.size();  // Each has a threshold in an answer.
  if (merges) RETURN_IF_ERROR(CheckThresholds(compact.merge(), planes));
  if (compact.has_less()) RETURN_IF_ERROR(StageLess(turn, compact.less(), operation));
  uint32_t kept = 0, settled = 0;  // Tokens at the start that stay where they are.
  uint32_t rows = 1;
  if (compact.has_keep()) {
    const auto& positions = compact.keep().positions();
    if (positions[positions.size() - 1] >= shape.tokens) {
      return absl::InvalidArgumentError(absl::StrCat("compact.keep.positions ends with ",
                                                     positions[positions.size() - 1], "; the sequence has ",
                                                     shape.tokens, " tokens"));
    }
    operation->policy = "chosen";
    kept = static_cast<uint32_t>(positions.size());
    if (!compact.keep_sources() && !merges) {
      while (settled < kept && positions[static_cast<int>(settled)] == settled) ++settled;
    }
  } else {
    RETURN_IF_ERROR(CheckRanges("compact.protect", compact.protect(), shape));
    RETURN_IF_ERROR(CheckRanges("compact.discard", compact.discard(), shape));
    RETURN_IF_ERROR(StageSignals(turn, *operation->session, compact.signals(), &work));
    operation->budget_tokens = compact.budget_tokens();
    RETURN_IF_ERROR(PlanWork({.policy = &compact.policy(),
                              .reductions = &compact.reductions(),
                              .scope = compact.scope(),
                              .budget_tokens = operation->budget_tokens},
                             &work));
    operation->policy = work.request.policy.facts().name;
    SetProtection(compact, work, operation);
    RETURN_IF_ERROR(CheckGuard(*operation));
    kept = shape.tokens - scorers::TokensOverBudget(work.request.policy, shape, operation->budget_tokens);
    rows = work.rows();
  }
  const bool is_ada = compact.heads() == v1::HEADS_ADA || compact.heads() == v1::HEADS_GIVEN;
  RETURN_IF_ERROR(CheckNumbers("compact", uint64_t{kept} * rows + (merges || is_ada ? planes : 0)));
  if (is_ada) RETURN_IF_ERROR(PrepareAda(compact, kept, operation));
  if (compact.has_low()) RETURN_IF_ERROR(PrepareLow(turn, compact, kept, operation));
  if (kept == shape.tokens) return absl::OkStatus();  // Nothing moves.
  const uint32_t per_block = shape.tokens_per_block;
  const uint32_t length = is_ada ? operation->most_tokens : kept;
  return LeaseDestinations(turn, (length + per_block - 1) / per_block - settled / per_block, operation);
}

absl::Status DeviceVerbs::PrepareAda(const v1::Compact& compact, uint32_t kept,
                                     DeviceOperation* operation) const {
  const SequenceWork& work = operation->sequences[0];
  const scorers::KvShape& shape = work.shape();
  const v1::AdaTerms& ada = compact.ada();
  const uint64_t rows = work.rows();
  uint32_t most = ada.most_tokens() == 0 ? 2 * compact.budget_tokens() : ada.most_tokens();
  if (compact.heads() == v1::HEADS_GIVEN) {
    const uint64_t sum = std::accumulate(ada.tokens().begin(), ada.tokens().end(), uint64_t{0});
    if (static_cast<uint64_t>(ada.tokens_size()) != rows || sum > rows * compact.budget_tokens()) {
      return absl::InvalidArgumentError(absl::StrCat("compact.ada.tokens has ", ada.tokens_size(),
                                                     " numbers, in sum ", sum, "; must have one for each of ",
                                                     rows, " planes, in sum at most budget_tokens for each, ",
                                                     rows * compact.budget_tokens()));
    }
    most = *std::max_element(ada.tokens().begin(), ada.tokens().end());
  }
  // A policy may keep more than the budget: what is protected, or a part of a block.
  operation->most_tokens = std::min(std::max(most, kept), shape.tokens);
  if (rows * operation->most_tokens > kMostPlaces) {
    return absl::InvalidArgumentError(absl::StrCat("compact.ada: most_tokens is ", most, ": ", rows,
                                                   " heads of at most ", operation->most_tokens,
                                                   " tokens are above the limit of ", kMostPlaces));
  }
  if (rows * shape.tokens > kMostShared) {
    return absl::ResourceExhaustedError(absl::StrCat("compact: ", rows,
                                                     " heads share a budget by the scores of ", shape.tokens,
                                                     " tokens each; together they may be ", kMostShared));
  }
  if (ada.counts().empty()) return absl::OkStatus();
  if (static_cast<uint64_t>(ada.counts_size()) != rows) {
    return absl::InvalidArgumentError(absl::StrCat("compact.ada.counts has ", ada.counts_size(),
                                                   " numbers; must have none, or one for each of ", rows,
                                                   " planes"));
  }
  if (ada.counted_tokens() > shape.tokens) {
    return absl::InvalidArgumentError(absl::StrCat("compact.ada.counted_tokens is ", ada.counted_tokens(),
                                                   "; the sequence has ", shape.tokens, " tokens"));
  }
  operation->block_bytes = state_.facts.layout.block_bytes();
  operation->padding.reserve(rows);
  for (const uint32_t count : ada.counts())
    operation->padding.push_back({.begin = count, .end = ada.counted_tokens()});
  return absl::OkStatus();
}

absl::Status DeviceVerbs::StageLess(Turn& turn, const v1::LessTerms& terms, DeviceOperation* operation) {
  const Session& session = *operation->session;
  const scorers::FoldRequest request{
      .from = operation->sequences[0].shares[0].kv, .features = terms.rank(), .hidden = terms.hidden()};
  const uint64_t planes = request.from.shape.planes();
  const ArrayShape weights = {
      .bytes = planes * operation->ranks.size() * request.WeightFloats() * sizeof(float),
      .element_bytes = sizeof(float)};
  const ArrayShape state = {.bytes = planes * request.StateFloats() * sizeof(float),
                            .element_bytes = sizeof(float),
                            .of_heads = true};
  // Which layouts it takes. How many tokens leave is known when they are chosen.
  RETURN_IF_ERROR(scorers::CheckFold(request, /*weight_bytes=*/0, /*most_bytes=*/UINT64_MAX));
  RETURN_IF_ERROR(
      StageData(turn, session, "compact.less.weights", terms.weights(), weights, &operation->less).status());
  if (terms.has_previous()) {
    RETURN_IF_ERROR(
        StageData(turn, session, "compact.less.previous", terms.previous(), state, &operation->less)
            .status());
  }
  RETURN_IF_ERROR(CheckInBlocks(turn, session, "compact.less.state", terms.state(), state));
  for (size_t rank = 0; rank < operation->ranks.size(); ++rank) {
    ASSIGN_OR_RETURN(operation->ranks[rank].into, PiecesOf(turn, session, terms.state(), state.bytes, rank));
  }
  return absl::OkStatus();
}

absl::Status DeviceVerbs::PrepareLow(Turn& turn, const v1::Compact& compact, uint32_t kept,
                                     DeviceOperation* operation) {
  const v1::LowTerms& low = compact.low();
  const scorers::KvShape& shape = operation->sequences[0].shape();
  const uint64_t block_bytes = state_.facts.layout.block_bytes();
  const uint32_t bits = low.bits() == 0 ? LowLayout::kDefaultBits : low.bits();
  operation->low = LowLayout::Of({.planes = shape.planes(),
                                  .k_head_dim = shape.k_head_dim,
                                  .v_head_dim = shape.v_head_dim,
                                  .bits = bits,
                                  .block_bytes = block_bytes});
  if (operation->low.records_per_block == 0) {
    return absl::InvalidArgumentError(absl::StrCat("compact.low: ", LowLayout::kGroupTokens,
                                                   " tokens of a plane take ", operation->low.record_bytes,
                                                   " bytes in ", bits, " bits; a block has ", block_bytes));
  }
  if (block_bytes % LowLayout::kWordBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("compact.low: layout.block_bytes is ", block_bytes,
                                                   "; must be a multiple of ", LowLayout::kWordBytes));
  }
  const uint64_t needed = operation->low.Blocks(shape.tokens - kept);
  const absl::Span<const uint64_t> refs(low.blocks().data(), low.blocks_size());
  if (refs.size() < needed) {
    return absl::InvalidArgumentError(absl::StrCat("compact.low.blocks has ", refs.size(), " blocks; ",
                                                   shape.tokens - kept, " tokens that leave take ", needed,
                                                   " in ", bits, " bits"));
  }
  const Session& session = *operation->session;
  RETURN_IF_ERROR(CheckRefs(turn, session, "compact.low.blocks", std::nullopt, refs));
  for (size_t rank = 0; rank < operation->ranks.size(); ++rank) {
    std::vector<uint64_t>& addresses = operation->ranks[rank].low_addresses;
    RETURN_IF_ERROR(InParts(
        turn, session, refs.first(needed),
        [&](size_t, absl::Span<const uint64_t> part) {
          for (const uint64_t ref : part)
            addresses.push_back(state_.growth.AddressOf(BlockRef::Unpack(ref).id, rank));
        },
        kAddressesOfName));
  }
  return absl::OkStatus();
}

absl::Status DeviceVerbs::LeaseDestinations(Turn& turn, uint32_t count, DeviceOperation* operation) {
  if (count == 0) return absl::OkStatus();
  Session* session = operation->session.get();
  std::vector<BlockRef>& destinations = operation->destinations;
  SpaceLease lease;
  do {
    // A session that is not ready can't be told of blocks that it has not mapped.
    operation->lacks_blocks = !session->ready;
    if (operation->lacks_blocks) break;
    // All parts together have to be `count`; the first looks whether they can be.
    const auto before = static_cast<uint32_t>(destinations.size());
    lease = state_.growth.Lease(session->holder, turn.now, count - before, before == 0 ? count : 0,
                                &destinations, static_cast<uint32_t>(Turn::kNames));
    // What is being reclaimed is there for one of the next tries.
    operation->lacks_blocks = lease.growing || lease.outcome.shortfall == Shortfall::kReclaiming;
    turn.Worked(destinations.size() - before);
    turn.Breathe();
    if (session->ended) return absl::AbortedError(session->end_reason);
  } while (lease.outcome.more);
  if (destinations.size() < count) {
    // It is to come; or all were there, and others took the rest meanwhile, who may be in the same place: it tries again.
    operation->lacks_blocks |= !destinations.empty();
    RETURN_IF_ERROR(Release(turn, *operation, destinations));
    destinations.clear();
    if (operation->lacks_blocks) return absl::OkStatus();
    state_.pressure.OnShortLease();
    return absl::ResourceExhaustedError(
        absl::StrCat("compact: ", count, " blocks to be leased for what stays, ", state_.growth.free_blocks(),
                     " free, ", state_.pool.available(), " available: ", WhyShort(lease.outcome.shortfall)));
  }
  operation->lacks_blocks = false;
  for (size_t rank = 0; rank < operation->ranks.size(); ++rank) {
    std::vector<uint64_t>& addresses = operation->ranks[rank].destination_addresses;
    RETURN_IF_ERROR(InParts(
        turn, *session, absl::MakeConstSpan(destinations),
        [&](size_t, absl::Span<const BlockRef> part) {
          for (const BlockRef ref : part) addresses.push_back(state_.growth.AddressOf(ref.id, rank));
        },
        kAddressesOfName));
  }
  return absl::OkStatus();
}

absl::Status DeviceVerbs::PreparePlanBudgets(Turn& turn, const v1::PlanBudgets& plan,
                                             DeviceOperation* operation) {
  operation->policy = MethodName(plan.method());
  operation->sequences.reserve(plan.sequences_size());
  v1::Policy policy;
  policy.set_name("cake");
  for (const v1::GroupSequence& group : plan.sequences()) {
    SequenceWork& work = operation->sequences.emplace_back();
    RETURN_IF_ERROR(PrepareSequence(turn, *operation->session, group.sequence(), &work));
    RETURN_IF_ERROR(StageWindow(turn, *operation->session, group.window(), &work));
    RETURN_IF_ERROR(PlanWork({.policy = &policy,
                              .reductions = &v1::Reductions::default_instance(),
                              .budget_tokens = static_cast<uint32_t>(
                                  std::min<uint64_t>(plan.tokens_per_layer(), work.shape().tokens))},
                             &work));
  }
  return absl::OkStatus();
}

}  // namespace kvpool
