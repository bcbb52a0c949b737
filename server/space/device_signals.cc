// What an engine tells of a sequence: checked against its shape, and where it lies.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/scoring/sequence_shape.h"
#include "server/space/device_verbs.h"
#include "server/wire/field_checks.h"

namespace kvpool {
namespace {

constexpr uint64_t kStagedAlignment = 64;

// Every value of SignalKind but the one that is refused has a line in KVPOOL_SIGNALS.
static_assert(std::size(scorers::kSignals) == v1::SignalKind_MAX);

}  // namespace

absl::StatusOr<std::vector<KvPiece>> DeviceVerbs::PiecesOf(Turn& turn, const Session& session,
                                                           const v1::Data& data, uint64_t bytes,
                                                           size_t rank) const {
  const uint64_t block_bytes = state_.facts.layout.block_bytes();
  std::vector<KvPiece> pieces;
  uint64_t at = data.offset_bytes();
  for (uint64_t left = bytes; left > 0;) {
    const BlockId block = BlockRef::Unpack(data.blocks(static_cast<int>(at / block_bytes))).id;
    const uint64_t part = std::min(left, block_bytes - at % block_bytes);
    pieces.push_back({.address = state_.growth.AddressOf(block, rank) + at % block_bytes,
                      .bytes = part,
                      .in_block = true});
    at += part;
    left -= part;
    if (pieces.size() % (Turn::kNames * kAddressesOfName) != 0) continue;
    turn.Worked(Turn::kNames);
    turn.Breathe();
    if (session.ended) return absl::AbortedError(session.end_reason);
  }
  turn.Worked(pieces.size() / kAddressesOfName);
  return pieces;
}

absl::Status DeviceVerbs::CheckInBlocks(Turn& turn, const Session& session, std::string_view field,
                                        const v1::Data& data, const ArrayShape& shape) {
  const absl::Span<const uint64_t> refs(data.blocks().data(), data.blocks_size());
  const uint64_t block_bytes = state_.facts.layout.block_bytes();
  const uint64_t there = refs.size() * block_bytes;  // It is at most 2^16 * 2^30.
  if (data.offset_bytes() % shape.element_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(field), ".offset_bytes is ",
                                                   data.offset_bytes(), "; must be a multiple of ",
                                                   shape.element_bytes));
  }
  if (data.offset_bytes() > there || there - data.offset_bytes() < shape.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        std::string(field), ": ", refs.size(), " blocks of ", block_bytes, " bytes do not hold the ",
        shape.bytes, " bytes that this sequence needs from offset ", data.offset_bytes()));
  }
  return CheckRefs(turn, session, absl::StrCat(std::string(field), ".blocks"), std::nullopt, refs);
}

absl::StatusOr<uint64_t> DeviceVerbs::StageData(Turn& turn, const Session& session, std::string_view field,
                                                const v1::Data& data, const ArrayShape& shape,
                                                StagedSignals* signals) {
  StagedArray array{.offset = signals->bytes};
  const uint64_t bytes = shape.bytes;
  const uint64_t arrays = shape.of_heads ? runners_.size() : 1;
  if (data.blocks().empty()) {
    if (data.inlined().size() != arrays * bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          std::string(field), ".inlined has ", data.inlined().size(), " bytes; this sequence needs ",
          arrays * bytes, arrays == 1 ? "" : absl::StrCat(", ", bytes, " for each of ", arrays, " ranks")));
    }
    const auto first = reinterpret_cast<uint64_t>(data.inlined().data());
    for (size_t rank = 0; rank < runners_.size(); ++rank) {
      array.by_rank.push_back({{.address = first + (shape.of_heads ? rank * bytes : 0), .bytes = bytes}});
    }
  } else {
    RETURN_IF_ERROR(CheckInBlocks(turn, session, field, data, shape));
    for (size_t rank = 0; rank < runners_.size(); ++rank) {
      ASSIGN_OR_RETURN(std::vector<KvPiece> pieces, PiecesOf(turn, session, data, bytes, rank));
      array.by_rank.push_back(std::move(pieces));
    }
  }
  signals->bytes += (bytes + kStagedAlignment - 1) / kStagedAlignment * kStagedAlignment;
  signals->arrays.push_back(std::move(array));
  return kStagingOrigin + signals->arrays.back().offset;
}

absl::Status DeviceVerbs::StageSignals(Turn& turn, const Session& session, const v1::Signals& signals,
                                       SequenceWork* work) {
  scorers::Signals& relative = work->signals.relative;
  relative.now = signals.now();
  relative.hidden_dim = signals.hidden_dim();
  RETURN_IF_ERROR(CheckRange("signals.window_queries", signals.window_queries(), 0, work->shape().tokens));
  relative.window.queries = signals.window_queries();
  for (const v1::Signal& signal : signals.signals()) {
    RETURN_IF_ERROR(StageSignal(turn, session, signals, signal, work));
  }
  return signals.has_window() ? StageWindow(turn, session, signals.window(), work) : absl::OkStatus();
}

absl::Status DeviceVerbs::StageSignal(Turn& turn, const Session& session, const v1::Signals& signals,
                                      const v1::Signal& signal, SequenceWork* work) {
  const scorers::KvShape& shape = work->shape();
  const std::string field = absl::StrCat("signals.", v1::SignalKind_Name(signal.kind()), ".data");
  scorers::Signals& relative = work->signals.relative;
  const scorers::SignalFacts& facts = *scorers::FindSignal(signal.kind());
  if (facts.shape == scorers::SignalShape::kWeights) {
    const v1::Data& data = signal.data();
    const uint64_t bytes = data.blocks().empty() ? data.inlined().size() : data.bytes();
    if (bytes == 0 || bytes % sizeof(float) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " has ", bytes, " bytes; must be a multiple of 4 above 0"));
    }
    relative.weight_count = bytes / sizeof(float);
  }
  const uint64_t layers = signal.per_layer() ? shape.layers : 1;
  const uint64_t heads = signal.per_head() ? shape.kv_heads : 1;
  const uint64_t row = relative.RowFloats(facts.shape, shape.tokens);
  ASSIGN_OR_RETURN(const uint64_t at, StageData(turn, session, field, signal.data(),
                                                {.bytes = layers * heads * row * sizeof(float),
                                                 .element_bytes = sizeof(float),
                                                 .of_heads = signal.per_head()},
                                                &work->signals));
  relative.*facts.array = {.values = reinterpret_cast<const float*>(at),
                           .layer_stride = signal.per_layer() ? heads * row : 0,
                           .head_stride = signal.per_head() ? row : 0};
  return absl::OkStatus();
}

absl::Status DeviceVerbs::StageWindow(Turn& turn, const Session& session, const v1::QueryWindow& window,
                                      SequenceWork* work) {
  const scorers::KvShape& shape = work->shape();
  scorers::QueryWindow& relative = work->signals.relative.window;
  relative.dtype =
      window.dtype() == 0 ? work->shares[0].kv.dtype : DtypeOf(static_cast<v1::Dtype>(window.dtype()));
  relative.queries = window.queries();
  relative.q_heads = window.q_heads();
  relative.scale = window.scale();
  relative.behind = window.behind();
  relative.head_stride_bytes = uint64_t{shape.k_head_dim} * scorers::BytesOf(relative.dtype);
  relative.query_stride_bytes = window.q_heads() * relative.head_stride_bytes;
  relative.layer_stride_bytes = window.queries() * relative.query_stride_bytes;
  ASSIGN_OR_RETURN(const uint64_t at, StageData(turn, session, "window.data", window.data(),
                                                {.bytes = shape.layers * relative.layer_stride_bytes,
                                                 .element_bytes = scorers::BytesOf(relative.dtype),
                                                 .of_heads = true},
                                                &work->signals));
  relative.data = reinterpret_cast<const void*>(at);
  work->signals.window = work->signals.arrays.size() - 1;
  return absl::OkStatus();
}

}  // namespace kvpool
