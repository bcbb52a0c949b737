// Verbs that run on the device, for engines that keep their own tables: score, select, prune, compact,
// plan_budgets.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "client/python/src/scoring.h"

namespace kvpool::python {
namespace {

using SessionPtr = std::shared_ptr<SharedSession>;
using SessionClass = nb::class_<SharedSession>;

struct PyBudgetPlan {
  std::vector<uint64_t> budget_tokens;
  std::vector<double> weights;
};

template <typename Answer, typename PyAnswer>
void BindPending(nb::module_& module, const char* name, const char* doc) {
  nb::class_<PyPending<Answer>>(module, name, doc)
      .def_prop_ro("ready", &PyPending<Answer>::ready)
      .def(
          "wait", [](PyPending<Answer>& pending, Timeout timeout) { return PyAnswer{pending.Wait(timeout)}; },
          nb::arg("timeout") = 30.0,
          "Takes the answer, once. DeadlineExceededError: it may be waited for again.");
}

// Numbers as [rows][columns].
template <typename Number>
nb::object TableOf(const google::protobuf::RepeatedField<Number>& numbers, uint32_t rows, uint32_t columns) {
  using Numbers = std::vector<Number>;
  auto* copy = new Numbers(numbers.begin(), numbers.end());
  const nb::capsule owner(copy, [](void* array) noexcept { delete static_cast<Numbers*>(array); });
  return nb::cast(nb::ndarray<nb::numpy, Number, nb::ndim<2>>(copy->data(), {rows, columns}, owner));
}

// Scores as [rows][columns], or none if they were not asked for.
nb::object Scores(const google::protobuf::RepeatedField<float>& scores, uint32_t rows, uint32_t columns) {
  return scores.empty() ? nb::none() : TableOf(scores, rows, columns);
}

void BindScores(nb::module_& module) {
  nb::class_<PyScoreResult>(module, "ScoreResult", "Scores of a sequence; higher ones stay.")
      .def_prop_ro(
          "rows", [](const PyScoreResult& result) { return result.proto.rows(); },
          "How many; the scope decides.")
      .def_prop_ro("tokens", [](const PyScoreResult& result) { return result.proto.tokens(); })
      .def_prop_ro("blocks", [](const PyScoreResult& result) { return result.proto.blocks(); })
      .def_prop_ro(
          "token_scores",
          [](const PyScoreResult& result) {
            return Scores(result.proto.token_scores(), result.proto.rows(), result.proto.tokens());
          },
          nb::sig("def token_scores(self) -> numpy.typing.NDArray[numpy.float32] | None"), "[rows, tokens]")
      .def_prop_ro(
          "block_scores",
          [](const PyScoreResult& result) {
            return Scores(result.proto.block_scores(), result.proto.rows(), result.proto.blocks());
          },
          nb::sig("def block_scores(self) -> numpy.typing.NDArray[numpy.float32] | None"), "[rows, blocks]")
      .def_prop_ro(
          "blocks_read", [](const PyScoreResult& result) { return result.proto.blocks_read(); },
          "Blocks whose K and V were read; the others' features were kept.");

  BindPending<v1::ScoreResult, PyScoreResult>(module, "PendingScore", "Scores on their way. May be dropped.");

  nb::class_<PyBudgetPlan>(module, "BudgetPlan", "How budgets are spread over layers.")
      .def_ro("budget_tokens", &PyBudgetPlan::budget_tokens, "One for each layer.")
      .def_ro("weights", &PyBudgetPlan::weights, "What they were planned by.");
}

void BindSelection(nb::module_& module) {
  nb::class_<PySelectResult>(module, "SelectResult", "The blocks that a sparse attention kernel reads.")
      .def_prop_ro(
          "positions",
          [](const PySelectResult& result) {
            return TableOf(result.proto.positions(), result.proto.rows(), result.proto.selected());
          },
          nb::sig("def positions(self) -> numpy.typing.NDArray[numpy.uint32]"),
          "[rows, selected]: indices into the table. A row is a KV head of a layer, of all ranks, layer by "
          "layer. In it first\n"
          "those that are always selected, ascending, then the others, best first.")
      .def_prop_ro(
          "bounds",
          [](const PySelectResult& result) {
            return Scores(result.proto.bounds(), result.proto.rows(), result.proto.selected());
          },
          nb::sig("def bounds(self) -> numpy.typing.NDArray[numpy.float32] | None"),
          "[rows, selected]: no logit of a query, the mean of the heads that share K, is above it there.")
      .def_prop_ro(
          "blocks_read", [](const PySelectResult& result) { return result.proto.blocks_read(); },
          "Blocks whose K was read; the others' bounds of keys were kept.");

  BindPending<v1::SelectResult, PySelectResult>(module, "PendingSelect",
                                                "A selection on its way. May be dropped.");
}

template <typename Numbers>
std::vector<uint64_t> ListOf(const Numbers& numbers) {
  return {numbers.begin(), numbers.end()};
}

void BindPruneResults(nb::module_& module) {
  nb::class_<PyPruneResult>(module, "PruneResult", "What a prune dropped, and the table of what stays.")
      .def_prop_ro(
          "victims", [](const PyPruneResult& r) { return ListOf(r.proto.victims()); },
          "Indices into the blocks as they were, ascending.")
      .def_prop_ro(
          "victim_blocks", [](const PyPruneResult& r) { return ListOf(r.proto.victim_blocks()); },
          "Refs of the victims.")
      .def_prop_ro(
          "table", [](const PyPruneResult& r) { return ListOf(r.proto.table()); }, "Refs of what stays.")
      .def_prop_ro("kept_tokens", [](const PyPruneResult& r) { return r.proto.kept_tokens(); })
      .def_prop_ro(
          "released", [](const PyPruneResult& r) { return r.proto.released(); },
          "Holds given back: all victims, or none of a dry run.")
      .def_prop_ro("kept_digest", [](const PyPruneResult& r) { return BytesOf(r.proto.kept_digest()); })
      .def_prop_ro("blocks_read", [](const PyPruneResult& r) { return r.proto.blocks_read(); });

  nb::class_<PyCompactResult>(module, "CompactResult", "The table of what stays, in fewer blocks.")
      .def_prop_ro("table", [](const PyCompactResult& r) { return ListOf(r.proto.table()); })
      .def_prop_ro(
          "last_block_tokens", [](const PyCompactResult& r) { return r.proto.last_block_tokens(); },
          "Valid tokens in its last block.")
      .def_prop_ro(
          "moved_from_block", [](const PyCompactResult& r) { return r.proto.moved_from_block(); },
          "Index of the first new block in the table.")
      .def_prop_ro(
          "rows", [](const PyCompactResult& r) { return r.proto.rows(); }, "Rows of kept_positions.")
      .def_prop_ro(
          "kept_positions",
          [](const PyCompactResult& r) {
            const uint32_t rows = std::max(1u, r.proto.rows());
            const auto& all = r.proto.kept_positions();
            std::vector<std::vector<uint32_t>> positions(rows);
            auto from = all.begin();
            for (uint32_t row = 0; row < rows; ++row) {
              const uint32_t own =
                  std::min(static_cast<uint32_t>(all.end() - from),
                           r.proto.counts().empty() ? static_cast<uint32_t>(all.size()) / rows
                                                    : r.proto.counts().at(static_cast<int>(row)));
              positions[row].assign(from, from + own);
              from += own;
            }
            return positions;
          },
          "One list for each row: positions in the sequence as it was, ascending.")
      .def_prop_ro(
          "counts",
          [](const PyCompactResult& r) {
            return std::vector<uint32_t>(r.proto.counts().begin(), r.proto.counts().end());
          },
          "Of heads 'ada' and 'given', where tokens left: how many tokens each plane keeps, [layers][KV "
          "heads of all\n"
          "ranks]. The table has as many as the greatest, and rows of the others end with zeros.")
      .def_prop_ro(
          "released", [](const PyCompactResult& r) { return r.proto.released(); },
          "Holds given back on blocks of the sequence as it was.")
      .def_prop_ro("kept_digest", [](const PyCompactResult& r) { return BytesOf(r.proto.kept_digest()); })
      .def_prop_ro("blocks_read", [](const PyCompactResult& r) { return r.proto.blocks_read(); })
      .def_prop_ro(
          "merge_thresholds",
          [](const PyCompactResult& r) {
            return std::vector<float>(r.proto.merge_thresholds().begin(), r.proto.merge_thresholds().end());
          },
          "Of disposition 'merge': the threshold of each plane, [layers][KV heads of all ranks].")
      .def_prop_ro(
          "merged_tokens", [](const PyCompactResult& r) { return r.proto.merged_tokens(); },
          "Tokens that were merged, summed over planes.")
      .def_prop_ro(
          "low_tokens", [](const PyCompactResult& r) { return r.proto.low_tokens(); },
          "Of disposition 'low': the tokens of each plane that are in low_blocks, in ascending order, which\n"
          "kept_positions does not name.")
      .def_prop_ro(
          "low_blocks", [](const PyCompactResult& r) { return r.proto.low_blocks(); },
          "How many of the blocks given were written, from the first on.")
      .def_prop_ro(
          "low_records_per_block", [](const PyCompactResult& r) { return r.proto.low_records_per_block(); },
          "As Layout.low says.")
      .def_prop_ro(
          "folded_tokens", [](const PyCompactResult& r) { return r.proto.folded_tokens(); },
          "Of disposition 'less': tokens that were added to the state, summed over planes.");

  BindPending<v1::PruneResult, PyPruneResult>(
      module, "PendingPrune",
      "A prune on its way. Until its answer is taken nobody knows which holds are left: it is waited for.");
  BindPending<v1::CompactResult, PyCompactResult>(
      module, "PendingCompact",
      "A compact on its way. To be waited for, as a prune; its new blocks are given back if it is dropped.");
}

// The arguments by which a verb describes a sequence that is no LiveSequence.
struct SequenceArguments {
  uint32_t group = 0;
  uint32_t last_block_tokens = 0;
};

void Fill(absl::Span<const BlockRef> blocks, const SequenceArguments& arguments, v1::Sequence* sequence) {
  sequence->set_group(arguments.group);
  sequence->set_last_block_tokens(arguments.last_block_tokens);
  for (const BlockRef ref : blocks) sequence->add_blocks(ref.Pack());
}

// Blocks that the verb itself releases can't be a Blocks, which would release them once more.
std::vector<BlockRef> BareRefsOf(nb::handle blocks) {
  if (nb::isinstance<PyBlocks>(blocks)) {
    throw StatusError(absl::InvalidArgumentError(
        "blocks: the daemon gives back what leaves the table: detach() the Blocks, and keep the refs of the "
        "answer's table"));
  }
  return RefsOf(blocks);
}

PyPending<v1::PruneResult> Prune(const SessionPtr& session, nb::handle blocks,
                                 std::optional<uint32_t> budget_tokens, std::optional<uint32_t> budget_blocks,
                                 nb::handle scorer, uint32_t group, uint32_t last_block_tokens,
                                 const TokenRanges& protect, const PyProtection* protection,
                                 const TokenRanges& discard, bool fresh, bool dry_run,
                                 std::optional<uint64_t> after) {
  const std::vector<BlockRef> refs = dry_run ? RefsOf(blocks) : BareRefsOf(blocks);
  v1::Prune request = PruneRequestOf(
      scorer,
      {.budget_tokens = budget_tokens, .budget_blocks = budget_blocks, .fresh = fresh, .dry_run = dry_run},
      {.protect = protect, .protection = protection, .discard = discard});
  Fill(refs, {.group = group, .last_block_tokens = last_block_tokens}, request.mutable_sequence());
  return {session, ValueOf(session->Use([&](Session& open) {
            if (!dry_run) session->Shield(refs);
            return open.Prune(request, StepOf(after));
          }))};
}

PyPending<v1::CompactResult> Compact(
    const SessionPtr& session, nb::handle blocks, std::optional<uint32_t> budget_tokens,
    std::optional<std::vector<uint32_t>> keep, nb::handle scorer, const std::string& scope, uint32_t group,
    uint32_t last_block_tokens, const TokenRanges& protect, const PyProtection* protection,
    const TokenRanges& discard, bool fresh, bool keep_sources, const std::string& disposition,
    const std::vector<float>& merge_thresholds, float merge_smoothing, nb::handle low_blocks,
    uint32_t low_bits, const PyLessTerms* less, const std::string& heads, const PyAdaTerms* ada,
    std::optional<uint64_t> after) {
  const std::vector<BlockRef> refs = BareRefsOf(blocks);
  v1::Compact request = CompactRequestOf(scorer,
                                         {.budget_tokens = budget_tokens,
                                          .keep = std::move(keep),
                                          .scope = scope,
                                          .fresh = fresh,
                                          .keep_sources = keep_sources,
                                          .disposition = disposition,
                                          .merge_thresholds = merge_thresholds,
                                          .merge_smoothing = merge_smoothing,
                                          .low_blocks = RefsOf(low_blocks),
                                          .low_bits = low_bits,
                                          .less = less,
                                          .heads = heads,
                                          .ada = ada},
                                         {.protect = protect, .protection = protection, .discard = discard});
  Fill(refs, {.group = group, .last_block_tokens = last_block_tokens}, request.mutable_sequence());
  return {session, ValueOf(session->Use([&](Session& open) {
            session->Shield(refs);
            return open.Compact(request, StepOf(after));
          }))};
}

using Observed = std::vector<std::pair<nb::object, nb::object>>;  // Tables and windows.

PyBudgetPlan PlanBudgets(const SessionPtr& session, const std::string& method, uint64_t tokens_per_layer,
                         uint32_t layers, const nb::dict& params, const std::vector<double>& statistics,
                         Timeout timeout, const Observed& sequences, std::optional<uint64_t> after) {
  v1::PlanBudgets request;
  request.set_method(EnumOf<v1::BudgetMethod>(method, "BUDGET_METHOD_", "method", &v1::BudgetMethod_Parse));
  request.set_tokens_per_layer(tokens_per_layer);
  request.set_layers(layers);
  SetParams(params, request.mutable_params());
  request.mutable_statistics()->Add(statistics.begin(), statistics.end());
  for (const auto& [table, window] : sequences) {
    const std::string entry = EntryOf("sequences", static_cast<size_t>(request.sequences_size()));
    if (!nb::isinstance<PyQueryWindow>(window)) {
      throw TypeErrorOf("the window of " + entry, window, "a QueryWindow");
    }
    v1::GroupSequence& sequence = *request.add_sequences();
    *sequence.mutable_sequence() = SequenceOf("the table of " + entry, table, session);
    *sequence.mutable_window() = nb::cast<const PyQueryWindow&>(window).proto;
  }
  PyPending<v1::PlanBudgetsResult> pending(
      session,
      ValueOf(session->Use([&](Session& open) { return open.PlanBudgets(request, StepOf(after)); })));
  const v1::PlanBudgetsResult result = pending.Wait(timeout);
  return {.budget_tokens = {result.budget_tokens().begin(), result.budget_tokens().end()},
          .weights = {result.weights().begin(), result.weights().end()}};
}

PyPending<v1::SelectResult> Select(const SessionPtr& session, nb::handle table, nb::handle window,
                                   std::optional<uint32_t> budget_tokens,
                                   std::optional<uint32_t> budget_blocks, uint32_t first_blocks,
                                   uint32_t last_blocks, bool bounds, nb::handle into, uint64_t into_offset,
                                   bool fresh, std::optional<uint64_t> after) {
  if (budget_tokens.has_value() == budget_blocks.has_value()) {
    throw StatusError(
        absl::InvalidArgumentError("one of budget_tokens and budget_blocks must be given, and not both"));
  }
  if (!nb::isinstance<PyQueryWindow>(window)) throw TypeErrorOf("window", window, "a QueryWindow");
  v1::Select request;
  *request.mutable_sequence() = SequenceOf("table", table, session);
  request.mutable_sequence()->set_fresh(fresh);
  *request.mutable_window() = nb::cast<const PyQueryWindow&>(window).proto;
  if (budget_tokens.has_value()) request.set_budget_tokens(*budget_tokens);
  if (budget_blocks.has_value()) request.set_budget_blocks(*budget_blocks);
  request.set_first_blocks(first_blocks);
  request.set_last_blocks(last_blocks);
  request.set_bounds(bounds);
  if (!into.is_none()) *request.mutable_into() = ArrayOf("into", into, into_offset);
  return {session, ValueOf(session->Use([&](Session& open) { return open.Select(request, StepOf(after)); }))};
}

PyPending<v1::ScoreResult> Score(const SessionPtr& session, nb::handle blocks, nb::handle scorer,
                                 uint32_t group, uint32_t last_block_tokens, const std::string& scope,
                                 bool token_scores, bool block_scores, bool fresh, uint32_t budget_tokens,
                                 std::optional<uint64_t> after) {
  v1::Score request = ScoreRequestOf(scorer, {.scope = scope,
                                              .token_scores = token_scores,
                                              .block_scores = block_scores,
                                              .fresh = fresh,
                                              .budget_tokens = budget_tokens});
  Fill(RefsOf(blocks), {.group = group, .last_block_tokens = last_block_tokens}, request.mutable_sequence());
  return {session, ValueOf(session->Use([&](Session& open) { return open.Score(request, StepOf(after)); }))};
}

void BindPruning(SessionClass& session) {
  session.def(
      "prune", Prune, nb::arg("blocks"), nb::kw_only(), nb::arg("budget_tokens") = nb::none(),
      nb::arg("budget_blocks") = nb::none(), nb::arg("scorer").none() = nb::none(), nb::arg("group") = 0,
      nb::arg("last_block_tokens") = 0, nb::arg("protect") = TokenRanges(),
      nb::arg("protection").none() = nb::none(), nb::arg("discard") = TokenRanges(), nb::arg("fresh") = false,
      nb::arg("dry_run") = false, nb::arg("after") = nb::none(),
      nb::sig("def prune(self, blocks: Refs, *, budget_tokens: int | None = None, budget_blocks: int | "
              "None = None, scorer: Scorer | str | None = None, group: int = 0, last_block_tokens: int = "
              "0, protect: collections.abc.Sequence[tuple[int, int]] = (), protection: Protection | None = "
              "None, discard: collections.abc.Sequence[tuple[int, int]] = (), fresh: bool = False, "
              "dry_run: bool = False, after: int | None = None) -> PendingPrune"),
      "LiveSequence.prune for an engine that keeps its own tables of bare refs (Blocks.detach). When the\n"
      "answer is there, the victims' holds are gone and those of its `table` are left. A Blocks is\n"
      "accepted only for a dry run. Later seals need keys that follow PrefixHasher.behind_pruning.");
  session.def(
      "compact", Compact, nb::arg("blocks"), nb::kw_only(), nb::arg("budget_tokens") = nb::none(),
      nb::arg("keep") = nb::none(), nb::arg("scorer").none() = nb::none(), nb::arg("scope") = "sequence",
      nb::arg("group") = 0, nb::arg("last_block_tokens") = 0, nb::arg("protect") = TokenRanges(),
      nb::arg("protection").none() = nb::none(), nb::arg("discard") = TokenRanges(), nb::arg("fresh") = false,
      nb::arg("keep_sources") = false, nb::arg("disposition") = "drop",
      nb::arg("merge_thresholds") = std::vector<float>(), nb::arg("merge_smoothing") = 0.0f,
      nb::arg("low_blocks") = nb::make_tuple(), nb::arg("low_bits") = 0, nb::arg("less").none() = nb::none(),
      nb::arg("heads") = "equal", nb::arg("ada").none() = nb::none(), nb::arg("after") = nb::none(),
      nb::sig(
          "def compact(self, blocks: collections.abc.Sequence[int], *, budget_tokens: int | None = "
          "None, keep: collections.abc.Sequence[int] | None = None, scorer: Scorer | str | None = "
          "None, scope: str = 'sequence', group: int = 0, last_block_tokens: int = 0, protect: "
          "collections.abc.Sequence[tuple[int, int]] = (), protection: Protection | None = None, "
          "discard: collections.abc.Sequence[tuple[int, int]] = (), fresh: bool = False, keep_sources: "
          "bool = False, disposition: str = 'drop', merge_thresholds: collections.abc.Sequence[float] = (), "
          "merge_smoothing: float = 0.0, low_blocks: Refs = (), low_bits: int = 0, less: LessTerms | None = "
          "None, heads: str = 'equal', ada: AdaTerms | None = None, after: int | None = None) -> "
          "PendingCompact"),
      "LiveSequence.compact for bare refs, like prune: the holds of the answer's `table` are left, new\n"
      "blocks among them; with `keep_sources` also those of the blocks that were moved.");
}

}  // namespace

void BindDevice(nb::module_& module) {
  BindScores(module);
  BindSelection(module);
  BindPruneResults(module);
  auto session = nb::borrow<SessionClass>(nb::type<SharedSession>());
  session.def(
      "score", Score, nb::arg("blocks"), nb::arg("scorer").none() = nb::none(), nb::kw_only(),
      nb::arg("group") = 0, nb::arg("last_block_tokens") = 0, nb::arg("scope") = "sequence",
      nb::arg("token_scores") = false, nb::arg("block_scores") = true, nb::arg("fresh") = false,
      nb::arg("budget_tokens") = 0, nb::arg("after") = nb::none(),
      nb::sig("def score(self, blocks: Refs, scorer: Scorer | str | None = None, *, group: int = 0, "
              "last_block_tokens: int = 0, scope: str = 'sequence', token_scores: bool = False, "
              "block_scores: bool = True, fresh: bool = False, budget_tokens: int = 0, after: int | None = "
              "None) -> PendingScore"),
      "Scores a sequence where it lies. `last_block_tokens`: valid tokens of the last block, 0: all.");
  session.def(
      "select", Select, nb::arg("table"), nb::arg("window"), nb::kw_only(),
      nb::arg("budget_tokens") = nb::none(), nb::arg("budget_blocks") = nb::none(),
      nb::arg("first_blocks") = 1, nb::arg("last_blocks") = 1, nb::arg("bounds") = false,
      nb::arg("into").none() = nb::none(), nb::arg("into_offset") = 0, nb::arg("fresh") = false,
      nb::arg("after") = nb::none(),
      nb::sig(
          "def select(self, table: LiveSequence | BlockTable, window: QueryWindow, *, budget_tokens: int "
          "| None = None, budget_blocks: int | None = None, first_blocks: int = 1, last_blocks: int = 1, "
          "bounds: bool = False, into: BlockArray | None = None, into_offset: int = 0, fresh: bool = False, "
          "after: int | None = None) -> PendingSelect"),
      "Which blocks a sparse attention kernel reads for the queries of `window`, in each KV head of each "
      "layer\n"
      "(Quest): those of the greatest bounds, and always the first and the last ones. Nothing is dropped.\n"
      "As many blocks as `budget_blocks`, or as fit whole into `budget_tokens`. The positions are also "
      "written to `into`, as\n"
      "int32 [layers, kv_heads, selected] from `into_offset` on, where kernels find them.");
  BindPruning(session);
  session.def(
      "plan_budgets", PlanBudgets, nb::arg("method"), nb::arg("tokens_per_layer"), nb::arg("layers") = 0,
      nb::arg("params") = nb::dict(), nb::arg("statistics") = std::vector<double>(),
      nb::arg("timeout") = 30.0, nb::kw_only(), nb::arg("sequences") = Observed(),
      nb::arg("after") = nb::none(),
      nb::sig("def plan_budgets(self, method: str, tokens_per_layer: int, layers: int = 0, params: "
              "dict[str, str | float | bool] = {}, statistics: collections.abc.Sequence[float] = (), "
              "timeout: float | None = 30.0, *, sequences: collections.abc.Sequence[tuple[LiveSequence | "
              "BlockTable, QueryWindow]] = (), after: int | None = None) -> BudgetPlan"),
      "Spreads a budget of `tokens_per_layer` tokens, on average, over layers. Methods: \"uniform\",\n"
      "\"pyramid\", \"cake\", \"d2o\", \"epicache\"; see PlanBudgets in score.proto. `statistics` are\n"
      "what the method goes by, if the engine knows them; cake and d2o can compute them from `sequences`:\n"
      "one for each layer group, ascending, with a window of its queries.");
}

}  // namespace kvpool::python
