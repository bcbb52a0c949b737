// Policies, and the signals that they get.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "client/python/src/scoring.h"

namespace kvpool::python {

PyScorer ScorerOf(nb::handle scorer) {
  if (scorer.is_none()) return {};
  if (nb::isinstance<PyScorer>(scorer)) return nb::cast<const PyScorer&>(scorer);
  PyScorer named;
  std::string policy;
  if (!nb::try_cast(scorer, policy)) {
    throw TypeErrorOf("scorer", scorer, "a Scorer, the name of a policy, or None");
  }
  named.policy.set_name(policy);
  return named;
}

v1::Score ScoreRequestOf(nb::handle scorer, const ScoreArguments& arguments) {
  v1::Score request;
  ScorerOf(scorer).Fill(&request);
  request.set_scope(EnumOf<v1::Scope>(arguments.scope, "SCOPE_", "scope", &v1::Scope_Parse));
  request.set_token_scores(arguments.token_scores);
  request.set_block_scores(arguments.block_scores);
  request.set_budget_tokens(arguments.budget_tokens);
  request.mutable_sequence()->set_fresh(arguments.fresh);
  return request;
}

namespace {

void Add(const TokenRanges& ranges, google::protobuf::RepeatedPtrField<v1::TokenRange>* to) {
  for (const auto& [begin, end] : ranges) {
    v1::TokenRange& range = *to->Add();
    range.set_begin(begin);
    range.set_end(end);
  }
}

// The fields that Prune and Compact share.
template <typename Request>
void Fill(const WhateverScore& ranges, Request* request) {
  Add(ranges.protect, request->mutable_protect());
  if (ranges.protection != nullptr) *request->mutable_protection() = ranges.protection->proto;
  Add(ranges.discard, request->mutable_discard());
}

}  // namespace

v1::Prune PruneRequestOf(nb::handle scorer, const PruneArguments& arguments, const WhateverScore& ranges) {
  if (arguments.budget_tokens.has_value() == arguments.budget_blocks.has_value()) {
    throw StatusError(absl::InvalidArgumentError("one of budget_tokens and budget_blocks is needed"));
  }
  v1::Prune request;
  ScorerOf(scorer).Fill(&request);
  Fill(ranges, &request);
  if (arguments.budget_tokens.has_value()) request.set_budget_tokens(*arguments.budget_tokens);
  if (arguments.budget_blocks.has_value()) request.set_budget_blocks(*arguments.budget_blocks);
  request.mutable_sequence()->set_fresh(arguments.fresh);
  request.set_dry_run(arguments.dry_run);
  return request;
}

v1::Compact CompactRequestOf(nb::handle scorer, const CompactArguments& arguments,
                             const WhateverScore& ranges) {
  if (arguments.budget_tokens.has_value() == arguments.keep.has_value()) {
    throw StatusError(absl::InvalidArgumentError("one of budget_tokens and keep is needed"));
  }
  v1::Compact request;
  if (!scorer.is_none()) ScorerOf(scorer).Fill(&request);
  Fill(ranges, &request);
  if (arguments.keep.has_value()) {
    if (arguments.scope != "sequence") {
      throw StatusError(absl::InvalidArgumentError(
          absl::StrCat("scope is '", arguments.scope, "'; with keep it must not be set")));
    }
    request.mutable_keep()->mutable_positions()->Add(arguments.keep->begin(), arguments.keep->end());
  } else {
    request.set_budget_tokens(*arguments.budget_tokens);
    request.set_scope(EnumOf<v1::Scope>(arguments.scope, "SCOPE_", "scope", &v1::Scope_Parse));
  }
  request.mutable_sequence()->set_fresh(arguments.fresh);
  request.set_keep_sources(arguments.keep_sources);
  request.set_disposition(
      EnumOf<v1::Disposition>(arguments.disposition, "DISPOSITION_", "disposition", &v1::Disposition_Parse));
  if (!arguments.merge_thresholds.empty() || arguments.merge_smoothing != 0) {
    v1::MergeTerms& terms = *request.mutable_merge();
    terms.mutable_thresholds()->Add(arguments.merge_thresholds.begin(), arguments.merge_thresholds.end());
    terms.set_smoothing(arguments.merge_smoothing);
  }
  if (request.disposition() == v1::DISPOSITION_LOW || !arguments.low_blocks.empty() ||
      arguments.low_bits != 0) {
    v1::LowTerms& terms = *request.mutable_low();
    for (const BlockRef ref : arguments.low_blocks) terms.add_blocks(ref.Pack());
    terms.set_bits(arguments.low_bits);
  }
  if (arguments.less != nullptr) *request.mutable_less() = arguments.less->proto;
  request.set_heads(EnumOf<v1::Heads>(arguments.heads, "HEADS_", "heads", &v1::Heads_Parse));
  if (arguments.ada != nullptr) *request.mutable_ada() = arguments.ada->proto;
  return request;
}

void SetParams(const nb::dict& params, google::protobuf::Map<std::string, std::string>* to) {
  for (const auto& [key, value] : params) {
    std::string name;
    if (!nb::try_cast(key, name)) throw TypeErrorOf("a name in params", key, "a str");
    const bool is_bool = nb::isinstance<nb::bool_>(value);
    (*to)[name] = is_bool ? (nb::cast<bool>(value) ? "true" : "false") : nb::str(value).c_str();
  }
}

namespace {

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

// An array in blocks leased for it; see client/signals.h. Python writes it in host memory, kernels elsewhere.
class PyBlockArray {
 public:
  PyBlockArray(const nb::object& blocks, uint64_t block_bytes) : blocks_(blocks), block_bytes_(block_bytes) {}

  PyBlocks& blocks() const { return nb::cast<PyBlocks&>(blocks_); }
  nb::object object() const { return blocks_; }
  uint64_t bytes() const { return blocks().refs().size() * block_bytes_; }

  void Write(const AnyArray& values, uint64_t offset) const {
    const char* from = static_cast<const char*>(values.data());
    OnHost("written by a kernel", values.nbytes(), offset, [&](std::byte* part, size_t bytes) {
      std::memcpy(part, from, bytes);
      from += bytes;
    });
  }
  nb::bytes Read(uint64_t nbytes, uint64_t offset) const {
    std::string read;
    OnHost("read by a kernel", nbytes, offset, [&](const std::byte* part, size_t bytes) {
      read.append(reinterpret_cast<const char*>(part), bytes);
    });
    return nb::bytes(read.data(), read.size());
  }

  v1::Data Data(uint64_t offset) const {
    v1::Data data;
    for (const BlockRef ref : blocks().refs()) data.add_blocks(ref.Pack());
    data.set_offset_bytes(offset);
    return data;
  }

 private:
  // Calls part(memory, bytes) for each block's part of the range.
  template <typename Part>
  void OnHost(const char* by, uint64_t nbytes, uint64_t offset, const Part& part) const {
    const Session& session = blocks().session()->shared();
    if (!session.device_uuid().empty()) {
      throw StatusError(absl::FailedPreconditionError(
          absl::StrCat("the memory is on a GPU: it is to be ", by, ", through blocks")));
    }
    const Mapped mapped(blocks().session().get());
    if (nbytes > bytes() || offset > bytes() - nbytes) {
      throw StatusError(absl::InvalidArgumentError(
          absl::StrCat(nbytes, " bytes at offset ", offset, " of an array of ", bytes())));
    }
    for (uint64_t left = nbytes; left > 0;) {
      const uint64_t in_block = offset % block_bytes_, of_part = std::min(block_bytes_ - in_block, left);
      part(session.data(blocks().refs()[offset / block_bytes_]) + in_block, of_part);
      offset += of_part;
      left -= of_part;
    }
  }

  nb::object blocks_;
  uint64_t block_bytes_;
};

struct PySignal {
  v1::Signal proto;
  nb::object keeps;
};

// Arguments that say where in blocks an array lies, and how large it is there.
void CheckUnset(const char* field, std::optional<uint64_t> value) {
  if (!value.has_value()) return;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat(field, " is ", *value, "; it is for a BlockArray: an array has a shape")));
}
std::optional<uint64_t> IfSet(uint64_t value) { return value == 0 ? std::nullopt : std::optional(value); }

void SetInlined(const void* data, size_t bytes, v1::Data* to) { to->set_inlined(data, bytes); }

PySignal MakeSignal(const std::string& kind, nb::handle values, bool per_layer, bool per_head,
                    uint64_t offset, uint64_t bytes) {
  PySignal signal;
  signal.proto.set_kind(EnumOf<v1::SignalKind>(kind, "SIGNAL_KIND_", "kind", &v1::SignalKind_Parse));
  signal.proto.set_per_layer(per_layer);
  signal.proto.set_per_head(per_head);
  if (nb::isinstance<PyBlockArray>(values)) {
    const PyBlockArray& array = nb::cast<const PyBlockArray&>(values);
    *signal.proto.mutable_data() = array.Data(offset);
    signal.proto.mutable_data()->set_bytes(bytes);
    signal.keeps = array.object();
    return signal;
  }
  CheckUnset("offset", IfSet(offset));
  CheckUnset("nbytes", IfSet(bytes));
  FloatArray array;
  if (!nb::try_cast(values, array)) throw nb::type_error("a signal is an array of float32, or a BlockArray");
  SetInlined(array.data(), array.nbytes(), signal.proto.mutable_data());
  return signal;
}

// An array of floats, or one in blocks.
v1::Data FloatsOf(const std::string& field, nb::handle values, uint64_t offset, PyLessTerms* terms) {
  v1::Data data;
  if (nb::isinstance<PyBlockArray>(values)) {
    const PyBlockArray& array = nb::cast<const PyBlockArray&>(values);
    terms->keeps.push_back(array.object());
    return array.Data(offset);
  }
  CheckUnset(field.c_str(), IfSet(offset));
  FloatArray array;
  if (!nb::try_cast(values, array)) throw TypeErrorOf(field, values, "an array of float32, or a BlockArray");
  SetInlined(array.data(), array.nbytes(), &data);
  return data;
}

PyLessTerms MakeLessTerms(uint32_t rank, uint32_t hidden, nb::handle weights, const nb::bytes& weights_name,
                          nb::handle state, nb::handle previous, uint64_t weights_offset,
                          uint64_t state_offset, uint64_t previous_offset) {
  PyLessTerms terms;
  terms.proto.set_rank(rank);
  terms.proto.set_hidden(hidden);
  terms.proto.set_weights_name(weights_name.c_str(), weights_name.size());
  *terms.proto.mutable_weights() = FloatsOf("weights", weights, weights_offset, &terms);
  *terms.proto.mutable_state() = ArrayOf("state", state, state_offset);
  terms.keeps.push_back(nb::borrow(state));
  if (!previous.is_none()) {
    *terms.proto.mutable_previous() = FloatsOf("previous", previous, previous_offset, &terms);
  }
  return terms;
}

PyQueryWindow MakeWindow(nb::handle data, std::optional<uint32_t> queries, std::optional<uint32_t> q_heads,
                         const std::optional<std::string>& dtype_name, float scale, bool behind,
                         uint64_t offset) {
  PyQueryWindow window;
  window.proto.set_scale(scale);
  window.proto.set_behind(behind);
  if (nb::isinstance<PyBlockArray>(data)) {
    if (!queries.has_value() || !q_heads.has_value()) {
      throw StatusError(
          absl::InvalidArgumentError("a window in blocks needs queries and q_heads: blocks have no shape"));
    }
    const PyBlockArray& array = nb::cast<const PyBlockArray&>(data);
    *window.proto.mutable_data() = array.Data(offset);
    window.proto.set_queries(*queries);
    window.proto.set_q_heads(*q_heads);
    if (dtype_name.has_value()) window.proto.set_dtype(DtypeOf(*dtype_name));
    window.keeps = array.object();
    return window;
  }
  CheckUnset("queries", queries);
  CheckUnset("q_heads", q_heads);
  if (dtype_name.has_value()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("dtype is '", *dtype_name, "'; it is for a BlockArray: an array has a type")));
  }
  CheckUnset("offset", IfSet(offset));
  AnyArray array;
  if (!nb::try_cast(data, array) || array.ndim() != 4) {
    throw nb::type_error("a window is an array [layers, queries, q_heads, head_dim], or a BlockArray");
  }
  window.proto.set_queries(static_cast<uint32_t>(array.shape(1)));
  window.proto.set_q_heads(static_cast<uint32_t>(array.shape(2)));
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype == nb::dtype<float>()) {
    window.proto.set_dtype(v1::DTYPE_F32);
  } else if (dtype.bits == 16 && dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) {
    window.proto.set_dtype(v1::DTYPE_F16);
  } else if (dtype.bits == 16 && dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) {
    window.proto.set_dtype(v1::DTYPE_BF16);
  } else {
    throw nb::type_error("queries are float32, float16 or bfloat16");
  }
  SetInlined(array.data(), array.nbytes(), window.proto.mutable_data());
  return window;
}

void MakeScorer(PyScorer* self, const std::string& policy, const nb::dict& params,
                const std::vector<nb::object>& signals, const PyQueryWindow* window, float now,
                uint32_t hidden_dim, uint32_t window_queries, const std::string& over_tokens,
                const std::string& over_heads, const std::string& over_layers) {
  PyScorer scorer;
  scorer.policy.set_name(policy);
  SetParams(params, scorer.policy.mutable_params());
  for (const nb::object& object : signals) {
    if (!nb::isinstance<PySignal>(object)) {
      throw TypeErrorOf(EntryOf("signals", static_cast<size_t>(scorer.signals.signals_size())), object,
                        "a Signal");
    }
    const PySignal& signal = nb::cast<const PySignal&>(object);
    *scorer.signals.add_signals() = signal.proto;
    if (signal.keeps.is_valid()) scorer.keeps.push_back(signal.keeps);
  }
  if (window != nullptr) {
    *scorer.signals.mutable_window() = window->proto;
    if (window->keeps.is_valid()) scorer.keeps.push_back(window->keeps);
  }
  scorer.signals.set_now(now);
  scorer.signals.set_hidden_dim(hidden_dim);
  scorer.signals.set_window_queries(window_queries);
  scorer.reductions.set_over_tokens(
      EnumOf<v1::TokenReduction>(over_tokens, "TOKEN_REDUCTION_", "over_tokens", &v1::TokenReduction_Parse));
  scorer.reductions.set_over_heads(
      EnumOf<v1::PlaneReduction>(over_heads, "PLANE_REDUCTION_", "over_heads", &v1::PlaneReduction_Parse));
  scorer.reductions.set_over_layers(
      EnumOf<v1::PlaneReduction>(over_layers, "PLANE_REDUCTION_", "over_layers", &v1::PlaneReduction_Parse));
  new (self) PyScorer(std::move(scorer));
}

void BindBlockArray(nb::module_& module) {
  nb::class_<PyBlockArray>(
      module, "BlockArray",
      "Statistics or queries in blocks leased for them, which a request names instead of carrying them:\n"
      "for what is larger than 1 MiB, or written by kernels.")
      .def(
          "__init__",
          [](PyBlockArray* self, const std::shared_ptr<SharedSession>& session, uint64_t nbytes,
             Timeout timeout) {
            const uint64_t block_bytes = session->shared().layout().block_bytes();
            const nb::object blocks =
                nb::cast(session).attr("lease")((nbytes + block_bytes - 1) / block_bytes, timeout);
            new (self) PyBlockArray(blocks, block_bytes);
          },
          nb::arg("session"), nb::arg("nbytes"), nb::arg("timeout") = 30.0)
      .def_prop_ro("nbytes", &PyBlockArray::bytes)
      .def_prop_ro(
          "blocks", [](const PyBlockArray& array) { return array.object(); },
          nb::sig("def blocks(self) -> Blocks"), "Byte i is in block i // layout.block_bytes.")
      .def("write", &PyBlockArray::Write, nb::arg("values"), nb::arg("offset") = 0,
           nb::sig("def write(self, values: typing.Any, offset: int = 0) -> None"),
           "An array, on host memory.")
      .def("read", &PyBlockArray::Read, nb::arg("nbytes"), nb::arg("offset") = 0, "Bytes, on host memory.")
      .def("release", [](const PyBlockArray& array) { array.blocks().Release(std::nullopt); })
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> BlockArray"))
      .def(
          "__exit__", [](const PyBlockArray& array, nb::args) { array.blocks().Release(std::nullopt); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

void BindSignals(nb::module_& module) {
  nb::class_<PySignal>(module, "Signal",
                       "One array that an engine tells of a sequence; see Signal in score.proto.")
      .def(
          "__init__",
          [](PySignal* self, const std::string& kind, nb::handle values, bool per_layer, bool per_head,
             uint64_t offset, uint64_t nbytes) {
            new (self) PySignal(MakeSignal(kind, values, per_layer, per_head, offset, nbytes));
          },
          nb::arg("kind"), nb::arg("values"), nb::kw_only(), nb::arg("per_layer") = false,
          nb::arg("per_head") = false, nb::arg("offset") = 0, nb::arg("nbytes") = 0,
          nb::sig("def __init__(self, kind: str, values: typing.Any, *, per_layer: bool = False, per_head: "
                  "bool = False, offset: int = 0, nbytes: int = 0) -> None"),
          "`kind`: \"mass\", \"latest\", ... as SIGNAL_KIND_* in score.proto. `values`: float32,\n"
          "[layers][kv_heads][tokens] without the axes that are not set; or a BlockArray.");

  nb::class_<PyQueryWindow>(module, "QueryWindow",
                            "The last queries of a sequence, rotated as they met the keys.")
      .def(
          "__init__",
          [](PyQueryWindow* self, nb::handle data, std::optional<uint32_t> queries,
             std::optional<uint32_t> q_heads, const std::optional<std::string>& dtype, float scale,
             uint64_t offset, bool behind) {
            new (self) PyQueryWindow(MakeWindow(data, queries, q_heads, dtype, scale, behind, offset));
          },
          nb::arg("data"), nb::kw_only(), nb::arg("queries") = nb::none(), nb::arg("q_heads") = nb::none(),
          nb::arg("dtype") = nb::none(), nb::arg("scale") = 0.0f, nb::arg("offset") = 0,
          nb::arg("behind") = false,
          nb::sig("def __init__(self, data: typing.Any, *, queries: int | None = None, q_heads: int | None "
                  "= None, dtype: str | None = None, scale: float = 0.0, offset: int = 0, behind: bool = "
                  "False) -> None"),
          "[layers, queries, q_heads, head_dim]; in a BlockArray with `queries`, `q_heads` and, unless it "
          "is\n"
          "the layout's, `dtype`. `behind`: of a prompt that was run behind the sequence and is not in it,\n"
          "each of which sees all of it.");
}

void BindLessTerms(nb::module_& module) {
  nb::class_<PyLessTerms>(
      module, "LessTerms",
      "Weights and states of a compact's disposition 'less'; see LessTerms in score.proto.")
      .def(
          "__init__",
          [](PyLessTerms* self, uint32_t rank, uint32_t hidden, nb::handle weights,
             const nb::bytes& weights_name, nb::handle state, nb::handle previous, uint64_t weights_offset,
             uint64_t state_offset, uint64_t previous_offset) {
            new (self) PyLessTerms(MakeLessTerms(rank, hidden, weights, weights_name, state, previous,
                                                 weights_offset, state_offset, previous_offset));
          },
          nb::kw_only(), nb::arg("rank"), nb::arg("hidden"), nb::arg("weights"), nb::arg("weights_name"),
          nb::arg("state"), nb::arg("previous").none() = nb::none(), nb::arg("weights_offset") = 0,
          nb::arg("state_offset") = 0, nb::arg("previous_offset") = 0,
          nb::sig("def __init__(self, *, rank: int, hidden: int, weights: typing.Any, weights_name: bytes, "
                  "state: BlockArray, previous: typing.Any | None = None, weights_offset: int = 0, "
                  "state_offset: int = 0, previous_offset: int = 0) -> None"),
          "`weights`: float32, [layers][KV heads of all ranks] of W1 [k_head_dim][hidden], W2 [hidden][rank] "
          "and\n"
          "W3 [rank][rank]. `state`, where it is written, and `previous`, which is zeros if it is absent:\n"
          "float32 [layers][kv_heads][rank][v_head_dim + 1]. Arrays, but for `state`, or BlockArrays.");
}

void BindAdaTerms(nb::module_& module) {
  nb::class_<PyAdaTerms>(module, "AdaTerms",
                         "Terms of a compact's heads 'ada' or 'given'; see AdaTerms in score.proto.")
      .def(
          "__init__",
          [](PyAdaTerms* self, double least_share, uint32_t most_tokens, const std::vector<uint32_t>& counts,
             uint32_t counted_tokens, const std::vector<uint32_t>& tokens) {
            new (self) PyAdaTerms;
            self->proto.set_least_share(least_share);
            self->proto.set_most_tokens(most_tokens);
            self->proto.mutable_counts()->Assign(counts.begin(), counts.end());
            self->proto.set_counted_tokens(counted_tokens);
            self->proto.mutable_tokens()->Assign(tokens.begin(), tokens.end());
          },
          nb::kw_only(), nb::arg("least_share") = 0.0, nb::arg("most_tokens") = 0,
          nb::arg("counts") = std::vector<uint32_t>(), nb::arg("counted_tokens") = 0,
          nb::arg("tokens") = std::vector<uint32_t>(),
          nb::sig("def __init__(self, *, least_share: float = 0.0, most_tokens: int = 0, counts: "
                  "collections.abc.Sequence[int] = (), counted_tokens: int = 0, tokens: "
                  "collections.abc.Sequence[int] = ()) -> None"),
          "`least_share` of the budget stays in each head, 0: a fifth; at most `most_tokens` stay, 0: twice\n"
          "the budget, which bounds how long the sequence is. With heads 'given' instead `tokens` stay, a\n"
          "number for each plane, [layers][KV heads of all ranks]. `counts` and `counted_tokens`, which a\n"
          "LiveSequence fills in: what the last such compact of it left each head of so many tokens.");
}

void BindScorer(nb::module_& module) {
  nb::class_<PyProtection>(
      module, "Protection",
      "What stays at the ends whatever its score, in place of the policy's own defaults.")
      .def(
          "__init__",
          [](PyProtection* self, uint32_t first_tokens, uint32_t last_tokens, uint32_t first_blocks,
             uint32_t last_blocks) {
            new (self) PyProtection;
            self->proto.set_first_tokens(first_tokens);
            self->proto.set_last_tokens(last_tokens);
            self->proto.set_first_blocks(first_blocks);
            self->proto.set_last_blocks(last_blocks);
          },
          nb::kw_only(), nb::arg("first_tokens") = 0, nb::arg("last_tokens") = 0, nb::arg("first_blocks") = 0,
          nb::arg("last_blocks") = 0);

  nb::class_<PyScorer>(module, "Scorer", "A policy, what it is told, and how its scores are reduced.")
      .def("__init__", MakeScorer, nb::arg("policy") = "", nb::arg("params") = nb::dict(), nb::kw_only(),
           nb::arg("signals") = std::vector<nb::object>(), nb::arg("window").none() = nb::none(),
           nb::arg("now") = 0.0f, nb::arg("hidden_dim") = 0, nb::arg("window_queries") = 0,
           nb::arg("over_tokens") = "unspecified", nb::arg("over_heads") = "unspecified",
           nb::arg("over_layers") = "unspecified",
           nb::sig(
               "def __init__(self, policy: str = '', params: dict[str, str | float | bool] = {}, *, "
               "signals: collections.abc.Sequence[Signal] = (), window: QueryWindow | None = None, now: "
               "float = 0.0, hidden_dim: int = 0, window_queries: int = 0, over_tokens: str = "
               "'unspecified', over_heads: str = 'unspecified', over_layers: str = 'unspecified') -> None"),
           "Policies and parameters are as `kvpoolctl policies` lists them; no name: paged_eviction.");
}

}  // namespace

v1::Data ArrayOf(const std::string& field, nb::handle array, uint64_t offset) {
  if (!nb::isinstance<PyBlockArray>(array)) throw TypeErrorOf(field, array, "a BlockArray");
  return nb::cast<const PyBlockArray&>(array).Data(offset);
}

void BindScoring(nb::module_& module) {
  BindBlockArray(module);
  BindSignals(module);
  BindLessTerms(module);
  BindAdaTerms(module);
  BindScorer(module);
}

}  // namespace kvpool::python
