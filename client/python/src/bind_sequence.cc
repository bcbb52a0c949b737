// LiveSequence: a sequence that an engine generates, and the budget it holds.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "client/live_sequence.h"
#include "client/python/src/scoring.h"
#include "client/python/src/view.h"
#include "proto/support/status_macros.h"

namespace kvpool::python {
namespace {

// Blocks with views stay held for them, whatever becomes of the sequence.
class PySequence {
 public:
  PySequence(std::shared_ptr<SharedSession> session, uint32_t group, const std::string& salt,
             uint64_t salt_from, std::vector<std::string> extra_keys)
      : session_(std::move(session)), group_(group) {
    const int groups = session_->shared().layout().groups_size();
    if (group >= static_cast<uint32_t>(groups)) {
      throw StatusError(
          absl::InvalidArgumentError(absl::StrCat("group: ", group, ", where the layout has ", groups)));
    }
    session_->CheckUsable();
    sequence_ = std::make_shared<Guarded>(
        session_.get(),
        LiveSequenceOptions{
            .group = group, .salt = salt, .salt_from = salt_from, .extra_keys = std::move(extra_keys)});
  }
  ~PySequence() {
    if (sequence_ != nullptr) session_->DropLater(std::move(sequence_));
  }
  PySequence(const PySequence&) = delete;
  PySequence& operator=(const PySequence&) = delete;

  // For reading outside a turn: only the sequence's own thread changes it.
  LiveSequence& get() const {
    if (sequence_ == nullptr) throw ReleasedError("this sequence was released");
    session_->CheckUsable();
    return sequence_->sequence;
  }
  // The same while no prune or compact is under way, of which the daemon alone knows which blocks it has released.
  LiveSequence& settled() const {
    LiveSequence& live = get();
    Check(live.CheckSettled());
    return live;
  }
  bool released() const { return sequence_ == nullptr; }
  const std::shared_ptr<SharedSession>& session() const { return session_; }
  uint32_t group() const { return group_; }

  // Releases with a hint. The sequence's pruning must be finished.
  void Release(const ReleaseHint& hint) {
    if (sequence_ == nullptr) return;
    if (session_->closed()) {
      session_->DropLater(std::move(sequence_));
      return;
    }
    Check(session_->Use([&](Session&) -> absl::Status {
      if (!(hint == ReleaseHint())) {
        LiveSequence& live = sequence_->sequence;
        // This check comes first: otherwise views would keep the hint of a sequence that is not released.
        RETURN_IF_ERROR(live.CheckSettled());
        session_->Shield(live.blocks(), hint);
        RETURN_IF_ERROR(live.Release(hint));
      }
      sequence_.reset();
      return absl::OkStatus();
    }));
  }

  // REQUIRES: a turn.
  template <typename F>
  auto Use(F f) {
    LiveSequence& sequence = get();
    return session_->Use([&](Session&) { return f(sequence); });
  }

  // Sends with `start`, and waits with `finish` in short turns, so that other threads get theirs.
  template <typename Start, typename Finish>
  auto Ask(Timeout timeout, Start start, Finish finish) {
    LiveSequence& sequence = get();
    auto sent = session_->Use([&](Session&) {
      session_->Shield(sequence.blocks());
      return start(sequence);
    });
    if (sent.ok() || !absl::IsDeadlineExceeded(sent.status())) return ValueOf(std::move(sent));
    return Finish_(timeout, finish);
  }
  template <typename Finish>
  auto Finish_(Timeout timeout, Finish finish) {
    LiveSequence& sequence = get();
    return ValueOf(Await(timeout, [&](Deadline deadline) {
      while (true) {
        const Deadline turn =
            std::min(deadline, std::chrono::steady_clock::now() + std::chrono::milliseconds(5));
        auto result = session_->UseWithoutGil([&](Session&) { return finish(sequence, turn); });
        if (result.ok() || turn == deadline || !absl::IsDeadlineExceeded(result.status())) return result;
      }
    }));
  }

  // For a view: nothing would hold the block for one that came while a prune is under way.
  BlockRef at(int64_t index) const {
    const auto blocks = settled().blocks();
    const auto size = static_cast<int64_t>(blocks.size());
    const int64_t at = index < 0 ? index + size : index;
    if (at < 0 || at >= size) throw nb::index_error(absl::StrCat("block ", index, " of ", size).c_str());
    return blocks[static_cast<size_t>(at)];
  }

 private:
  struct Guarded {
    Guarded(SharedSession* shared, LiveSequenceOptions options)
        : session(shared), sequence(&shared->shared(), std::move(options)) {}
    ~Guarded() { session->Shield(sequence.blocks()); }
    SharedSession* const session;
    LiveSequence sequence;
  };
  const std::shared_ptr<SharedSession> session_;
  const uint32_t group_;
  std::shared_ptr<Guarded> sequence_;  // Destroyed in a turn.
};

PyPruneResult Prune(PySequence& sequence, std::optional<uint32_t> budget_tokens,
                    std::optional<uint32_t> budget_blocks, nb::handle scorer, const TokenRanges& protect,
                    const PyProtection* protection, const TokenRanges& discard, bool fresh, bool dry_run,
                    Timeout timeout, std::optional<uint64_t> after) {
  const v1::Prune request = PruneRequestOf(
      scorer,
      {.budget_tokens = budget_tokens, .budget_blocks = budget_blocks, .fresh = fresh, .dry_run = dry_run},
      {.protect = protect, .protection = protection, .discard = discard});
  return {sequence.Ask(
      timeout, [&](LiveSequence& live) { return live.Prune(request, Deadline::min(), StepOf(after)); },
      [](LiveSequence& live, Deadline deadline) { return live.FinishPrune(deadline); })};
}

PyCompactResult Compact(PySequence& sequence, std::optional<uint32_t> budget_tokens,
                        std::optional<std::vector<uint32_t>> keep, nb::handle scorer,
                        const std::string& scope, const TokenRanges& protect, const PyProtection* protection,
                        const TokenRanges& discard, bool fresh, bool keep_sources,
                        const std::string& disposition, const std::vector<float>& merge_thresholds,
                        float merge_smoothing, nb::handle low_blocks, uint32_t low_bits,
                        const PyLessTerms* less, const std::string& heads, const PyAdaTerms* ada,
                        Timeout timeout, std::optional<uint64_t> after) {
  const v1::Compact request =
      CompactRequestOf(scorer,
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
  return {sequence.Ask(
      timeout, [&](LiveSequence& live) { return live.Compact(request, Deadline::min(), StepOf(after)); },
      [](LiveSequence& live, Deadline deadline) { return live.FinishCompact(deadline); })};
}

PyScoreResult Score(PySequence& sequence, nb::handle scorer, const std::string& scope, bool token_scores,
                    bool block_scores, bool fresh, uint32_t budget_tokens, Timeout timeout,
                    std::optional<uint64_t> after) {
  const v1::Score request = ScoreRequestOf(scorer, {.scope = scope,
                                                    .token_scores = token_scores,
                                                    .block_scores = block_scores,
                                                    .fresh = fresh,
                                                    .budget_tokens = budget_tokens});
  PyPending<v1::ScoreResult> pending(
      sequence.session(),
      ValueOf(sequence.Use([&](LiveSequence& live) { return live.StartScore(request, StepOf(after)); })));
  return {pending.Wait(timeout)};
}

using SequenceClass = nb::class_<PySequence>;

void BindGrowing(SequenceClass& sequence) {
  sequence
      .def(
          "append",
          [](PySequence& sequence, PyBlocks& blocks) {
            if (blocks.session() != sequence.session()) {
              throw StatusError(absl::InvalidArgumentError("append: blocks of another session"));
            }
            sequence.settled();  // A call that is refused takes nothing: the handle is not void yet.
            const std::vector<BlockRef> refs = blocks.Take();
            Check(sequence.Use([&](LiveSequence& live) {
              return live.Append(Blocks(&sequence.session()->shared(), refs));
            }));
          },
          nb::arg("blocks"), "Takes leased blocks over, empty, behind the others.")
      .def(
          "adopt",
          [](PySequence& sequence, PyBlocks& blocks, nb::handle tokens) {
            if (blocks.session() != sequence.session()) {
              throw StatusError(absl::InvalidArgumentError("adopt: blocks of another session"));
            }
            const std::vector<uint32_t> ids = TokensOf(tokens);
            const uint64_t full = blocks.refs().size() * sequence.session()
                                                             ->shared()
                                                             .layout()
                                                             .groups(static_cast<int>(sequence.group()))
                                                             .tokens_per_block();
            if (ids.size() != full || !sequence.settled().blocks().empty()) {
              throw StatusError(absl::FailedPreconditionError(
                  absl::StrCat(ids.size(), " tokens do not fill the ", blocks.refs().size(),
                               " blocks of a match, or the sequence has begun")));
            }
            const std::vector<BlockRef> refs = blocks.Take();
            Check(sequence.Use([&](LiveSequence& live) {
              return live.Adopt(Blocks(&sequence.session()->shared(), refs), ids);
            }));
          },
          nb::arg("blocks"), nb::arg("tokens"),
          nb::sig("def adopt(self, blocks: Blocks, tokens: Tokens) -> None"),
          "Starts with blocks that a match found, full of these tokens, and takes them over.")
      .def(
          "extend",
          [](PySequence& sequence, nb::handle tokens) {
            const std::vector<uint32_t> ids = TokensOf(tokens);
            Check(sequence.Use([&](LiveSequence& live) { return live.Extend(ids); }));
          },
          nb::arg("tokens"), nb::sig("def extend(self, tokens: Tokens) -> None"),
          "K and V of these tokens are in the blocks, or will be when the current step is done.")
      .def(
          "seal",
          [](PySequence& sequence, std::optional<uint64_t> after) -> std::optional<PyPending<SealOutcome>> {
            auto pending =
                ValueOf(sequence.Use([&](LiveSequence& live) { return live.Seal(StepOf(after)); }));
            if (!pending.has_value()) return std::nullopt;
            return PyPending<SealOutcome>(sequence.session(), *std::move(pending));
          },
          nb::arg("after") = nb::none(),
          "Queues a seal of the full blocks that are new, 16,384 at most: the next call goes on. None: "
          "there\n"
          "are none.");
}

void BindTable(SequenceClass& sequence) {
  sequence.def_prop_ro("refs", [](const PySequence& sequence) { return Packed(sequence.get().blocks()); })
      .def_prop_ro(
          "ids",
          [](const PySequence& sequence) {
            std::vector<uint32_t> ids;
            for (const BlockRef ref : sequence.get().blocks()) ids.push_back(Index(ref.id));
            return ids;
          },
          "Block numbers: indices into the pool's arrays.")
      .def_prop_ro(
          "tokens", [](const PySequence& sequence) { return sequence.get().tokens(); }, "Resident tokens.")
      .def_prop_ro(
          "room", [](const PySequence& sequence) { return sequence.settled().room(); },
          "Tokens that the blocks still take. FailedPreconditionError: a prune or compact was not finished.")
      .def_prop_ro(
          "last_key",
          [](const PySequence& sequence) {
            return BytesOf(KeyBytes({&sequence.get().last_key(), 1}));
          },
          "Key of the last full block, from which a match ahead of the tokens goes on.")
      .def_prop_ro("released", &PySequence::released)
      .def(
          "k",
          [](const PySequence& sequence, int64_t index, std::optional<uint32_t> layer) {
            return PlaneOfBlock(sequence.session(), sequence.at(index), sequence.group(), false, layer,
                                false);
          },
          nb::arg("index"), nb::arg("layer") = nb::none(),
          "K of one block, read-only: [layers, tokens, heads, dim]. FailedPreconditionError: a prune or\n"
          "compact is not finished.")
      .def(
          "v",
          [](const PySequence& sequence, int64_t index, std::optional<uint32_t> layer) {
            return PlaneOfBlock(sequence.session(), sequence.at(index), sequence.group(), true, layer, false);
          },
          nb::arg("index"), nb::arg("layer") = nb::none(), "V of one block, as k().");
}

void BindBudget(SequenceClass& sequence) {
  sequence
      .def("prune", Prune, nb::kw_only(), nb::arg("budget_tokens") = nb::none(),
           nb::arg("budget_blocks") = nb::none(), nb::arg("scorer").none() = nb::none(),
           nb::arg("protect") = TokenRanges(), nb::arg("protection").none() = nb::none(),
           nb::arg("discard") = TokenRanges(), nb::arg("fresh") = false, nb::arg("dry_run") = false,
           nb::arg("timeout") = 30.0, nb::arg("after") = nb::none(),
           nb::sig("def prune(self, *, budget_tokens: int | None = None, budget_blocks: int | None = None, "
                   "scorer: Scorer | str | None = None, protect: collections.abc.Sequence[tuple[int, int]] "
                   "= (), protection: Protection | None = None, discard: "
                   "collections.abc.Sequence[tuple[int, int]] = (), fresh: bool = False, dry_run: bool = "
                   "False, timeout: float | None = 30.0, after: int | None = None) -> PruneResult"),
           "Drops whole blocks to hold a budget. Tokens [begin, end) of `protect` stay; a block all of\n"
           "whose tokens are in ranges of `discard` leaves first, whatever its score.\n"
           "DeadlineExceededError: ask finish_prune.")
      .def(
          "finish_prune",
          [](PySequence& sequence, Timeout timeout) {
            return PyPruneResult{sequence.Finish_(
                timeout, [](LiveSequence& live, Deadline deadline) { return live.FinishPrune(deadline); })};
          },
          nb::arg("timeout") = 30.0)
      .def("compact", Compact, nb::kw_only(), nb::arg("budget_tokens") = nb::none(),
           nb::arg("keep") = nb::none(), nb::arg("scorer").none() = nb::none(), nb::arg("scope") = "sequence",
           nb::arg("protect") = TokenRanges(), nb::arg("protection").none() = nb::none(),
           nb::arg("discard") = TokenRanges(), nb::arg("fresh") = false, nb::arg("keep_sources") = false,
           nb::arg("disposition") = "drop", nb::arg("merge_thresholds") = std::vector<float>(),
           nb::arg("merge_smoothing") = 0.0f, nb::arg("low_blocks") = nb::make_tuple(),
           nb::arg("low_bits") = 0, nb::arg("less").none() = nb::none(), nb::arg("heads") = "equal",
           nb::arg("ada").none() = nb::none(), nb::arg("timeout") = 30.0, nb::arg("after") = nb::none(),
           nb::sig("def compact(self, *, budget_tokens: int | None = None, keep: "
                   "collections.abc.Sequence[int] | None = None, scorer: Scorer | str | None = None, "
                   "scope: str = 'sequence', protect: collections.abc.Sequence[tuple[int, int]] = (), "
                   "protection: Protection | None = None, discard: collections.abc.Sequence[tuple[int, "
                   "int]] = (), fresh: bool = False, keep_sources: bool = False, disposition: str = 'drop', "
                   "merge_thresholds: collections.abc.Sequence[float] = (), merge_smoothing: float = 0.0, "
                   "low_blocks: Refs = (), low_bits: int = 0, less: LessTerms | None = None, heads: "
                   "str = 'equal', ada: AdaTerms | None = None, timeout: float | "
                   "None = 30.0, after: int | None = None) -> CompactResult"),
           "Gathers the tokens that score highest, or those of `keep`, into fewer blocks. Tokens [begin,\n"
           "end) of `protect` stay, those of `discard` leave first. `disposition` is what becomes of the\n"
           "others: 'drop'; 'less', by which they are added to the state of `less` (LESS); 'merge', by\n"
           "which they change those that stay (D2O), above\n"
           "`merge_thresholds`: one for each plane, as a result's, or one for all; none: the mean of\n"
           "this call, of which `merge_smoothing` is the weight otherwise; or 'low' (MiKV), which writes\n"
           "them to `low_blocks` in `low_bits` (4, or 2 or 8) an element: leased by the caller, who owns "
           "them\n"
           "and asks Layout.low how many that takes. With scope 'head', heads='ada' lets the KV heads of a\n"
           "layer share its budget by their scores, by the terms of `ada` (AdaKV), and heads='given' has "
           "each\n"
           "keep what `ada` says for it. Then the table is as long\n"
           "as the longest head's list, the rows of the others end with padding, which no query may attend,\n"
           "and of the verbs that score only such a compact is for the sequence. DeadlineExceededError: ask "
           "finish_compact.")
      .def(
          "finish_compact",
          [](PySequence& sequence, Timeout timeout) {
            return PyCompactResult{sequence.Finish_(
                timeout, [](LiveSequence& live, Deadline deadline) { return live.FinishCompact(deadline); })};
          },
          nb::arg("timeout") = 30.0)
      .def("score", Score, nb::arg("scorer").none() = nb::none(), nb::kw_only(),
           nb::arg("scope") = "sequence", nb::arg("token_scores") = false, nb::arg("block_scores") = true,
           nb::arg("fresh") = false, nb::arg("budget_tokens") = 0, nb::arg("timeout") = 30.0,
           nb::arg("after") = nb::none(),
           nb::sig("def score(self, scorer: Scorer | str | None = None, *, scope: str = 'sequence', "
                   "token_scores: bool = False, block_scores: bool = True, fresh: bool = False, "
                   "budget_tokens: int = 0, timeout: float | None = 30.0, after: int | None = None) -> "
                   "ScoreResult"),
           "Scores the sequence, and changes nothing.");
}

}  // namespace

v1::Sequence SequenceOf(const std::string& field, nb::handle table,
                        const std::shared_ptr<SharedSession>& session) {
  v1::Sequence proto;
  const std::shared_ptr<SharedSession>* of = nullptr;
  if (nb::isinstance<PySequence>(table)) {
    const PySequence& sequence = nb::cast<const PySequence&>(table);
    Check(sequence.get().CheckUnpadded());
    proto = sequence.get().ToProto();
    of = &sequence.session();
  } else if (nb::isinstance<PyBlockTable>(table)) {
    const PyBlockTable& blocks = nb::cast<const PyBlockTable&>(table);
    proto.set_group(blocks.group);
    for (const BlockRef ref : blocks.held().refs()) proto.add_blocks(ref.Pack());
    proto.set_last_block_tokens(blocks.last_block_tokens);
    of = &blocks.held().session();
  } else {
    throw TypeErrorOf(field, table, "a LiveSequence or a BlockTable");
  }
  if (*of != session) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(field, ": blocks of another session")));
  }
  return proto;
}

void BindSequence(nb::module_& module) {
  SequenceClass sequence(
      module, "LiveSequence",
      "One sequence that an engine is generating: its blocks in order, and the keys that full ones may be\n"
      "shared under. Once tokens were dropped, keys chain in what was kept; see client/live_sequence.h.\n"
      "`with` releases it. Views of its blocks keep them held, also when a prune drops them.");
  sequence.def(
      "__init__",
      [](PySequence* self, const std::shared_ptr<SharedSession>& session, uint32_t group,
         const nb::bytes& salt, nb::handle salt_from, const std::vector<nb::bytes>& extra_keys) {
        std::vector<std::string> extra;
        for (const nb::bytes& key : extra_keys) extra.emplace_back(key.c_str(), key.size());
        new (self) PySequence(session, group, std::string(salt.c_str(), salt.size()),
                              PositionOf(salt_from, "salt_from"), std::move(extra));
      },
      nb::arg("session"), nb::kw_only(), nb::arg("group") = 0, nb::arg("salt") = nb::bytes(""),
      nb::arg("salt_from") = 0, nb::arg("extra_keys") = std::vector<nb::bytes>(),
      nb::sig("def __init__(self, session: Session, *, group: int = 0, salt: bytes = b'', salt_from: int = "
              "0, extra_keys: collections.abc.Sequence[bytes] = ()) -> None"),
      "salt, salt_from: those of Session.hasher. A salt that has not counted by then counts from the first\n"
      "pruning on.");
  BindGrowing(sequence);
  BindTable(sequence);
  BindBudget(sequence);
  sequence
      .def(
          "release",
          [](PySequence& sequence, const std::string& reuse, uint32_t category) {
            sequence.Release(HintOf(reuse, category));
          },
          nb::kw_only(), nb::arg("reuse") = "unspecified", nb::arg("category") = 0,
          nb::sig("def release(self, *, reuse: Reuse = 'unspecified', category: int = 0) -> None"),
          "Gives its blocks back, with what is expected of them, as for Blocks.release. Again is nothing.\n\n"
          "A prune or compact that is not finished: with a hint FailedPreconditionError, and nothing was\n"
          "given back; without one it is waited for, 5 s at most.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> LiveSequence"))
      .def(
          "__exit__", [](PySequence& sequence, nb::args) { sequence.Release({}); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace kvpool::python
